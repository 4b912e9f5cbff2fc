"""The pictures of a run: partition.png, curves.png, and comparison.png for several runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter

COLUMNS = 600
"""Columns of the heat map at most: more clients than pixels would show a random few of them."""


def partition(
    path: Path, table: np.ndarray, sizes: np.ndarray, distances: np.ndarray, title: str, names: Sequence[str] = ()
) -> None:
    """Who holds what: each client's label mix ([clients, classes] counts), how many samples each has, and its earth
    mover's distance from the population. A few clients are shown in their order with their counts, many sorted by the
    class they have most of, and averaged where there are more of them than columns."""
    clients, classes = table.shape
    shares = table / np.maximum(table.sum(1), 1)[:, None]
    few = clients <= 20 and classes <= 20
    if clients > 100:
        most = shares.argmax(1)
        shares = shares[np.lexsort((-shares.max(1), most))]
    if clients > COLUMNS:
        shares = np.stack([part.mean(0) for part in np.array_split(shares, COLUMNS)])

    figure = Figure(figsize=(14, 4.2 if classes <= 40 else 6.5), layout="constrained")
    figure.suptitle(title, fontsize=11, parse_math=False)
    mix, histogram, distance = figure.subplots(1, 3, width_ratios=[3, 2, 2])
    image = mix.imshow(
        shares.T,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        norm=PowerNorm(0.5 if classes > 20 else 1, vmin=0),  # of many classes each has a small share
        interpolation="nearest",
        extent=(-0.5, clients - 0.5, -0.5, classes - 0.5),
    )
    mix.set(xlabel="client" + (", sorted by its largest class" if clients > 100 else ""), ylabel="class")
    mix.set_title("share of each class in a client's data")
    if classes <= 100 and (names or classes <= 20):
        shown = range(0, classes, 1 + classes // 70)
        mix.set_yticks(
            shown,
            [str(names[c]) if names else str(c) for c in shown],
            fontsize=9 if classes <= 20 else 5,
            parse_math=False,
        )
    if few:
        mix.set_xticks(range(clients))
        middle = shares.max() / 2  # of the colours
        for k, c in zip(*np.nonzero(table), strict=True):
            colour = "black" if shares[k, c] > middle else "white"
            mix.text(k, c, str(table[k, c]), ha="center", va="center", fontsize=6, color=colour)
    figure.colorbar(image, ax=mix, format=PercentFormatter(1.0, decimals=0))
    skewed = sizes.max() > 20 * np.median(sizes)
    bins = np.geomspace(sizes.min(), sizes.max() + 1, 31) if skewed else _bins(sizes)
    histogram.hist(sizes, bins=bins, color="tab:blue", edgecolor="white", linewidth=0.5)
    histogram.set(xlabel="training samples", ylabel="clients", xscale="log" if skewed else "linear")
    if skewed:
        histogram.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        histogram.xaxis.set_minor_formatter(NullFormatter())
    else:
        histogram.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        histogram.ticklabel_format(axis="x", useOffset=False)
    histogram.set_title(f"sizes: {sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}")
    distance.hist(distances, bins=np.linspace(0, 2, 41), color="tab:orange", edgecolor="white", linewidth=0.5)
    distance.set(xlabel="EMD", ylabel="clients", title=f"from the population: {distances.mean():.2f} on average")
    for axes in (histogram, distance):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def _bins(counts: np.ndarray) -> np.ndarray:
    """Edges around whole numbers; equal sizes stand as one bar in the middle."""
    low, high = int(counts.min()), int(counts.max())
    margin = max(2, low // 20) if high - low < 5 else 0
    width = max(1, -(-(high - low + 2 * margin + 1) // 30))
    return np.arange(low - margin - 0.5, high + margin + width + 0.5, width)


def curves(path: Path, metrics: pd.DataFrame, title: str) -> None:
    """One run over its rounds."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, fontsize=11, parse_math=False)
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
