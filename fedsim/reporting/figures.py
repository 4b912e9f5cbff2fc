"""The papers' figures, each a function from a table's runs to a chart (or None, where there is nothing to draw)."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from fedsim.reporting.board import Board
from fedsim.reporting.charts import Chart, Panel, Series
from fedsim.reporting.runs import UNITS, Run

NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
POINTS = 300
"""Of a line at most: more cannot be seen, and 25 tables must fit on a page."""


def charts(board: Board) -> tuple[list[Chart], list[str]]:
    """The figures a table asks for, and a note for each kind that is not known."""
    unknown = [
        f"Unknown figure {kind!r}; known: {', '.join(KINDS)}." for kind in board.table.figures if kind not in KINDS
    ]
    drawn = [KINDS[kind](board, kind) for kind in board.table.figures if kind in KINDS]
    return [chart for chart in drawn if chart is not None], unknown


def _curves(board: Board, kind: str) -> Chart | None:
    panels = [
        Panel(row, (*_lines(board, row, "test/accuracy", 100), *_published_level(board, row))) for row in board.rows
    ]
    return _chart(board, kind, "test accuracy", "round", "test accuracy, %", panels)


def _loss(board: Board, kind: str) -> Chart | None:
    return _over_rounds(board, kind, "test loss", "test/loss", "test loss", 1)


def _boosted(board: Board, kind: str) -> Chart | None:
    return _over_rounds(
        board, kind, "parameters with zeta > 1, mean over layers", "elastic/boosted_by_layer", "boosted, %", 100
    )


def _integrated(board: Board, kind: str) -> Chart | None:
    return _over_rounds(board, kind, "integrated norm", "norm/N_integrated", "sum of N so far", 1)


def _over_rounds(board: Board, kind: str, title: str, column: str, y: str, factor: float) -> Chart | None:
    panels = [Panel(row, tuple(_lines(board, row, column, factor))) for row in board.rows]
    return _chart(board, kind, title, "round", y, panels)


def _norms(board: Board, kind: str) -> Chart | None:
    """The server's move N and the clients' mean move E; of all layers, of the convolutional and the linear ones."""
    panels = []
    for row in board.rows:
        for part, name in (("", "all"), ("_conv", "conv"), ("_linear", "linear")):
            server = _lines(board, row, f"norm/N_server{part}", 1, " N")
            clients = _lines(board, row, f"norm/E{part}", 1, " E", "second")
            panels.append(Panel(f"{row}, {name} layers", (*server, *clients)))
    return _chart(board, kind, "N of the server and E of the clients", "round", "norm of the update", panels)


def _time(board: Board, kind: str) -> Chart | None:
    return _over(board, kind, "time", "virtual seconds", lambda run: _known(run, "time/virtual_s", "test/accuracy"))


def _work(board: Board, kind: str) -> Chart | None:
    """Methods whose rounds are not the same work: an asynchronous one has a single client's update in each."""

    def curve(run: Run) -> pd.DataFrame:
        done = run.metrics.reindex(columns=["clients/arrived"])["clients/arrived"].cumsum()
        return _known(replace(run, metrics=run.metrics.assign(done=done)), "done", "test/accuracy")

    return _over(board, kind, "work", "clients' updates", curve)


def _over(board: Board, kind: str, what: str, label: str, curve: Callable[[Run], pd.DataFrame]) -> Chart | None:
    """Accuracy against a clock. Seeds have clocks of their own: each is read off at the same moments."""
    panels = []
    for row in board.rows:
        lines = []
        for colour, column in enumerate(board.columns):
            curves = [known.to_numpy().T for run in board.runs(row, column) if len(known := curve(run))]
            if curves:
                start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
                moments = np.linspace(start, max(start, end), min(POINTS, max(len(x) for x, _ in curves)))
                values = pd.DataFrame([np.interp(moments, x, 100 * y) for x, y in curves], columns=moments)
                lines.append(_band(column, values.melt(var_name="x", value_name="y"), colour))
        panels.append(Panel(row, tuple(lines)))
    return _chart(board, kind, f"accuracy against {what}", label, "test accuracy, %", panels)


def _against(board: Board, kind: str) -> Chart | None:
    """The metric against the label that is a number: the row's, or else the column's."""
    return _by_label(board, kind, board.metric)


def _boosted_against(board: Board, kind: str) -> Chart | None:
    return _by_label(board, kind, "boosted", along="column")


def _emd(board: Board, kind: str) -> Chart | None:
    return _by_label(board, kind, "emd")


def _by_label(board: Board, kind: str, metric: str, along: str = "") -> Chart | None:
    rows, columns = positions(board.rows), positions(board.columns)
    along = along or ("column" if len(rows) < 2 <= len(columns) else "row")
    places, labels, others = (
        (rows, board.rows, board.columns) if along == "row" else (columns, board.columns, board.rows)
    )
    ticks: tuple[str, ...] = ()
    if not places:
        places, ticks = {label: float(i) for i, label in enumerate(labels)}, tuple(labels)

    def cell(label: str, other: str) -> tuple[str, str]:
        return (label, other) if along == "row" else (other, label)

    lines = []
    for colour, other in enumerate(others):
        points = [
            (places[label], value)
            for label in places
            for run in board.runs(*cell(label, other))
            if math.isfinite(value := run.value(metric, board.pick))
        ]
        published = {places[label]: board.table.value(*cell(label, other), metric) for label in places}
        if points:
            lines.append(_band(other, pd.DataFrame(points, columns=["x", "y"]), colour))
        if known := {x: published[x] for x in sorted(published) if not math.isnan(published[x])}:
            lines.append(Series(f"paper: {other}", tuple(known), tuple(known.values()), colour=colour, style="paper"))
        for i, label in enumerate(label for label in labels if label not in places):  # a baseline has no number
            ours = board.ours(*cell(label, other), metric)
            if ours.n:
                ends = (min(places.values()), max(places.values()))
                lines.append(Series(label, ends, (ours.mean,) * 2, colour=len(others) + i, style="second"))
    unit = UNITS.get(metric, "")
    y = f"{metric}, {unit}" if unit else metric
    name = board.table.axis or axis(places, along)
    chart = _chart(board, kind, metric, name, y, [Panel("", tuple(lines))], ticks)
    xs = [x for x in places.values() if x > 0]
    wide = not ticks and len(xs) == len(places) and max(xs) / min(xs) > 30
    return chart and replace(chart, log="x" if wide else "")


