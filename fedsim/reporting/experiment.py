"""A paper's table as its experiment file states it (rows, columns, claims, figures), and what was published."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import yaml

from fedsim import check
from fedsim.papers import published
from fedsim.table import specification

ABOVE_ZERO = math.ulp(0.0)
"""`better` means a difference of more than nothing."""


@dataclass(frozen=True)
class Claim:
    """A number lies between two bounds: a column's own value, or, with `than`, its difference from another column's."""

    column: str | None
    than: str | None
    row: str | None
    metric: str | None
    """None: the table's first."""
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class PaperTable:
    """What is known of an experiment besides its runs; nothing but its name, where its file is gone."""

    experiment: str
    paper: str = ""
    table: str = ""
    metrics: tuple[str, ...] = ("test accuracy",)
    seeds: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    controls: Mapping[str, str] = field(default_factory=dict)
    """Columns that take a value from another column's run (`${paired:OTHER,...}`), and that other column."""
    claims: tuple[Claim, ...] = ()
    tolerance: float | None = None
    figures: tuple[str, ...] = ("curves",)
    numbers: pd.DataFrame | None = None
    """The paper's; None: not in the package."""
    notes: tuple[str, ...] = ()

    def value(self, row: str, column: str, metric: str) -> float:
        """The paper's; NaN where it has none."""
        if self.numbers is None:
            return math.nan
        n = self.numbers
        here = n["value"][
            (n["table"] == self.table) & (n["row"] == row) & (n["column"] == column) & (n["metric"] == metric)
        ]
        return float(here.iloc[0]) if len(here) else math.nan

    @property
    def remarks(self) -> list[str]:
        """Where the numbers stand, and what is assumed in reading them; each said once."""
        if self.numbers is None:
            return []
        here = self.numbers[self.numbers["table"] == self.table]
        where, assumed = (dict.fromkeys(text for text in here[column] if text) for column in ("where", "assumed"))
        return ([f"Published in: {'; '.join(where)}."] if where else []) + [f"Assumed: {text}" for text in assumed]


def paper_table(experiment: str) -> PaperTable:
    """As conf/ has it. What cannot be read is noted, and the report is made from the cells alone."""
    try:
        table = _read(experiment, specification(experiment))
    except FileNotFoundError:
        note = f"experiment={experiment} has no file in conf/ any more; rows and columns are those of the runs."
        return PaperTable(experiment, notes=(note,))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        note = f"the file of experiment={experiment} cannot be read as a table ({reason}); only its runs are reported."
        return PaperTable(experiment, notes=(note,))
    try:
        return replace(table, numbers=published(table.paper))
    except (check.InputError, ValueError) as error:
        return replace(table, notes=(f"No comparison with the paper: {error}.",))


def _read(experiment: str, table: Mapping[str, Any]) -> PaperTable:
    rows, columns = ({str(k): v for k, v in table[axis].items()} for axis in ("rows", "columns"))
    exceptions = [own for by_column in (table.get("cells") or {}).values() for own in by_column.items()]
    controls = {
        str(column): found[1].strip()
        for column, overrides in [*columns.items(), *exceptions]
        if (found := re.search(r"\$\{paired:([^,}]+)", " ".join(map(str, overrides or ()))))
    }
    tolerance = table.get("tolerance")
    return PaperTable(
        experiment,
        str(table["paper"]),
        str(table["table"]),
        tuple(map(str, table["metrics"])),
        tuple(table["seeds"]),
        tuple(rows),
        tuple(columns),
        controls,
        tuple(_claim(claim) for claim in table.get("claims") or ()),
        None if tolerance is None else float(tolerance),
        tuple(map(str, table.get("figures") or ())),
    )


def _claim(said: Mapping[str, Any]) -> Claim:
    column, row, metric = (None if said.get(key) is None else str(said[key]) for key in ("column", "row", "metric"))
    if "better" in said:
        better, than = str(said["better"]), str(said["than"])
        return Claim(better, than, row, metric, ABOVE_ZERO, math.inf, f"{better} better than {than}")
    if "about" in said:
        about, within = float(said["about"]), float(said["within"])
        return Claim(column, None, row, metric, about - within, about + within, f"about {about:g} (within {within:g})")
    if "at_most" in said:
        return Claim(
            column, None, row, metric, -math.inf, float(said["at_most"]), f"at most {float(said['at_most']):g}"
        )
    return Claim(column, None, row, metric, float(said["at_least"]), math.inf, f"at least {float(said['at_least']):g}")
