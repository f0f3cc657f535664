"""`ckptool reshard NAME NEW`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptool.cli._options import (
    complete_name,
    dry_run_option,
    mesh_options,
    output_options,
    overwrite_option,
    root_option,
)
from ckptool.cli._output import line, show, show_plan, size
from ckptool.cli._progress import progress_on_stderr
from ckptool.core.plan import Result


@click.command("reshard", short_help="Store a checkpoint for another world size or mesh.")
@click.argument("name", shell_complete=complete_name)
@click.argument("new")
@mesh_options
@click.option("--model-only", is_flag=True, help="Only the model's weights: no optimizer state, no data position.")
@click.option("--rewrite", is_flag=True, help="Write all files anew, even when links to the old ones would do.")
@root_option
@overwrite_option
@dry_run_option
@output_options
def command(
    *,
    name: str,
    new: str,
    world_size: int | None,
    mesh: str | None,
    placements: Path | None,
    model_only: bool,
    rewrite: bool,
    root: Path | None,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write checkpoint NAME as NEW, stored for the ranks of another world size or mesh.

    Each rank then finds what it holds in its own file. Optimizer state, data position and side files come along. One
    process does it, without GPUs. Any checkpoint loads on any number of ranks without this, only slower: `ckptool plan`
    says what it costs.
    """
    from ckptool.ops.layouts import chosen_mesh
    from ckptool.ops.reshard import reshard

    with progress_on_stderr(quiet) as progress:
        result = reshard(
            name,
            new,
            mesh=chosen_mesh(world_size, mesh),
            root=root,
            placements=placements,
            model_only=model_only,
            rewrite=rewrite,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
        )
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[result.target])


def _show(result: Result) -> None:
    if result.plan is None:
        return
    if not result.executed:
        show_plan(result.plan)
        return
    how = "linked" if result.details["linked"] else f"{size(result.plan.write_bytes)} in {result.seconds:.1f} s"
    line(f"resharded to {result.target} for {result.details['world_size']} ranks ({how})")
