"""How uneven a partition is, in numbers."""

from typing import Any

import numpy as np

QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


def statistics(table: np.ndarray, sizes: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
    """Of [clients, classes] counts, the clients' training samples and their distances from the population."""
    return {
        "clients": len(sizes),
        "samples": int(sizes.sum()),
        "size": spread(sizes),
        "size_gini": round(gini(sizes), 6),
        "classes_per_client": spread((table > 0).sum(1)),
        "emd": spread(distances),
    }


def spread(values: np.ndarray) -> dict[str, float]:
    """Mean and quantiles."""
    found = {"mean": values.mean()} | {name: np.quantile(values, q) for name, q in QUANTILES.items()}
    return {name: round(float(value), 6) for name, value in found.items()}


def gini(values: np.ndarray) -> float:
    """Gini's coefficient: mean difference between two clients over twice the mean; 0 = all equal."""
    ordered, n = np.sort(values).astype(np.float64), len(values)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * ordered.sum()))
