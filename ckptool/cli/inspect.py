"""`ckptool inspect NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ckptool.cli._options import name_argument, output_options, root_option
from ckptool.cli._output import line, message, show, size, table
from ckptool.core.plan import Result
from ckptool.storage.files import Place

#: Rows of each table that are shown without --all.
SHOWN_ROWS = 20


@click.command("inspect", short_help="Show what one checkpoint holds.")
@name_argument
@root_option
@click.option("--keys", metavar="GLOB", default="*", help="Only list tensors and objects whose name matches.")
@click.option("--all", "show_all", is_flag=True, help=f"List every row, not only the first {SHOWN_ROWS}.")
@output_options
def command(*, name: str, root: Place | None, keys: str, show_all: bool, as_json: bool, quiet: bool) -> None:
    """Show what one checkpoint holds: tensors, files, objects and where it comes from. Reads no tensor data.

    NAME is a path, a name under the root (step-5000), or "latest".
    """
    from ckptool.ops.inspect import inspect

    result = inspect(name, root=root, keys=keys)
    limit = None if show_all else SHOWN_ROWS
    bare = [tensor["fqn"] for tensor in result.details["tensors"]]
    show(result, as_json=as_json, quiet=quiet, human=lambda r: _show(r, limit), bare=bare)


def _show(result: Result, limit: int | None) -> None:
    facts = result.details
    line(result.target)
    _show_origin(facts)
    line(f"{facts['num_tensors']} tensors in {facts['num_chunks']} chunks, {size(facts['num_bytes'])}")
    if facts["sections"]:
        line("sections: " + ", ".join(f"{section} {number}" for section, number in facts["sections"].items()))
    if facts["dialect"]:
        line(f"names of the model's tensors: {facts['dialect']}'s")
    if facts["wrappers"]:
        line(f"names have parts of wrappers: {', '.join(facts['wrappers'])}")
    if facts["not_understood"]:
        line(f"not understood: {facts['not_understood']}")
    for dtype, sums in facts["dtypes"].items():
        line(f"  {dtype:<14} {sums['num_tensors']} tensors, {size(sums['num_bytes'])}")
    for tensor in facts["tensors"]:
        if tensor["tied_to"]:
            line(f"  {tensor['fqn']} is tied to {tensor['tied_to']}")
    _show_table(["TENSOR", "DTYPE", "SHAPE", "CHUNKS"], [_tensor_cells(t) for t in facts["tensors"]], limit)
    _show_table(["FILE", "SIZE", "CHUNKS", "OBJECTS"], [_file_cells(f) for f in facts["files"]], limit)
    _show_table(["OBJECT"], [[fqn] for fqn in facts["objects"]], limit)


def _show_origin(facts: Mapping[str, Any]) -> None:
    provenance = facts["provenance"]
    if provenance is None:
        line("no ckptool.json: written by something else")
        return
    source = ", ".join(f"{key} {value}" for key, value in provenance["source"].items() if value)
    line(f"step {provenance['step']}, world size {provenance['world_size']}, written {provenance['created']}")
    if source:
        line(f"source: {source}")
    if provenance["naming"]:
        line(f"naming: {provenance['naming']['name']} {provenance['naming']['architecture']}")
    if facts["data_position"]:
        line(f"data: {facts['data_position'].get('consumed', '-')} units trained")


def _show_table(headers: list[str], rows: list[list[str]], limit: int | None) -> None:
    if not rows:
        return
    line()
    table(headers, rows[:limit], right=["SIZE", "CHUNKS", "OBJECTS"], wrap=headers[0])
    hidden = len(rows[limit:]) if limit else 0
    if hidden:
        message(f"... {hidden} more; --all lists them, --keys GLOB chooses")


def _tensor_cells(tensor: dict[str, Any]) -> list[str]:
    shape = "x".join(map(str, tensor["shape"])) or "scalar"
    chunks = "tied" if tensor["tied_to"] else str(tensor["num_chunks"])
    return [tensor["fqn"], tensor["dtype"], shape, chunks]


def _file_cells(file: dict[str, Any]) -> list[str]:
    return [file["name"], size(file["num_bytes"]), str(file["num_chunks"]), str(file["num_objects"])]
