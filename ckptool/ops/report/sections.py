"""The parts of the page: for each, what it says in a sentence, its charts, and the same numbers as tables."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.plotting import figure

from ckptool.core.text import size
from ckptool.ops.diff import Difference
from ckptool.ops.report import charts, timeline
from ckptool.ops.report.contents import Contents
from ckptool.ops.report.shards import MAX_PARTS, ShardMap
from ckptool.ops.report.statistics import ValueStatistics, by_layer
from ckptool.ops.report.steps import Steps
from ckptool.ops.verify import Verification

#: Rows of a table; its caption says how many there are.
MAX_ROWS = 500

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Table:
    """`num_rows` counts all, of which `rows` are the first."""

    caption: str
    headers: tuple[str, ...]
    rows: Rows
    num_rows: int


@dataclass(frozen=True)
class Chart:
    """`described` says in words what is drawn, for those who don't see it."""

    title: str
    described: str
    figure: figure


@dataclass(frozen=True)
class Section:
    """`switch` offers the data position in place of steps."""

    anchor: str
    title: str
    summary: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    switch: bool = False


def sections(contents: Contents) -> Iterator[Section]:
    """The parts that there is something to say in, in reading order."""
    if contents.steps is not None and contents.steps.kept:
        yield _timeline(contents.steps)
    if contents.checkpoints:
        yield _checkpoints(contents)
    if contents.verification is not None:
        yield _findings(contents.verification)
    if contents.shards is not None:
        yield _shards(contents.shards)
    if contents.modules:
        yield _sizes(contents)
    if contents.tensors is not None:
        yield _values(contents.tensors)
    if contents.difference is not None:
        yield _change(contents.difference)


def _table(caption: str, headers: Sequence[str], rows: Rows, num_rows: int | None = None) -> Table:
    return Table(caption, tuple(headers), rows[:MAX_ROWS], len(rows) if num_rows is None else num_rows)


def _timeline(steps: Steps) -> Section:
    last = steps.kept[-1]
    summary = (
        f"{len(steps.kept):,} steps, the last is {last.step:,} with a loss of {_number(last.loss)}; "
        f"the job was started {_times(len(steps.attempts))}, {len(steps.checkpoints):,} checkpoints were saved."
    )
    starts: Rows = []
    before = None
    for attempt in steps.attempts:
        span = f"{attempt.first_step:,} to {attempt.last_step:,}"
        starts.append((attempt.name or "-", span, timeline.describe(attempt, before)))
        before = attempt
    drawn = tuple(
        Chart(title, f"{title} of {len(steps.kept)} steps; the table of steps has the numbers", chart)
        for title, chart in timeline.timeline_charts(steps)
    )
    tables = (
        _table("Starts of the job", ("start", "steps", "ranks"), starts),
        _table(
            "Steps",
            ("step", "data position", "loss", "grad norm", "learning rate", "tokens/s", "seconds"),
            [
                (
                    f"{step.step:,}",
                    _count(step.consumed),
                    _number(step.loss) + (" (skipped)" if step.skipped else ""),
                    _number(step.grad_norm),
                    _number(step.lr),
                    _number(step.tokens_per_second),
                    _number(step.step_seconds),
                )
                for step in _spread(steps)
            ],
            len(steps.kept),
        ),
    )
    return Section("timeline", "Timeline", summary, drawn, tables, switch=True)


