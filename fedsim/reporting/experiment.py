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

CLAIM_KEYS = (
    *("better", "larger", "than", "by", "column", "best_of", "row", "than_row", "metric"),
    *("about", "within", "at_most", "at_least"),
)


@dataclass(frozen=True)
class Claim:
    """A number lies between two bounds: a cell's own value, or, with `than` or `than_row`, its difference from that of
    another column or row."""

    columns: tuple[str, ...]
    """The best of them counts."""
    than: str | None
    row: str | None
    """None: every row for itself."""
    than_row: str | None
    metric: str | None
    """None: the table's first."""
    low: float
    high: float
    text: str
    larger: bool = False
    """More is meant, whether or not it is better."""

    @property
    def compares(self) -> bool:
        return self.than is not None or self.than_row is not None


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
    """Columns that take a value from another column's run (`${paired:OTHER,METRIC}`), and that other column."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """And the metric that it is the mean of."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """And the key that it is the value of."""
    claims: tuple[Claim, ...] = ()
    tolerance: float | None = None
    figures: tuple[str, ...] = ("curves",)
    axis: str = ""
    """What the numbers in its labels are."""
    numbers: pd.DataFrame | None = None
    """The paper's; None: not in the package."""
    readable: bool = True
    """Whether rows, columns and claims are those of its file."""
    notes: tuple[str, ...] = ()
    """What the report must say of it."""

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
        return PaperTable(experiment, readable=False, notes=(note,))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        note = f"the file of experiment={experiment} cannot be read as a table ({reason}); only its runs are reported."
        return PaperTable(experiment, readable=False, notes=(note,))
    try:
        return replace(table, numbers=published(table.paper))
    except (check.InputError, ValueError) as error:
        return replace(table, notes=(*table.notes, f"No comparison with the paper: {error}."))


def _read(experiment: str, table: Mapping[str, Any]) -> PaperTable:
    rows, columns = ({str(k): v for k, v in table[axis].items()} for axis in ("rows", "columns"))
    exceptions = [own for by_column in (table.get("cells") or {}).values() for own in by_column.items()]
    paired = {
        str(column): found
        for column, overrides in [*columns.items(), *exceptions]
        if (found := re.search(r"([\w.]+)=\$\{paired:([^,}]+),([^,}]+)", " ".join(map(str, overrides or ()))))
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
        {column: found[2].strip() for column, found in paired.items()},
        {column: found[3].strip() for column, found in paired.items()},
        {column: found[1] for column, found in paired.items()},
        tuple(_claim(claim) for claim in table.get("claims") or ()),
        None if tolerance is None else float(tolerance),
        tuple(map(str, table.get("figures") or ())),
        str(table.get("axis") or ""),
        notes=tuple(map(str, table.get("notes") or ())),
    )


def _claim(said: Mapping[str, Any]) -> Claim:
    """`better` or `larger` with `than`; or `column` (`best_of` several) with `than_row`, `about`, `at_most`,
    `at_least`."""
    unknown = set(said) - set(CLAIM_KEYS)
    if unknown:
        raise ValueError(f"a claim has no key {unknown.pop()!r}; known: {', '.join(CLAIM_KEYS)}")
    row, than_row, metric = (None if said.get(k) is None else str(said[k]) for k in ("row", "than_row", "metric"))
    word = "larger" if "larger" in said else "better"
    if word in said:
        column, than = str(said[word]), str(said["than"])
        low, high, text = ABOVE_ZERO, math.inf, f"{column} {word} than {than}"
        if "by" in said:
            low, text = float(said["by"]), f"{text} by {float(said['by']):g}"
        return Claim((column,), than, row, None, metric, low, high, text, larger=word == "larger")
    columns = tuple(map(str, said["best_of"])) if "best_of" in said else (str(said["column"]),)
    name = columns[0] if len(columns) == 1 else "the best column"
    if than_row is not None:
        return Claim(
            columns, None, row, than_row, metric, ABOVE_ZERO, math.inf, f"{name}: {row} better than {than_row}"
        )
    if "about" in said:
        about, within = float(said["about"]), float(said["within"])
        low, high, text = about - within, about + within, f"about {about:g} (within {within:g})"
    elif "at_most" in said:
        low, high, text = -math.inf, float(said["at_most"]), f"at most {float(said['at_most']):g}"
    else:
        low, high, text = float(said["at_least"]), math.inf, f"at least {float(said['at_least']):g}"
    return Claim(columns, None, row, None, metric, low, high, f"{name} {text}")
