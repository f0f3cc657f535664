"""`ckptool ls [ROOT]`."""

from __future__ import annotations

import time
from typing import Any

import click

from ckptool.cli._options import output_options, root_choice, root_choices
from ckptool.cli._output import duration, line, show, size, table
from ckptool.core.plan import Result
from ckptool.storage.files import Place


@click.command("ls", short_help="List the checkpoints under the root.")
@root_choices
@output_options
def command(*, root: Place | None, root_option: Place | None, as_json: bool, quiet: bool) -> None:
    """List the checkpoints under ROOT: step, size, state, who wrote them and how far the data was read."""
    from ckptool.ops.ls import ls

    result = ls(root_choice(root, root_option))
    show(result, as_json=as_json, quiet=quiet, human=_show, bare=[row["name"] for row in result.details["checkpoints"]])


def _show(result: Result) -> None:
    rows = result.details["checkpoints"]
    if not rows:
        line(f"no checkpoints under {result.target}")
        return
    table(
        ["NAME", "STEP", "SIZE", "STATE", "WORLD", "DATA", "AGE"],
        [_cells(row) for row in rows],
        right=["STEP", "SIZE", "WORLD", "DATA", "AGE"],
        wrap="STATE",
    )


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        _or_dash(row["step"]),
        size(row["num_bytes"]),
        _state(row),
        _or_dash(row["world_size"]),
        _or_dash(row["consumed"]),
        _age(row["created"]),
    ]


def _state(row: dict[str, Any]) -> str:
    state = "complete" if row["complete"] else row["reason"]
    if row["pinned"] is None:
        return state
    return f"{state}, pinned{': ' + row['pinned'] if row['pinned'] else ''}"


def _age(created: float | None) -> str:
    return "-" if created is None else duration(time.time() - created)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
