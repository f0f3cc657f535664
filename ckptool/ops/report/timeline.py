"""The charts of a run over its steps, or over its data position: loss, gradient norm, learning rate, tokens/s."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bokeh.models import ColumnDataSource, NumeralTickFormatter
from bokeh.plotting import figure

from ckptool.ops.report.figures import INK, PALETTE, hover, new_figure
from ckptool.ops.report.steps import Attempt, Step, Steps

#: Points of a line. Of more steps, each stretch keeps its lowest and its highest, so that no spike is lost.
MAX_POINTS = 1500
#: Marks of checkpoints, and of starts.
MAX_MARKS = 500
#: Models of this name are those whose `x` the page switches between `step` and `consumed`.
SWITCHED = "timeline"

Value = Callable[[Step], float | None]
_CHARTS: tuple[tuple[str, Value, bool], ...] = (
    ("loss", lambda step: step.loss, False),
    ("grad norm", lambda step: step.grad_norm, True),
    ("learning rate", lambda step: step.lr, False),
    ("tokens/s", lambda step: step.tokens_per_second, False),
)


def timeline_charts(steps: Steps) -> list[tuple[str, figure]]:
    """(title, chart) of each number that any step has."""
    charts = []
    for title, value, log in _CHARTS:
        shown = [step for step in steps.kept if value(step) is not None]
        if shown:
            log = log and all(_at(value, step) > 0 for step in shown)
            charts.append((title, _chart(title, shown, value, log, steps)))
    return charts


def thin(steps: Sequence[Step], value: Value, limit: int = MAX_POINTS) -> list[Step]:
    """At most about `limit` of the steps, with the lowest and the highest of every stretch."""
    if len(steps) <= limit:
        return list(steps)
    width = -(-len(steps) * 2 // limit)
    kept: list[Step] = []
    for start in range(0, len(steps), width):
        stretch = steps[start : start + width]
        ends = {min(stretch, key=lambda s: _at(value, s)), max(stretch, key=lambda s: _at(value, s))}
        kept += sorted(ends, key=lambda s: s.step)
    return kept


def _chart(title: str, shown: Sequence[Step], value: Value, log: bool, steps: Steps) -> figure:
    chart = new_figure("step", title, log=log)
    drawn = thin(shown, value)
    chart.xaxis.formatter = NumeralTickFormatter(format="0,0")
    line = chart.line("step", "value", source=_source(drawn, value), color=PALETTE[0], line_width=1.5, name=SWITCHED)
    hover(chart, line, ("step", "@step{0,0}"), ("data position", "@consumed{0,0}"), (title, "@value{0.000000}"))
    if title == "loss":
        _mark_evaluations(chart, steps)
        _mark_checkpoints(chart, [step for step in shown if step.checkpoint_seconds][-MAX_MARKS:], value)
    _mark_attempts(chart, steps)
    if chart.legend:
        chart.legend.location = "top_right"
        chart.legend.background_fill_alpha = 0
        chart.legend.border_line_color = None
        chart.legend.label_text_color = INK
        chart.legend.orientation = "horizontal"
    return chart


def _mark_evaluations(chart: figure, steps: Steps) -> None:
    shown = [step for step in steps.kept if step.eval_loss is not None][-MAX_MARKS:]
    if shown:
        source = _source(shown, lambda step: step.eval_loss)
        marks = chart.scatter(
            "step", "value", source=source, color=PALETTE[2], size=7, name=SWITCHED, legend_label="held-out loss"
        )
        hover(chart, marks, ("step", "@step{0,0}"), ("held-out loss", "@value{0.000000}"))


def _mark_checkpoints(chart: figure, saved: Sequence[Step], value: Value) -> None:
    if saved:
        source = _source(saved, value)
        source.data["seconds"] = [step.checkpoint_seconds for step in saved]
        marks = chart.scatter(
            "step",
            "value",
            source=source,
            marker="inverted_triangle",
            color=PALETTE[1],
            size=9,
            name=SWITCHED,
            legend_label="checkpoint",
        )
        hover(chart, marks, ("checkpoint after step", "@step{0,0}"), ("saved in", "@seconds{0.0} s"))


def _mark_attempts(chart: figure, steps: Steps) -> None:
    """A vertical line where the job was started again; the first start needs none."""
    starts = steps.attempts[1:][-MAX_MARKS:]
    if not starts:
        return
    consumed = {step.step: step.consumed for step in steps.kept}
    before = steps.attempts[-len(starts) - 1 : -1]
    source = ColumnDataSource(
        {
            "step": [attempt.first_step for attempt in starts],
            "consumed": [_or_nan(consumed.get(attempt.first_step)) for attempt in starts],
            "what": [describe(attempt, last) for attempt, last in zip(starts, before, strict=True)],
        }
    )
    lines = chart.vspan(
        x="step", source=source, color=PALETTE[6], line_dash="dashed", name=SWITCHED, legend_label="started again"
    )
    hover(chart, lines, ("from step", "@step{0,0}"), ("start", "@what"))


def describe(attempt: Attempt, before: Attempt | None) -> str:
    """`8 -> 6 ranks, 3 steps trained again`."""
    ranks = "?" if attempt.world_size is None else str(attempt.world_size)
    if before is not None and before.world_size != attempt.world_size:
        ranks = f"{'?' if before.world_size is None else before.world_size} -> {ranks}"
    again = f", {attempt.num_lost} steps trained again" if attempt.num_lost else ""
    return f"{ranks} ranks{again}"


def _source(steps: Sequence[Step], value: Value) -> ColumnDataSource:
    return ColumnDataSource(
        {
            "step": [step.step for step in steps],
            "consumed": [_or_nan(step.consumed) for step in steps],
            "value": [_at(value, step) for step in steps],
        }
    )


def _at(value: Value, step: Step) -> float:
    found = value(step)
    return math.nan if found is None else found


def _or_nan(number: int | None) -> float:
    return math.nan if number is None else number
