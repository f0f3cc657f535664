"""`ckptool plan NAME`."""

from __future__ import annotations

from pathlib import Path

import click

from ckptool.cli._options import complete_name, mesh_options, output_options, root_option
from ckptool.cli._output import line, show, size, table
from ckptool.core.plan import Result
from ckptool.storage.files import Place
from ckptool.storage.store import shown_name

#: More ranks than this are not listed for people.
MAX_ROWS = 64

#: Reading this many times what the ranks hold is worth a hint.
WORTH_IT = 1.02


@click.command("plan", short_help="What each rank would read of a checkpoint.")
@click.argument("name", shell_complete=complete_name)
@mesh_options
@root_option
@output_options
def command(
    *,
    name: str,
    world_size: int | None,
    mesh: str | None,
    placements: Path | None,
    root: Place | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what each rank of a world size or mesh would read of checkpoint NAME as it is now. Nothing is written.

    Torch's own reader takes every stored chunk whole that a rank needs a part of. Where that adds up to much more than
    the ranks hold, `ckptool reshard` pays. --json gives the bytes by rank and file, --quiet the amplification alone.
    """
    from ckptool.ops.layouts import chosen_mesh
    from ckptool.ops.plan_reads import plan_reads

    result = plan_reads(name, mesh=chosen_mesh(world_size, mesh), root=root, placements=placements)
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[str(result.details["amplification"])])


def _show(result: Result) -> None:
    details = result.details
    if details["world_size"] <= MAX_ROWS:
        rows = [
            (str(r["rank"]), size(r["held_bytes"]), size(r["read_bytes"]), str(len(r["files"])))
            for r in details["ranks"]
        ]
        table(("rank", "holds", "reads", "files"), rows, right=("rank", "holds", "reads", "files"))
    line(
        f"{details['world_size']} ranks hold {size(details['held_bytes'])} and read {size(details['read_bytes'])}, "
        f"{details['amplification']:.2f} times as much"
    )
    if details["amplification"] > WORTH_IT:
        mesh = ",".join(f"{axis}={num_ranks}" for axis, num_ranks in details["mesh"].items())
        name = shown_name(click.get_current_context().params["name"])
        line(f"ckptool reshard {name} NEW --mesh {mesh} makes that 1.00")