def _spread(steps: Steps) -> list[Any]:
    """Steps over the whole run, evenly, when there are too many for a table; the last is among them."""
    stride = -(-len(steps.kept) // MAX_ROWS) or 1
    return steps.kept[::-1][::stride][::-1]


def _checkpoints(contents: Contents) -> Section:
    complete = sum(summary.complete for summary in contents.checkpoints)
    rows: Rows = [
        (
            summary.name,
            _count(summary.step),
            size(summary.num_bytes),
            "complete" if summary.complete else summary.reason,
            _count(summary.world_size),
            _count(summary.consumed),
            _time(summary.created),
        )
        for summary in contents.checkpoints
    ]
    headers = ("name", "step", "size", "state", "ranks", "data position", "written")
    summary = f"{len(rows):,} under the root, {complete:,} of them complete."
    return Section("checkpoints", "Checkpoints", summary, (), (_table("Checkpoints", headers, rows),))


def _findings(verification: Verification) -> Section:
    findings = verification.findings
    what = f"checked at level {verification.details['level']}"
    summary = f"{len(findings):,} findings, {what}." if findings else f"Nothing is wrong, {what}."
    rows: Rows = [(found.kind, found.message, found.file or found.tensor, found.next_step) for found in findings]
    tables = (_table("Findings", ("kind", "what", "where", "next"), rows),) if rows else ()
    return Section("verify", "Verification", summary, (), tables)


def _shards(shards: ShardMap) -> Section:
    balance = shards.imbalance
    summary = f"{shards.num_parts:,} parts of tensors in {len(shards.files):,} files." + (
        f" The fullest rank holds {balance:.2f} times the mean." if balance is not None else ""
    )
    files: Rows = [
        (
            share.file,
            "-" if share.rank is None else str(share.rank),
            size(share.num_bytes),
            f"{share.num_chunks:,}",
            f"{share.num_tensors:,}",
        )
        for share in shards.files
    ]
    parts: Rows = [
        (
            part.fqn,
            part.rows,
            part.file,
            "-" if part.rank is None else str(part.rank),
            f"{part.offset_bytes:,}",
            size(part.num_bytes),
        )
        for part in shards.parts
    ]
    drawn = (
        Chart(
            "Layers and files",
            "Bytes of each layer in each file; the tables name files and parts",
            charts.shard_chart(shards),
        ),
        Chart("Balance", "Bytes of each file; the table of files has the numbers", charts.balance_chart(shards.files)),
    )
    tables = (
        _table("Files", ("file", "rank", "size", "parts", "tensors"), files),
        Table("Parts", ("tensor", "part", "file", "rank", "at byte", "size"), parts[:MAX_PARTS], shards.num_parts),
    )
    return Section("shards", "Shard map", summary, drawn, tables)


def _sizes(contents: Contents) -> Section:
    total = sum(module.num_bytes for module in contents.modules)
    rows: Rows = [
        (module.name, size(module.num_bytes), f"{module.num_bytes / total:.1%}", f"{module.num_tensors:,}")
        for module in contents.modules
    ]
    drawn = Chart("Treemap", "Share of each module in all bytes", charts.size_chart(contents.modules))
    table = _table("Modules", ("module", "size", "share", "tensors"), rows)
    return Section("sizes", "Sizes by module", f"{size(total)} of tensors.", (drawn,), (table,))


def _values(tensors: Sequence[ValueStatistics]) -> Section:
    layers = by_layer(tensors)
    bad = [one for one in tensors if one.num_nan or one.num_inf]
    num_elements = sum(one.num_elements for one in tensors)
    summary = f"{num_elements:,} numbers in {len(tensors):,} tensors of floating point; " + (
        f"{len(bad):,} tensors have NaN or infinite ones." if bad else "none is NaN or infinite."
    )
    drawn = (
        Chart("Magnitudes", "Norm, largest and root mean square of each layer", charts.magnitude_chart(layers)),
        Chart("Histogram", "Elements of each layer by power of two", charts.histogram_chart(layers)),
    )
    first = sorted(tensors, key=lambda one: not (one.num_nan or one.num_inf))
    tables = (_statistics_table("Layers", layers), _statistics_table("Tensors", first))
    return Section("values", "Values", summary, drawn if layers else (), tables)


def _statistics_table(caption: str, named: Sequence[ValueStatistics]) -> Table:
    rows: Rows = [
        (
            one.name,
            f"{one.num_elements:,}",
            _number(one.norm),
            _number(one.root_mean_square),
            _number(one.max_abs),
            f"{one.num_zero:,}",
            f"{one.num_nan:,}",
            f"{one.num_inf:,}",
        )
        for one in named[:MAX_ROWS]
    ]
    headers = ("name", "elements", "norm", "root mean square", "largest", "zeros", "NaN", "infinite")
    return _table(caption, headers, rows, len(named))


def _change(difference: Difference) -> Section:
    facts = difference.details
    changed = [tensor for tensor in difference.tensors if not tensor.equal]
    one_sided: Rows = [(fqn, "only here") for fqn in facts["only_in_one"]]
    one_sided += [(fqn, "only in the other") for fqn in facts["only_in_other"]]
    one_sided += [(fqn, "another kind of thing") for fqn in facts["other_kind"]]
    one_sided += [(item["fqn"], f"shape {item['one']} and {item['other']}") for item in facts["other_shape"]]
    one_sided += [(fqn, "another object") for fqn in facts["other_objects"]]
    summary = (
        f"Against {facts['other']}: {len(changed):,} of {facts['num_compared']:,} tensors differ"
        f"{f', and {len(one_sided):,} names have no counterpart' if one_sided else ''}."
    )
    rows: Rows = [
        (
            tensor.fqn,
            f"{tensor.num_different:,} of {tensor.num_elements:,}",
            _number(tensor.max_abs),
            _number(tensor.relative),
            _number(tensor.cosine),
        )
        for tensor in changed
    ]
    layers: Rows = [
        (layer["layer"], f"{layer['num_different']:,}", *(_number(layer[k]) for k in ("max_abs", "relative", "cosine")))
        for layer in facts["layers"]
    ]
    chart = Chart("Change by layer", "Relative difference of each layer", charts.change_chart(facts["layers"]))
    tables = [
        _table(
            "Layers, largest change first", ("layer", "tensors that differ", "largest", "relative", "cosine"), layers
        ),
        _table("Tensors that differ", ("tensor", "elements", "largest", "relative", "cosine"), rows),
    ]
    if one_sided:
        tables.append(_table("Without counterpart", ("name", "what"), one_sided))
    return Section("change", "Change", summary, (chart,) if changed else (), tuple(tables))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _time(created: float | None) -> str:
    if created is None:
        return "-"
    return datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat(" ", "seconds")
