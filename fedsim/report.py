"""What is printed when runs end: a table of a run's result, or of a sweep's."""

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedsim import estimate
from fedsim.estimate import Forecast
from fedsim.table import Cell

LAST = "test_accuracy_last"
PERSONAL = "personal_accuracy_after"
COLUMNS = {
    "last": LAST,
    "best": "test_accuracy_best",
    "mean last 10": "test_accuracy_mean_last_10",
}


def run(folder: Path, summary: Mapping[str, Any], in_sweep: bool) -> None:
    """One run's result and where its files are; in a sweep a line, since the table of all comes at the end."""
    console = _console()
    if in_sweep:
        accuracy = f", test accuracy {_percent(summary[LAST])}" if LAST in summary else ""
        console.print(f"{summary['name']}: {summary.get('note', summary['status'])}{accuracy}", markup=False)
        return
    table = Table(title=f"{summary['name']}: {summary['status']}", title_justify="left", show_header=False)
    for title, key in COLUMNS.items():
        if key in summary:
            table.add_row(f"test accuracy, {title}", _percent(summary[key]))
    if "sent_accuracy_last" in summary:
        table.add_row("of the model sent out, last", _percent(summary["sent_accuracy_last"]))
    for moment in ("before", "after"):
        if f"personal_accuracy_{moment}" in summary:
            table.add_row(f"personal accuracy, {moment} adaptation", _percent(summary[f"personal_accuracy_{moment}"]))
    if "privacy_epsilon" in summary:
        table.add_row("epsilon spent", f"{summary['privacy_epsilon']:.2f}")
    if "test_loss_last" in summary:
        table.add_row("test loss, last", f"{summary['test_loss_last']:.4f}")
    table.add_row("rounds", str(summary["rounds"]))
    table.add_row("wall time", f"{summary['wall_time_s']:.1f} s")
    console.print(table)
    if "note" in summary:
        console.print(summary["note"])
    console.print(f"files: {_shown(folder)}  (metrics.csv, curves.png, partition.png, summary.json)", soft_wrap=True)


def preview(folder: Path, summary: Mapping[str, Any]) -> None:
    """A partition in numbers, and where its picture is."""
    console, numbers = _console(), summary["partition"]
    table = Table(title=f"{summary['name']}: {numbers['clients']:,} clients", title_justify="left")
    for title in ("", "mean", "min", "q25", "median", "q75", "max"):
        table.add_column(title, justify="right" if title else "left")
    shown = {"size": ("training samples", 1), "classes_per_client": ("classes", 1), "emd": ("EMD", 3)}
    for key, (title, digits) in shown.items():
        values = (numbers[key][q] for q in ("mean", "min", "q25", "median", "q75", "max"))
        table.add_row(title, *(f"{value:,.{digits}f}".removesuffix(".0") for value in values))
    console.print(table)
    console.print(f"Gini of the sizes {numbers['size_gini']:.3f}, fingerprint {numbers['fingerprint']}")
    console.print(f"files: {_shown(folder)}  (partition.png, clients.csv, summary.json)", soft_wrap=True)


def cells(name: str, cells: Sequence[Cell], forecasts: Iterable[Forecast]) -> None:
    """The runs of a paper's table, and what they would take."""
    console = _console()
    table = Table(title=f"{name}, scale={cells[0].scale}: {len(cells)} runs", title_justify="left")
    for title in ("row", "column", "seed", "rounds", "done"):
        table.add_column(title, justify="right" if title not in ("row", "column") else "left")
    table.add_column("still to go", justify="right")
    table.add_column("status")
    total, reasons = 0.0, dict[str, int]()
    for cell, forecast in zip(
        cells, track(forecasts, "trying", total=len(cells), console=console, transient=True), strict=True
    ):
        known = math.isfinite(forecast.seconds)
        if known:
            total, status = total + forecast.seconds, forecast.status
        else:
            status = f"impossible ({reasons.setdefault(forecast.status, len(reasons) + 1)})"
        table.add_row(
            *(cell.row, cell.column, str(cell.seed), f"{forecast.rounds:,}", f"{forecast.done:,}"),
            *(duration(forecast.seconds) if known else "-", status),
        )
    console.print(table)
    memory = f"{estimate.peak_bytes() / 2**30:.1f} GiB of memory"
    console.print(f"about {duration(total)} in all, and {memory} (from a few rounds of each kind of run, uncompiled)")
    for reason, number in reasons.items():
        console.print(f"({number}) {reason}", markup=False)
    console.print(f"folder: {_shown(cells[0].folder.parent)}", soft_wrap=True)


def filled(folder: Path) -> None:
    """A paper's table with the runs there are."""
    from fedsim.reporting import terminal, writing  # not before runs, which would wait for plotly and SciPy

    console = _console()
    terminal.tell(writing.read([str(folder)], "last").tables, console)
    console.print(f"files: {_shown(folder)}  (a folder a run; fedsim-report makes a page of them)", soft_wrap=True)


def duration(seconds: float) -> str:
    """To the precision that an estimate has."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def compare(summaries: Mapping[Path, Mapping[str, Any]]) -> None:
    """Several runs beside each other; the same as comparison.csv and comparison.png in the folder above them."""
    from fedsim import plots  # not before runs, which would wait for matplotlib

    above = Path(os.path.commonpath([folder.parent for folder in summaries]))
    table = Table(title=f"{len(summaries)} runs", title_justify="left")
    table.add_column("run", overflow="fold")
    columns = COLUMNS | ({"personal": PERSONAL} if any(PERSONAL in s for s in summaries.values()) else {})
    for title in ("status", "rounds", *columns, "seconds"):
        table.add_column(title, justify="right")
    rows, curves = [], {}
    for folder, s in summaries.items():
        accuracy = [_percent(s[key]) if key in s else "-" for key in columns.values()]
        table.add_row(s["name"], s["status"], str(s["rounds"]), *accuracy, f"{s['wall_time_s']:.1f}")
        rows.append({"run": s["name"]} | {k: v for k, v in s.items() if not isinstance(v, dict | list)})
        curves[s["name"]] = pd.read_csv(folder / "metrics.csv", dtype=float)
    pd.DataFrame(rows).to_csv(above / "comparison.csv", index=False)
    plots.comparison(above / "comparison.png", curves)
    console = _console()
    console.print(table)
    console.print(f"files: {_shown(above)}  (comparison.png, comparison.csv, a folder a run)", soft_wrap=True)


def _console() -> Console:
    """As wide as the terminal; wide enough for a table of runs where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _shown(path: Path) -> str:
    """Relative to where the user stands, if it is below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
