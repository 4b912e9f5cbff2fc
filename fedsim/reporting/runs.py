"""One run as the report sees it, and the numbers of a paper's table taken from it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedsim.folder import VOLATILE_KEYS, accuracies
from fedsim.metrics import METRICS
from fedsim.results import Results
from fedsim.table import UNCHANGED

PICKS = ("last", "best", "mean_last_10")
"""Which round's accuracy is meant; papers seldom say."""

UNITS = {"test accuracy": "%", "train accuracy": "%", "personal accuracy": "%", "boosted": "%", "traffic": "models"}
FORMATS = {"emd": ".3f", "loss": ".4g"}
LOWER_IS_BETTER = ("loss", "emd", "traffic")

SPLIT = ("dataset", "partition", "shared_data")
"""Groups that decide who holds what."""


@dataclass(frozen=True)
class Run:
    """A run with its curves."""

    about: Mapping[str, Any]
    """Its row of `Results.runs`, without what it does not have."""
    metrics: pd.DataFrame
    clients: pd.DataFrame

    @property
    def seed(self) -> int | None:
        return int(self.about["seed"]) if "seed" in self.about else None

    @property
    def status(self) -> str:
        return str(self.about["status"])

    @property
    def rounds(self) -> int:
        return int(self.about["rounds"])

    @property
    def asked(self) -> int:
        return int(self.about["rounds_asked"])

    @property
    def data(self) -> tuple[Any, Any] | None:
        """Fingerprints of the samples and of who holds which; None where they are not known."""
        split = self.about.get("partition_fingerprint")
        return (self.about.get("data_fingerprint"), split) if split else None

    @property
    def split(self) -> dict[str, Any]:
        """The values that decide who holds what."""
        return {k: v for k, v in self.about.items() if k.partition(".")[0] in SPLIT and not k.endswith("_dir")}

    @property
    def settings(self) -> dict[str, Any]:
        """The values of its config that make the experiment what it is."""
        values = ((k, v) for k, v in self.about.items() if "." in k and k not in VOLATILE_KEYS)
        return {k: v for k, v in values if not re.match(UNCHANGED, k)}

    def value(self, metric: str, pick: str = "last", upto: int | None = None) -> float:
        """A paper's metric in its unit (percent, models ...), after all rounds or after `upto`; NaN: not known. A run
        that diverged has no result: its last good accuracy would flatter it."""
        if self.status == "diverged":
            return math.nan
        rows, known = self.metrics, self.about
        if upto is not None:
            rows = rows[rows["round"] <= upto]
            known = accuracies(rows.reindex(columns=list(METRICS)))
        if metric in ("test accuracy", "train accuracy"):
            return 100 * _number(known.get(f"{metric.split()[0]}_accuracy_{pick}"))
        if metric == "personal accuracy":
            return 100 * _number(known.get("personal_accuracy_after"))
        if metric == "loss":
            return _number(known.get("test_loss_last"))
        if metric == "boosted":
            return 100 * _mean(rows, "elastic/boosted_by_layer")
        if metric == "traffic":
            return self._traffic(rows)
        return _mean(self.clients, "emd") if metric == "emd" else _mean(rows, metric)

    def _traffic(self, rows: pd.DataFrame) -> float:
        """Models a client exchanges in a round. What is sent out to it is one, or two (SCAFFOLD): that number is known
        from the parameters, and then the bytes of one, which has buffers too and may grow, need not be."""
        parts = ("comm/down_bytes", "comm/up_bytes", "clients/arrived")
        if not all(part in rows for part in parts):
            return math.nan
        down, up, clients = (float(rows[part].sum()) for part in parts)
        one = 4 * float(self.about.get("parameters", 0)) * clients
        return max(1, round(down / one)) * (down + up) / down if one and down else math.nan


def all_runs(results: Results) -> list[Run]:
    """Every run with its own part of the tables."""
    metrics = dict(list(results.metrics.groupby("run", sort=False)))
    clients = dict(list(results.clients.groupby("run", sort=False)))
    return [
        Run(
            {str(k): v for k, v in about.items() if isinstance(v, list | dict) or not pd.isna(v)},
            metrics.get(about["run"], results.metrics.iloc[:0]),
            clients.get(about["run"], results.clients.iloc[:0]),
        )
        for about in results.runs.astype(object).to_dict("records")
    ]


def shown(value: float, metric: str, signed: bool = False) -> str:
    """With the digits that papers give; a dash where nothing is known."""
    return "-" if math.isnan(value) else f"{value:{'+' if signed else ''}{FORMATS.get(metric, '.2f')}}"


def _mean(rows: pd.DataFrame, column: str) -> float:
    return float(rows[column].mean()) if column in rows and rows[column].notna().any() else math.nan


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
