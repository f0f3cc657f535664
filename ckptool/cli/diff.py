"""`ckptool diff A B`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptool.cli._options import complete_name, output_options, root_option
from ckptool.cli._output import line, message, show, table
from ckptool.cli._progress import counter_on_stderr
from ckptool.storage.files import Place

if TYPE_CHECKING:
    from ckptool.ops.diff import Difference
    from ckptool.ops.tensor_diff import TensorDiff

#: Rows of the tables that are shown unless --top says otherwise.
SHOWN_ROWS = 20
_NUMBERS = ["DIFFERENT", "MAX ABS", "RELATIVE", "COSINE"]


@click.command("diff", short_help="Show what differs between two checkpoints.")
@click.argument("one", metavar="A", shell_complete=complete_name)
@click.argument("other", metavar="B", shell_complete=complete_name)
@click.option("--keys", metavar="GLOB", default="*", help="Only compare tensors and objects whose name matches.")
@click.option("--top", type=click.IntRange(min=0), default=SHOWN_ROWS, show_default=True, help="Rows of each table.")
@root_option
@output_options
def command(*, one: str, other: str, keys: str, top: int, root: Place | None, as_json: bool, quiet: bool) -> int:
    """Show what differs between two checkpoints or Hugging Face folders, in any two formats and shardings.

    Names, dtypes, shapes, and per tensor the largest absolute difference, that difference relative to the largest
    number of A, and the cosine; the largest first. Ends with 0 when equal, 3 when different.
    """
    from ckptool.ops.diff import diff

    with counter_on_stderr(quiet or as_json) as progress:
        result = diff(one, other, root=root, keys=keys, progress=progress)
    bare = [tensor.fqn for tensor in result.tensors if not tensor.equal]
    show(result, as_json=as_json, quiet=quiet, human=lambda _: _show(result, top), bare=bare)
    return result.exit_code


def _show(result: Difference, top: int) -> None:
    facts = result.details
    for text in _other_differences(result):
        line(text)
    different = [tensor for tensor in result.tensors if not tensor.equal]
    if different:
        _show_table(["TENSOR", *_NUMBERS], [_tensor_cells(tensor) for tensor in different], top)
        layers = [layer for layer in facts["layers"] if layer["num_different"]]
        _show_table(["LAYER", *_NUMBERS], [_layer_cells(layer) for layer in layers], top)
        line()
    verdict = "equal" if result.equal else "different"
    line(f"{verdict}: {facts['num_equal']} of {facts['num_compared']} compared tensors are equal")


def _other_differences(result: Difference) -> Iterator[str]:
    """Everything but numbers, a line each."""
    facts = result.details
    yield from (f"only in {result.target}: {fqn}" for fqn in facts["only_in_one"])
    yield from (f"only in {facts['other']}: {fqn}" for fqn in facts["only_in_other"])
    yield from (f"a tensor on one side, an object on the other: {fqn}" for fqn in facts["other_kind"])
    for what in ("shape", "dtype"):
        yield from (f"{what}: {t['fqn']}: {t['one']} -> {t['other']}" for t in facts[f"other_{what}"])
    yield from (f"object differs: {fqn}" for fqn in facts["other_objects"])


def _show_table(headers: list[str], rows: list[list[str]], top: int) -> None:
    line()
    table(headers, rows[:top], right=_NUMBERS, wrap=headers[0])
    if len(rows) > top:
        message(f"... {len(rows) - top} more; --top {len(rows)} lists them")


def _tensor_cells(tensor: TensorDiff) -> list[str]:
    counts = f"{tensor.num_different} of {tensor.num_elements}"
    return [tensor.fqn, counts, _number(tensor.max_abs), _number(tensor.relative), _number(tensor.cosine, ".9f")]


def _layer_cells(layer: dict[str, Any]) -> list[str]:
    counts = f"{layer['num_different']} of {layer['num_tensors']}"
    numbers = [_number(layer["max_abs"]), _number(layer["relative"]), _number(layer["cosine"], ".9f")]
    return [layer["layer"], counts, *numbers]


def _number(value: float | int | None, form: str = ".3g") -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else format(value, form)
