"""What is printed when runs end: a table of a run's result, or of a sweep's."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from fedsim import plots

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


def compare(summaries: Mapping[Path, Mapping[str, Any]]) -> None:
    """Several runs beside each other; the same as comparison.csv and comparison.png in the folder above them."""
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
