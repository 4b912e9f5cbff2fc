"""The pictures of a run: partition.png, curves.png, and comparison.png for several runs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter


def partition(path: Path, table: np.ndarray, distances: np.ndarray, title: str) -> None:
    """Who holds what: each client's label mix ([clients, classes] samples), how many samples each has, and its earth
    mover's distance from the population."""
    counts, classes = table.sum(1), table.shape[1]
    shares = table / np.maximum(counts, 1)[:, None]

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    mix, sizes, distance = figure.subplots(1, 3, width_ratios=[3, 2, 2])
    image = mix.imshow(shares.T, aspect="auto", origin="lower", cmap="viridis", vmin=0, interpolation="nearest")
    mix.set(xlabel="client", ylabel="class", title="share of each class in a client's data")
    if classes <= 20:
        mix.set_yticks(range(classes))
    figure.colorbar(image, ax=mix, format=PercentFormatter(1.0, decimals=0))
    sizes.hist(counts, bins=_bins(counts), color="tab:blue", edgecolor="white")
    sizes.set(xlabel="training samples", ylabel="clients", title=f"sizes: {counts.min()} to {counts.max()}")
    distance.hist(distances, bins=np.linspace(0, 2, 41), color="tab:orange", edgecolor="white")
    distance.set(xlabel="EMD", ylabel="clients", title=f"from the population: {distances.mean():.2f} on average")
    figure.savefig(path, dpi=120)


def _bins(counts: np.ndarray) -> np.ndarray:
    """Edges around whole numbers, so that equal sizes stand as one bar in the middle."""
    low, high = int(counts.min()), int(counts.max())
    width = max(1, -(-(high - low + 1) // 30))
    return np.arange(low - 0.5, high + width + 0.5, width)


def curves(path: Path, metrics: pd.DataFrame, title: str) -> None:
    """One run over its rounds."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, fontsize=11)
    (accuracy, loss), (norms, last) = figure.subplots(2, 2)
    shown = ["test/accuracy", "train/accuracy", "sent/accuracy", "personal/accuracy_before", "personal/accuracy_after"]
    _lines(accuracy, metrics, shown, "accuracy")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    _lines(loss, metrics, ["test/loss", "train/loss", "client/loss"], "loss")
    _lines(norms, metrics, ["norm/N", "norm/E", "norm/N_server"], "length of the update")
    if "elastic/boosted_fraction" in metrics and metrics["elastic/boosted_fraction"].notna().any():
        _lines(
            last,
            metrics,
            ["elastic/boosted_fraction", "elastic/mean_zeta", "norm/N_over_E"],
            "elastic, and N/E",
        )
    else:
        _lines(last, metrics, ["norm/N_over_E"], "N/E")
    figure.savefig(path, dpi=120)


def comparison(path: Path, runs: Mapping[str, pd.DataFrame]) -> None:
    """Several runs beside each other."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, column, title in zip(
        panels,
        ("test/accuracy", "test/loss", "norm/N_over_E"),
        ("test accuracy", "test loss", "N/E"),
        strict=True,
    ):
        for name, metrics in runs.items():
            shown = metrics[["round", column]].dropna()
            axes.plot(shown["round"], shown[column], label=name, marker="." if len(shown) < 3 else "")
        _dress(axes, title)
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    if len(runs) <= 12:
        panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _lines(axes: Axes, metrics: pd.DataFrame, columns: list[str], title: str) -> None:
    for column in columns:
        shown = metrics[["round", column]].replace([np.inf, -np.inf], np.nan).dropna()
        if len(shown):
            axes.plot(shown["round"], shown[column], label=column, marker="." if len(shown) < 3 else "")
    _dress(axes, title)
    if axes.lines:
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, frameon=False)


def _dress(axes: Axes, title: str) -> None:
    axes.set(title=title)
    axes.set_xlabel("round", loc="right", labelpad=0)
    axes.grid(alpha=0.3)
