"""A chart drawn: by matplotlib into a PNG, or as the plain values that plotly.js draws from."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from fedsim.reporting.charts import Chart, Panel, Series

COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#c2185b", "#7b5fb5", "#8c564b", "#e6a700", "#17a2b8", "#7f7f7f", "#9aab1e")
DASHES = {"line": ("-", "solid"), "paper": ("--", "dash"), "second": (":", "dot")}
AGAIN = (("-", "solid"), ("-.", "dashdot"), ((0, (5, 1, 1, 1, 1, 1)), "longdashdot"))
"""Of lines whose colour another one has already."""


def png(chart: Chart, path: Path) -> None:
    count = len(chart.panels)
    across = min(chart.across, count)
    down = math.ceil(count / across)
    height = 0.45 * max(len(p.series) for p in chart.panels) + 1.8 if chart.heat else 3.4 * down + 0.9
    figure = Figure(figsize=(max(6.5, 4.4 * across), height), layout="constrained")
    figure.suptitle(chart.title, fontsize=11, parse_math=False)
    grid = figure.subplots(down, across, squeeze=False)
    for axes, panel in zip(grid.flat, chart.panels, strict=False):
        axes.set_title(panel.title, fontsize=10, parse_math=False)
        (_heat if chart.heat else _panel)(axes, chart, panel)
    for axes in grid.flat[count:]:
        axes.remove()
    if not chart.heat:
        names = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
        legend = figure.legend(
            list(names.values()), list(names), loc="outside lower center", ncols=4, fontsize=8, frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    with warnings.catch_warnings():  # a letter that the font lacks is drawn as a box
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(path, dpi=120)


def _panel(axes: Axes, chart: Chart, panel: Panel) -> None:
    for series in panel.series:
        colour = COLOURS[series.colour % len(COLOURS)]
        marker = "o" if _dotted(series) else ""
        axes.plot(
            series.x,
            series.y,
            linestyle=_dash(series)[0],
            color=colour,
            label=series.name,
            marker=marker,
            markersize=4,
            linewidth=1.4,
        )
        if series.low:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(chart.x)
    if chart.x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(chart.y)
    axes.grid(alpha=0.3)
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks, fontsize=8, parse_math=False)
    for axis in chart.log:
        axes.set(**{f"{axis}scale": "log"})
        (axes.xaxis if axis == "x" else axes.yaxis).set_major_formatter(StrMethodFormatter("{x:g}"))


def _heat(axes: Axes, chart: Chart, panel: Panel) -> None:
    values = [series.y for series in panel.series]
    axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(chart.ticks)), chart.ticks, fontsize=8, parse_math=False)
    axes.set_yticks(range(len(values)), [series.name for series in panel.series], fontsize=8, parse_math=False)
    known = [v for row in values for v in row if not math.isnan(v)]
    middle = (min(known) + max(known)) / 2 if known else 0
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            text = "missing" if math.isnan(value) else f"{value:.1f}"
            colour = "grey" if math.isnan(value) else "black" if value > middle else "white"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)


def plotly(chart: Chart) -> dict[str, Any]:
    """`data` and `layout` for Plotly.newPlot."""
    across = min(chart.across, len(chart.panels))
    down = math.ceil(len(chart.panels) / across)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "title": {"text": _plain(chart.title), "font": {"size": 15}},
        "height": 150 + 34 * len(chart.panels[0].series) if chart.heat else 120 + 300 * down,
        "margin": {"l": 60, "r": 20, "t": 60, "b": 50, "pad": 4},
        "grid": {"rows": down, "columns": across, "pattern": "independent", "ygap": 0.32, "xgap": 0.14},
        "annotations": [],
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.2 / down},
        "hovermode": "closest",
    }
    named: set[str] = set()
    for i, panel in enumerate(chart.panels):
        number = "" if i == 0 else str(i + 1)
        layout[f"xaxis{number}"], layout[f"yaxis{number}"] = _axes(chart, first=i % across == 0)
        layout["annotations"].append(_title(panel.title, number))
        where = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        if chart.heat:
            data.append(_heat_trace(chart, panel) | where)
        for series in () if chart.heat else panel.series:
            data += [trace | where for trace in _traces(series, series.name not in named)]
            named.add(series.name)
    return {"data": data, "layout": layout}


def _axes(chart: Chart, first: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Panels beside each other have one name for their y axes."""
    x: dict[str, Any] = {"title": {"text": chart.x}, "automargin": True}
    y: dict[str, Any] = {"title": {"text": chart.y if first else ""}, "automargin": True}
    for letter, axis in (("x", x), ("y", y)):
        axis["type"] = "log" if letter in chart.log else "linear"
    if chart.ticks:
        x |= {"tickvals": list(range(len(chart.ticks))), "ticktext": [_plain(t) for t in chart.ticks]}
    if chart.heat:
        y |= {"autorange": "reversed", "type": "category"}
    return x, y


def _title(text: str, number: str) -> dict[str, Any]:
    place = {"xref": f"x{number} domain", "yref": f"y{number} domain", "x": 0.5, "y": 1.02, "yanchor": "bottom"}
    return {"text": _plain(text), "showarrow": False, **place}


def _heat_trace(chart: Chart, panel: Panel) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "x": list(range(len(chart.ticks))),
        "y": [_plain(series.name) for series in panel.series],
        "z": [_numbers(series.y) for series in panel.series],
        "colorscale": "Viridis",
        "texttemplate": "%{z:.1f}",
        "hovertemplate": "%{y}, %{x}: %{z:.2f}<extra></extra>",
    }


def _traces(series: Series, named: bool) -> list[dict[str, Any]]:
    colour, name = COLOURS[series.colour % len(COLOURS)], _plain(series.name)
    line = {
        "type": "scatter",
        "mode": "lines+markers" if _dotted(series) else "lines",
        "x": _numbers(series.x),
        "y": _numbers(series.y),
        "name": name,
        "legendgroup": name,
        "showlegend": named,
        "line": {"color": colour, "dash": _dash(series)[1], "width": 2},
    }
    if not series.low:
        return [line]
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": _numbers((*series.x, *reversed(series.x))),
        "y": _numbers((*series.high, *reversed(series.low))),
        "fill": "toself",
        "fillcolor": colour,
        "opacity": 0.18,
        "line": {"width": 0},
        "legendgroup": name,
        "showlegend": False,
        "hoverinfo": "skip",
    }
    return [band, line]


def _dash(series: Series) -> tuple[Any, str]:
    """For matplotlib and for plotly."""
    again = series.colour // len(COLOURS) % len(AGAIN)
    return AGAIN[again] if series.style == "line" else DASHES[series.style]


def _dotted(series: Series) -> bool:
    return len(series.x) <= 12 and not (series.style != "line" and len(set(series.y)) == 1)


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Five digits are more than a screen shows; JSON has no NaN."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def _plain(text: str) -> str:
    """Labels are text: plotly would read tags in them."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
