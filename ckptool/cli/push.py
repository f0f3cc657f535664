"""`ckptool push FOLDER REPO`."""

from __future__ import annotations

import click

from ckptool.cli._options import PlaceParam, dry_run_option, output_options
from ckptool.cli._output import line, show, size
from ckptool.cli._push import push_options
from ckptool.core.plan import Result
from ckptool.storage.files import Place


@click.command("push", short_help="Push an exported folder to the Hugging Face Hub, in one commit.")
@click.argument("folder", type=PlaceParam())
@click.argument("repo")
@push_options
@click.option("--overwrite", is_flag=True, help="Replace the weights that the branch has; its history keeps them.")
@dry_run_option
@output_options
def command(
    *,
    folder: Place,
    repo: str,
    branch: str,
    private: bool,
    commit_message: str,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Push the model in FOLDER to REPO (USER/NAME) on the Hugging Face Hub.

    What is there already is not sent again, and all of it becomes visible in one commit. `ckptool export --push` does
    the same right after an export, and writes a card that says where the weights come from.
    """
    from ckptool.ops.push import push

    result = push(
        folder,
        repo,
        branch=branch,
        private=private,
        message=commit_message,
        overwrite=overwrite,
        dry_run=dry_run,
        show_progress=not quiet,
    )
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.target])


def _show(result: Result) -> None:
    if result.executed:
        line(f"pushed to {result.target} ({size(result.details['num_bytes'])} in {result.seconds:.1f} s)")
    else:
        line(f"would push {size(result.details['num_bytes'])} to {result.target}")
