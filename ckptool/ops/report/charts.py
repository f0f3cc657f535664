"""The charts of one checkpoint: where its bytes lie, how large its modules are, and what its numbers look like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import squarify
from bokeh.models import ColumnDataSource, NumeralTickFormatter
from bokeh.plotting import figure
from bokeh.transform import linear_cmap, log_cmap

from ckptool.ops.report.figures import INK, PALETTE, SCALE, hover, label, name_rows, new_figure
from ckptool.ops.report.shards import FileShare, ShardMap
from ckptool.ops.report.sizes import ModuleSize
from ckptool.ops.report.statistics import LOWEST_EXPONENT, ValueStatistics

#: Layers and files that are drawn; tables beside the charts hold the same ones.
MAX_DRAWN = 300
#: Rectangles that are wide enough, of 100, for their name.
_MIN_NAMED_WIDTH = 9.0
_TREEMAP = (100.0, 60.0)


def shard_chart(shards: ShardMap) -> figure:
    """Files from left to right, layers from top to bottom; the darker, the more bytes."""
    rows = {name: number + 0.5 for number, name in enumerate(shards.row_names)}
    columns = {name: number + 0.5 for number, name in enumerate(shards.column_names)}
    cells = shards.cells
    source = ColumnDataSource(
        {
            "x": [columns[cell.files] for cell in cells],
            "y": [rows[cell.layers] for cell in cells],
            "num_bytes": [cell.num_bytes for cell in cells],
            "num_chunks": [cell.num_chunks for cell in cells],
            "files": [label(cell.files, 100) for cell in cells],
            "layers": [label(cell.layers, 100) for cell in cells],
            "parts": [label(cell.parts, 200) for cell in cells],
        }
    )
    chart = new_figure(
        "file",
        "",
        height=120 + 16 * len(rows),
        x_range=(0, max(1, len(columns))),
        y_range=(max(1, len(rows)), 0),
    )
    largest = max((cell.num_bytes for cell in cells), default=1)
    fill = linear_cmap("num_bytes", SCALE, 0, max(1, largest))
    marks = chart.rect("x", "y", 0.94, 0.9, source=source, fill_color=fill, line_color=None)
    hover(
        chart,
        marks,
        ("file", "@files"),
        ("layer", "@layers"),
        ("bytes", "@num_bytes{0,0} in @num_chunks{0,0} parts"),
        ("parts", "@parts"),
    )
    name_rows(chart.yaxis, list(shards.row_names))
    name_rows(chart.xaxis, list(shards.column_names))
    chart.xaxis.major_label_orientation = math.pi / 4
    return chart


def balance_chart(files: Sequence[FileShare]) -> figure:
    """Bytes of each file, one bar a file."""
    shown = files[:MAX_DRAWN]
    source = ColumnDataSource(
        {
            "x": [number + 0.5 for number in range(len(shown))],
            "num_bytes": [share.num_bytes for share in shown],
            "num_chunks": [share.num_chunks for share in shown],
            "file": [label(share.file, 100) for share in shown],
            "rank": ["-" if share.rank is None else str(share.rank) for share in shown],
        }
    )
    chart = new_figure("file", "bytes", y_range=(0, 1.05 * max((s.num_bytes for s in shown), default=1) or 1))
    bars = chart.vbar("x", 0.8, "num_bytes", source=source, color=PALETTE[0])
    hover(chart, bars, ("file", "@file"), ("rank", "@rank"), ("bytes", "@num_bytes{0,0}"), ("parts", "@num_chunks"))
    chart.xaxis.major_label_text_font_size = "0px"
    chart.yaxis.formatter = NumeralTickFormatter(format="0.0 bd")
    return chart


def size_chart(modules: Sequence[ModuleSize]) -> figure:
    """A treemap: the area of a module is its share of the bytes, its colour the top-level name that it belongs to."""
    width, height = _TREEMAP
    areas = squarify.normalize_sizes([module.num_bytes for module in modules], width, height)
    boxes = squarify.squarify(areas, 0, 0, width, height)
    total = sum(module.num_bytes for module in modules)
    families = {name: number for number, name in enumerate(dict.fromkeys(_family(module) for module in modules))}
    source = ColumnDataSource(
        {
            "left": [box["x"] for box in boxes],
            "right": [box["x"] + box["dx"] for box in boxes],
            "top": [box["y"] for box in boxes],
            "bottom": [box["y"] + box["dy"] for box in boxes],
            "name": [label(module.name, 100) for module in modules],
            "num_bytes": [module.num_bytes for module in modules],
            "num_tensors": [module.num_tensors for module in modules],
            "share": [module.num_bytes / total for module in modules],
            "color": [PALETTE[families[_family(module)] % len(PALETTE)] for module in modules],
            "short": [
                label(module.name, max(4, int(box["dx"] * 1.2))) if box["dx"] > _MIN_NAMED_WIDTH else ""
                for module, box in zip(modules, boxes, strict=True)
            ],
        }
    )
    chart = new_figure("", "", height=420, x_range=(0, width), y_range=(height, 0))
    marks = chart.quad(
        "left", "right", "top", "bottom", source=source, fill_color="color", line_color="#ffffff", line_alpha=0.6
    )
    chart.text(
        "left",
        "top",
        "short",
        source=source,
        text_color="white",
        text_font_size="11px",
        text_baseline="top",
        x_offset=4,
        y_offset=4,
    )
    hover(
        chart,
        marks,
        ("module", "@name"),
        ("bytes", "@num_bytes{0,0} (@share{0.0%})"),
        ("tensors", "@num_tensors{0,0}"),
    )
    chart.axis.visible = False
    chart.grid.visible = False
    return chart


def magnitude_chart(layers: Sequence[ValueStatistics]) -> figure:
    """Norm and largest magnitude of each layer, on a logarithmic axis; what is zero or infinite is left out."""
    shown = layers[:MAX_DRAWN]
    chart = new_figure("layer", "", height=260, log=True, x_range=(0, max(1, len(shown))))
    for color, title, numbers in (
        (PALETTE[0], "norm", [layer.norm for layer in shown]),
        (PALETTE[1], "largest", [layer.max_abs for layer in shown]),
        (PALETTE[2], "root mean square", [layer.root_mean_square for layer in shown]),
    ):
        source = _by_layer([layer.name for layer in shown], numbers)
        marks = chart.scatter("x", "value", source=source, color=color, size=6, legend_label=title)
        hover(chart, marks, ("layer", "@layer"), (title, "@value{0.000e+0}"))
    _plain_layers(chart)
    return chart


def histogram_chart(layers: Sequence[ValueStatistics]) -> figure:
    """Per layer, how many elements have a magnitude of each power of two."""
    shown = layers[:MAX_DRAWN]
    cells = [
        (number, bin_, count, layer)
        for number, layer in enumerate(shown)
        for bin_, count in enumerate(layer.histogram)
        if count
    ]
    source = ColumnDataSource(
        {
            "x": [number + 0.5 for number, _, _, _ in cells],
            "y": [LOWEST_EXPONENT + bin_ + 0.5 for _, bin_, _, _ in cells],
            "exponent": [LOWEST_EXPONENT + bin_ for _, bin_, _, _ in cells],
            "count": [count for _, _, count, _ in cells],
            "share": [count / layer.num_elements for _, _, count, layer in cells],
            "layer": [label(layer.name, 100) for _, _, _, layer in cells],
        }
    )
    chart = new_figure("layer", "power of two", height=320, x_range=(0, max(1, len(shown))))
    fill = log_cmap("share", SCALE, 1e-6, 1.0)
    marks = chart.rect("x", "y", 1, 1, source=source, fill_color=fill, line_color=None)
    hover(chart, marks, ("layer", "@layer"), ("magnitude from 2 to the", "@exponent"), ("elements", "@count{0,0}"))
    _plain_layers(chart)
    return chart


def change_chart(layers: Sequence[Mapping[str, Any]]) -> figure:
    """The largest difference of each layer, relative to the largest number of this checkpoint; equal layers stay empty.

    `layers` as in `Difference.details["layers"]`.
    """
    shown = layers[:MAX_DRAWN]
    chart = new_figure("layer", "relative difference", log=True, x_range=(0, max(1, len(shown))))
    source = _by_layer([layer["layer"] for layer in shown], [layer["relative"] or 0.0 for layer in shown])
    marks = chart.scatter("x", "value", source=source, color=PALETTE[3], size=7)
    hover(chart, marks, ("layer", "@layer"), ("relative difference", "@value{0.000e+0}"))
    _plain_layers(chart)
    return chart


def _by_layer(names: Sequence[str], numbers: Sequence[float]) -> ColumnDataSource:
    """Points at the layers whose number a logarithmic axis can show."""
    shown = [(i + 0.5, number, name) for i, (name, number) in enumerate(zip(names, numbers, strict=True))]
    shown = [point for point in shown if 0 < point[1] < math.inf]
    return ColumnDataSource(
        {
            "x": [x for x, _, _ in shown],
            "value": [number for _, number, _ in shown],
            "layer": [label(name, 100) for _, _, name in shown],
        }
    )


def _plain_layers(chart: figure) -> None:
    """Layers are told by hovering and by the table: there are too many for names along the axis."""
    chart.xaxis.major_label_text_font_size = "0px"
    if chart.legend:
        chart.legend.background_fill_alpha = 0
        chart.legend.border_line_color = None
        chart.legend.label_text_color = INK
        chart.legend.orientation = "horizontal"


def _family(module: ModuleSize) -> str:
    return module.name.partition(".")[0]
