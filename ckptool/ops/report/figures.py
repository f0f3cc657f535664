"""The look that all charts share, with Bokeh: one that is readable on white and on black."""

from __future__ import annotations

import re
from typing import Any

from bokeh.models import HoverTool
from bokeh.plotting import figure

from ckptool.core.text import one_line

#: Greys and hues of middle lightness: their contrast is above 3 on white and on the dark page.
INK = "#777777"
GRID = "#77777755"
PALETTE = ("#2b7bba", "#c8781e", "#3a9157", "#b5549f", "#7a6fd0", "#a8832b", "#cf5a52", "#2f8f93")
SCALE = ("#c6dcee", "#a9cae4", "#8bb7da", "#6ea3cf", "#5390c3", "#3f80b5", "#2f73aa", "#1f66a0")
_MATH = re.compile(r"(?<=\$)(?=\$)|(?<=\\)(?=[(\[])")


def new_figure(x_label: str, y_label: str, height: int = 220, log: bool = False, **options: Any) -> figure:
    """An empty chart as wide as the page. Nothing is drawn that needs a request to another host."""
    chart = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="box_zoom,reset,save",
        y_axis_type="log" if log else "auto",
        x_axis_label=x_label,
        y_axis_label=y_label,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=GRID,
        output_backend="canvas",
        **options,
    )
    chart.toolbar.logo = None
    chart.grid.grid_line_color = GRID
    chart.axis.axis_line_color = INK
    chart.axis.major_tick_line_color = INK
    chart.axis.minor_tick_line_color = None
    chart.axis.major_label_text_color = INK
    chart.axis.axis_label_text_color = INK
    chart.axis.axis_label_text_font_style = "normal"
    return chart


def hover(chart: figure, renderer: Any, *tooltips: tuple[str, str]) -> None:
    """Show these (label, `@column`) pairs over the marks of `renderer`; Bokeh escapes the values."""
    chart.add_tools(HoverTool(renderers=[renderer], tooltips=list(tooltips), point_policy="snap_to_data"))


def name_rows(axis: Any, names: list[str]) -> None:
    """Label the middles 0.5, 1.5, ... of an axis with names."""
    axis.ticker = [number + 0.5 for number in range(len(names))]
    axis.major_label_overrides = {number + 0.5: label(name) for number, name in enumerate(names)}


def label(text: str, limit: int = 48) -> str:
    """A name as text that Bokeh draws as it is: cut in the middle, and without the marks of a TeX formula."""
    shown = one_line(text)
    if len(shown) > limit:
        shown = f"{shown[: limit // 2]}…{shown[-(limit // 2) :]}"
    return _MATH.sub("\u200b", shown)
