"""How results look. Results go to stdout, everything else to stderr; names from checkpoints are never trusted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from ckptool.core.plan import Plan, Result
from ckptool.core.text import one_line, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Version of the object that `--json` prints. Fields are only added within a version.
JSON_VERSION = 1

Row = Sequence[str]


def show(result: Result, *, as_json: bool, quiet: bool, human: Callable[[Result], None], bare: Iterable[str]) -> None:
    """Print a result: as JSON, as bare lines (`--quiet`), or by `human`. Notes go to stderr unless quiet, but for those
    of a plan that is shown itself."""
    if not quiet and not as_json:
        in_plan = result.plan.notes if result.plan is not None and not result.executed else ()
        for note in result.notes:
            if note not in in_plan:
                message(f"note: {note}")
    if as_json:
        click.echo(json.dumps({"version": JSON_VERSION, **result.to_json()}, indent=2, ensure_ascii=False))
    elif quiet:
        for line in bare:
            click.echo(one_line(line))
    else:
        human(result)


def show_error(kind: str, text: str, hint: str, exit_code: int) -> None:
    """Print the object that stands for a result when there is none."""
    error = {"kind": kind, "message": text, "hint": hint, "exit_code": exit_code}
    click.echo(json.dumps({"version": JSON_VERSION, "error": error}, indent=2, ensure_ascii=False))


def message(text: str) -> None:
    """A line for the person at the keyboard, on stderr."""
    click.echo(one_line(text), err=True)


def line(text: str = "") -> None:
    """A line of the result, on stdout."""
    click.echo(one_line(text))


def table(headers: Row, rows: Iterable[Row], *, right: Iterable[str] = (), wrap: str = "") -> None:
    """Print a table on stdout: in a terminal fitted to its width, elsewhere aligned and never cut.

    `right` names the columns of numbers, `wrap` the one column that may be folded when the terminal is narrow.
    """
    cells = [[one_line(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        _plain_table(headers, cells, set(right))
        return
    console().print(_rich_table(headers, cells, set(right), wrap))


def console() -> Console:
    """A terminal on stdout. With NO_COLOR set (https://no-color.org) nothing is styled at all, bold included."""
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(highlight=False, markup=False, emoji=False, color_system=None if plain else "auto")


def _plain_table(headers: Row, rows: list[list[str]], right: set[str]) -> None:
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in [headers, *rows]:
        cells = [
            cell.rjust(width) if header in right else cell.ljust(width)
            for header, cell, width in zip(headers, row, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _rich_table(headers: Row, rows: list[list[str]], right: set[str], wrap: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    view = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        view.add_column(header, justify="right" if header in right else "left", no_wrap=header != wrap, overflow="fold")
    for row in rows:
        view.add_row(*(Text(cell) for cell in row))
    return view


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """What a plan says, as (label, value) pairs in reading order."""
    facts = plan.to_json()
    pairs = [
        ("from", plan.source),
        ("to", plan.target),
        ("tensors", f"{facts['num_tensors']} in {facts['num_chunks']} chunks"),
        ("read", size(plan.read_bytes)),
        ("write", size(plan.write_bytes)),
        ("files", f"{facts['num_files']}, {plan.num_workers} at a time"),
        ("memory", f"{size(plan.peak_bytes)} of buffers"),
        ("disk", f"{size(plan.disk_bytes)} needed"),
    ]
    return pairs + [("note", note) for note in plan.notes]


def show_plan(plan: Plan) -> None:
    """Print a plan on stdout, for `--dry-run`."""
    line(f"{plan.verb} would do this (nothing was written):")
    for label, value in plan_lines(plan):
        line(f"  {label:<8} {value}")


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `5 h`, `12 d`."""
    for unit_seconds, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_seconds:
            return f"{seconds / unit_seconds:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
