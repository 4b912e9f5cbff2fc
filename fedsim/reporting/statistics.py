"""Means, paired differences and their 95 % intervals, by Student's t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

CONFIDENCE = 0.95
ROUNDING = 1e-9
"""Differences that spread less than this (in points) are equal: what is left is rounding."""


@dataclass(frozen=True)
class Estimate:
    """A mean of n numbers, or a difference of two means. With one number there is no interval: NaN."""

    n: int
    mean: float = math.nan
    sd: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    """Of the t-test against 0."""


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """One sample; of paired differences this is the paired t-test."""
    sample = np.asarray(values, dtype=float)
    n = len(sample)
    if n < 2:
        return Estimate(n, float(sample[0])) if n else Estimate(0)
    mean = float(sample.mean())
    sd = 0.0 if np.ptp(sample) < ROUNDING else float(sample.std(ddof=1))
    return _interval(n, mean, sd, sd / math.sqrt(n), n - 1)


def difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Of two samples that are not paired (Welch)."""
    first, second = estimate(a), estimate(b)
    n = min(first.n, second.n)
    mean = first.mean - second.mean
    if n < 2:
        return Estimate(n, mean)
    x, y = first.sd**2 / first.n, second.sd**2 / second.n
    freedom = (x + y) ** 2 / (x**2 / (first.n - 1) + y**2 / (second.n - 1)) if x + y else 1.0
    return _interval(n, mean, math.nan, math.sqrt(x + y), freedom)


def _interval(n: int, mean: float, sd: float, error: float, freedom: float) -> Estimate:
    if error == 0:
        return Estimate(n, mean, sd, mean, mean, 1.0 if abs(mean) < ROUNDING else 0.0)
    half = error * float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))
    return Estimate(n, mean, sd, mean - half, mean + half, 2 * float(stats.t.sf(abs(mean) / error, freedom)))
