"""`ckptool copy A B`."""

from __future__ import annotations

import click

from ckptool.cli._options import Rate, complete_name, dry_run_option, output_options, overwrite_option, root_option
from ckptool.cli._output import line, show, show_plan, size
from ckptool.cli._progress import progress_on_stderr
from ckptool.core.plan import Result
from ckptool.storage.files import Place


@click.command("copy", short_help="Copy a checkpoint, and read the copy back.")
@click.argument("source", metavar="A", shell_complete=complete_name)
@click.argument("target", metavar="B")
@click.option("--model-only", is_flag=True, help="Only the model's weights: no optimizer state, no data position.")
@click.option(
    "--max-rate",
    type=Rate(),
    default=None,
    help="Read, and send to a store, no more than so many bytes a second: 100MB/s.",
)
@root_option
@overwrite_option
@dry_run_option
@output_options
def command(
    *,
    source: str,
    target: str,
    model_only: bool,
    max_rate: int | None,
    root: Place | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Copy checkpoint A to B, a path or a name under the root, and read back from the disk what was written.

    A's bytes are compared with its digests on the way, so a damaged checkpoint is not copied; where A has none (another
    trainer's, safetensors) they are copied as they are. B appears when it is complete. A copy that was interrupted goes
    on from the files that it had finished.
    """
    from ckptool.ops.copy import copy

    with progress_on_stderr(quiet) as progress:
        result = copy(
            source,
            target,
            root=root,
            model_only=model_only,
            overwrite=overwrite,
            dry_run=dry_run,
            max_bytes_per_s=max_rate or 0,
            progress=progress,
        )
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.target])


def _show(result: Result) -> None:
    if result.plan is not None and not result.executed:
        show_plan(result.plan)
    elif result.plan is not None:
        line(f"copied to {result.target} ({size(result.plan.write_bytes)} in {result.seconds:.1f} s, read back)")
