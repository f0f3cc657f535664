"""`ckptool reshard NAME NEW`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptool.cli._conversion import Conversion, conversion_options
from ckptool.cli._options import (
    complete_name,
    mesh_options,
    root_option,
)
from ckptool.core.text import counted
from ckptool.storage.files import Place


@click.command("reshard", short_help="Store a checkpoint for another world size or mesh.")
@click.argument("name", shell_complete=complete_name)
@click.argument("new")
@mesh_options
@click.option("--model-only", is_flag=True, help="Only the model's weights: no optimizer state, no data position.")
@click.option("--rewrite", is_flag=True, help="Write all files anew, even when links to the old ones would do.")
@root_option
@conversion_options
def command(
    *,
    name: str,
    new: str,
    world_size: int | None,
    mesh: str | None,
    placements: Path | None,
    model_only: bool,
    rewrite: bool,
    root: Place | None,
    conversion: Conversion,
) -> None:
    """Write checkpoint NAME as NEW, stored for the ranks of another world size or mesh.

    Each rank then finds what it holds in its own file. Optimizer state, data position and side files come along. It
    needs no GPUs. Any checkpoint loads on any number of ranks without this, only slower: `ckptool plan`
    says what it costs.
    """
    from ckptool.ops.layouts import chosen_mesh
    from ckptool.ops.reshard import reshard

    with conversion.arguments() as arguments:
        result = reshard(
            name,
            new,
            mesh=chosen_mesh(world_size, mesh),
            root=root,
            placements=placements,
            model_only=model_only,
            rewrite=rewrite,
            **arguments,
        )
    done = f"resharded to {result.target} for {counted(result.details['world_size'], 'rank')}"
    conversion.show(result, done, "linked" if result.details["linked"] else "")