def _grid(board: Board, kind: str) -> Chart | None:
    """Many columns stand below each other, as in the table."""
    rows, columns = board.rows, board.columns
    cells = [[board.ours(row, column, board.metric).mean for column in columns] for row in rows]
    if len(columns) > len(rows):
        rows, columns, cells = columns, rows, [list(cell) for cell in zip(*cells, strict=True)]
    xs = tuple(float(i) for i in range(len(columns)))
    panel = Panel("", tuple(Series(row, xs, tuple(values)) for row, values in zip(rows, cells, strict=True)))
    unit = f", {UNITS[board.metric]}" if board.metric in UNITS else ""
    title = f"{board.name}: {board.metric}{unit}"
    return Chart(f"{board.slug}_{kind}", title, "", "", (panel,), ticks=tuple(columns), heat=True)


KINDS: Mapping[str, Callable[[Board, str], Chart | None]] = {
    "curves": _curves,
    "against": _against,
    "boosted": _boosted,
    "boosted_against": _boosted_against,
    "norms": _norms,
    "integrated": _integrated,
    "grid": _grid,
    "time": _time,
    "work": _work,
    "loss": _loss,
    "emd": _emd,
}


def run_curves(name: str, title: str, groups: Mapping[str, Sequence[Run]]) -> Chart:
    """Accuracy of runs that belong to no table."""
    lines = [
        _band(label, found, i)
        for i, (label, runs) in enumerate(groups.items())
        if len(found := _points(runs, "test/accuracy", 100))
    ]
    return Chart(name, f"{title}: test accuracy", "round", "test accuracy, %", (Panel("", tuple(lines)),))


def positions(labels: Iterable[str]) -> dict[str, float]:
    """The labels that have a number in them, by it (`alpha 0.5`, `5 %`); none, where two have the same."""
    found = {label: re.search(NUMBER, label) for label in labels}
    numbers = {label: float(match[0]) for label, match in found.items() if match}
    return numbers if len(set(numbers.values())) == len(numbers) else {}


def axis(labels: Iterable[str], otherwise: str) -> str:
    """What the labels have in common besides their numbers: `alpha`."""
    words = {" ".join(re.sub(NUMBER, " ", label).split()).strip(" =") for label in labels}
    return words.pop() or otherwise if len(words) == 1 else otherwise


def _chart(
    board: Board, kind: str, title: str, x: str, y: str, panels: Sequence[Panel], ticks: tuple[str, ...] = ()
) -> Chart | None:
    drawn = tuple(panel for panel in panels if any(series.style != "paper" for series in panel.series))
    return Chart(f"{board.slug}_{kind}", f"{board.name}: {title}", x, y, drawn, ticks=ticks) if drawn else None


def _lines(board: Board, row: str, column: str, factor: float, suffix: str = "", style: str = "line") -> list[Series]:
    """A line for each of the table's columns."""
    return [
        _band(label + suffix, found, colour, style)
        for colour, label in enumerate(board.columns)
        if len(found := _points(board.runs(row, label), column, factor))
    ]


def _published_level(board: Board, row: str) -> list[Series]:
    """The paper's final value as a level."""
    lengths = [int(run.rounds) for column in board.columns for run in board.runs(row, column)]
    ends = (1.0, float(max(lengths, default=1)))
    values = {column: board.table.value(row, column, "test accuracy") for column in board.columns}
    return [
        Series(f"paper: {column}", ends, (values[column],) * 2, colour=colour, style="paper")
        for colour, column in enumerate(board.columns)
        if not math.isnan(values[column])
    ]


def _points(runs: Iterable[Run], column: str, factor: float) -> pd.DataFrame:
    """(x, y) of all seeds, at most POINTS rounds of each."""
    parts = [_known(run, "round", column) for run in runs]
    found = pd.concat(
        [part.set_axis(["x", "y"], axis=1) for part in parts if len(part)] or [pd.DataFrame({"x": [], "y": []})]
    )
    rounds = np.sort(found["x"].unique())
    kept = rounds[np.unique(np.linspace(0, len(rounds) - 1, min(POINTS, len(rounds))).round().astype(int))]
    return found[found["x"].isin(kept)].assign(y=lambda f: factor * f["y"])


def _known(run: Run, x: str, y: str) -> pd.DataFrame:
    return run.metrics.reindex(columns=[x, y]).replace([np.inf, -np.inf], np.nan).dropna()


def _band(name: str, points: pd.DataFrame, colour: int, style: str = "line") -> Series:
    """Mean over seeds, and one standard deviation to each side where there are several."""
    by_x = points.astype(float).groupby("x")["y"]
    mean, sd = by_x.mean(), by_x.std(ddof=1)
    several = sd.notna().any()
    low, high = (tuple(mean + side * sd.fillna(0)) if several else () for side in (-1, 1))
    return Series(name, tuple(mean.index), tuple(mean), low, high, colour, style)
