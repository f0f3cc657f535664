"""`ckptool export NAME --to hf|torch`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptool.cli._options import (
    Size,
    dry_run_option,
    dtype_option,
    name_argument,
    output_options,
    overwrite_option,
    root_option,
)
from ckptool.cli._output import line, show, show_plan, size
from ckptool.cli._progress import progress_on_stderr
from ckptool.core.plan import Result


@click.command("export", short_help="Write a checkpoint as a Hugging Face folder or one .pt file.")
@name_argument
@click.option(
    "--to",
    type=click.Choice(["hf", "torch"]),
    default="hf",
    show_default=True,
    help="hf: a folder that from_pretrained loads (model weights only). torch: one torch.save file with everything.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="PATH", help="Where to write.")
@dtype_option
@click.option(
    "--max-shard-size", type=Size(), default="5GB", show_default=True, help="Largest safetensors file (with --to hf)."
)
@click.option(
    "--engine",
    type=click.Choice(["stream", "torch"]),
    default="stream",
    show_default=True,
    help="stream: never the whole model in memory. torch: torch's own dcp_to_torch_save, all in memory.",
)
@root_option
@click.option(
    "--untie", is_flag=True, help="Tied tensors are written under each of their names, and the config says so."
)
@click.option("--keys", multiple=True, metavar="GLOB", help="Only tensors whose name in the checkpoint matches.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Without tensors whose name in the checkpoint matches.")
@overwrite_option
@dry_run_option
@output_options
def command(
    *,
    name: str,
    to: str,
    out: Path | None,
    dtype: str,
    max_shard_size: int,
    engine: str,
    untie: bool,
    keys: tuple[str, ...],
    exclude: tuple[str, ...],
    root: Path | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a checkpoint as a Hugging Face folder or as one .pt file.

    NAME is a path, a name under the root (step-5000), or "latest".
    """
    from ckptool.ops.export import export

    with progress_on_stderr(quiet) as progress:
        result = export(
            name,
            to=to,
            out=out,
            dtype=dtype,
            max_shard_bytes=max_shard_size,
            engine=engine,
            untie=untie,
            keys=keys,
            exclude=exclude,
            root=root,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
        )
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.target])


def _show(result: Result) -> None:
    if result.plan is not None and not result.executed:
        show_plan(result.plan)
        return
    written = f" ({size(result.plan.write_bytes)} in {result.seconds:.1f} s)" if result.plan else ""
    line(f"exported to {result.target}{written}")
