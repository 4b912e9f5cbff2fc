"""What the papers published: one CSV a paper, beside this file.

Columns: table, row, column (the labels of the experiment's file), metric, value, unit, where it stands, what is assumed
in reading it."""

from importlib.resources import files

import pandas as pd

from fedsim import check

COLUMNS = ("table", "row", "column", "metric", "value", "unit", "where", "assumed")


def published(paper: str) -> pd.DataFrame:
    """A paper's numbers. Labels stay text, also those that look like numbers or like nothing (0.10, NA)."""
    source = files(__name__) / f"{paper}.csv"
    if not source.is_file():
        raise check.InputError(f"no published numbers of {paper!r} (fedsim/papers/{paper}.csv)")
    with source.open(encoding="utf-8") as stream:
        numbers = pd.read_csv(stream, dtype=str, keep_default_na=False)
    if missing := [name for name in COLUMNS if name not in numbers]:
        raise check.InputError(f"fedsim/papers/{paper}.csv lacks {', '.join(missing)}")
    return numbers.assign(value=pd.to_numeric(numbers["value"]))
