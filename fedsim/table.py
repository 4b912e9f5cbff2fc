"""A paper's table: an experiment file with a section `table`, composed into runs, one for each row, column and seed."""

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import pandas as pd
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedsim import check
from fedsim.overrides import CONF, explain, folder_name, values
from fedsim.scale import SCALES, rescale

AXES = ("row", "column", "seed", "scale")
"""Typed like keys (`seed=0,1 row=MNIST scale=short`): they choose among a table's cells and do not name its folder,
but for the scale, which is another table."""

UNCHANGED = r"(device|data_dir|cache_dir|overwrite|checkpoint|logger|hydra|engine|eval)(?=[.=@]|$)"
"""Keys that leave the experiment what it is."""

KEYS = (
    *("paper", "table", "metrics", "seeds", "rows", "columns", "cells", "short", "claims", "tolerance", "figures"),
    *("axis", "notes"),
)


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    experiment: str
    row: str
    column: str
    scale: str
    seed: int
    folder: Path
    config: DictConfig
    """Composed, not resolved: a value may be taken from another cell's run."""
    choices: Mapping[str, str]
    overrides: Sequence[str]
    changes: Sequence[str]
    """What was typed and makes it another experiment than the paper's."""

    @property
    def name(self) -> str:
        return f"{self.row}, {self.column}, seed {self.seed}" + ("" if self.scale == "full" else f" ({self.scale})")

    @property
    def place(self) -> dict[str, str]:
        """Where its result stands, for summary.json. With changes it is another table, as at another scale."""
        scale = ", ".join([self.scale, *self.changes])
        return {"experiment": self.experiment, "row": self.row, "column": self.column, "scale": scale}

    def beside(self, column: str) -> Path:
        """The run of the same row and seed in another column."""
        return self.folder.with_name(cell_folder(self.row, column, self.seed))


def experiment(typed: Sequence[str]) -> str | None:
    """The table that was asked for; None: an ordinary run or sweep."""
    names = [
        n
        for o in OverridesParser.create().parse_overrides(list(typed))
        if o.key_or_group == "experiment"
        for n in values(o)
    ]
    tables = [name for name in names if is_table(name)]
    if tables and len(names) > 1:
        raise check.InputError(f"experiment={','.join(names)}: {tables[0]} is a whole table; one experiment at a time")
    return tables[0] if tables else None


def is_table(name: str) -> bool:
    path = CONF / "experiment" / f"{name}.yaml"
    return path.is_file() and "table" in (yaml.safe_load(path.read_text(encoding="utf-8")) or {})


def specification(name: str) -> dict[str, Any]:
    """The section `table` of an experiment's file, on top of that of the experiments in its defaults list."""
    content = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))
    below = [e for e in content.get("defaults", []) if isinstance(e, str) and e != "_self_"]
    merged = OmegaConf.merge(*(specification(other) for other in below), content["table"])
    return cast(dict[str, Any], OmegaConf.to_container(merged, resolve=False))


def cells(name: str, typed: Sequence[str]) -> list[Cell]:
    """Every run of the table that what was typed leaves over, in the order in which they are run: seed by seed, so that
    whole tables are there early, and a column after those it takes values from."""
    parsed = OverridesParser.create().parse_overrides(list(typed))
    axes = {str(o.key_or_group): values(o) for o in parsed if o.key_or_group in AXES}
    others = [o for o in parsed if o.key_or_group not in (*AXES, "experiment")]
    for override in others:
        if override.is_sweep_override():
            raise check.InputError(
                f"{override.input_line}: experiment={name} is a table; only row, column and seed take several values"
            )
    scale = one("scale", axes.get("scale", ["full"]), SCALES)
    rest = [cast(str, o.input_line) for o in others]
    changes = [line for line in rest if not re.match(UNCHANGED, line)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        # What was typed may be a key of some rows' groups only: each cell is given it, not the table.
        base = composed(name, [line for line in rest if re.match(r"[+~]*(table|hydra)\b", line)])
        spec = cast(dict[str, Any], OmegaConf.to_container(base.table, resolve=False))
        unknown = [key for key in spec if key not in KEYS]
        if unknown:
            raise check.BadValue(f"table.{unknown[0]}", spec[unknown[0]], f"unknown key; valid: {', '.join(KEYS)}")
        rows, columns = chosen("row", axes, spec["rows"]), chosen("column", axes, spec["columns"])
        wanted = axes.get("seed", spec["seeds"][: 1 if scale == "smoke" else None])
        seeds = list(dict.fromkeys(seed(s) for s in wanted))
        above = Path(base.hydra.sweep.dir)
        result = []
        for row, column in product(rows, columns):
            exceptions = spec.get("cells", {}).get(row, {}).get(column, [])
            given = [*spec["rows"][row], *spec["columns"][column], *exceptions, *rest]
            try:
                config = composed(name, given)
            except check.InputError as error:
                part = f" (row {row}, column {column}; row= and column= choose others)" if others else ""
                raise check.InputError(f"{error}{part}") from error
            choices = {k: v for k, v in config.hydra.runtime.choices.items() if not k.startswith("hydra/")}
            OmegaConf.set_struct(config, False)
            del config["hydra"], config["table"]
            typed_keys = {str(o.key_or_group) for o in others}
            rescale(config, choices, scale, spec.get("short", {}), typed_keys)
            for number in seeds:
                own = OmegaConf.merge(config, {"seed": number})
                assert isinstance(own, DictConfig)
                folder = above / cell_folder(row, column, number)
                said = [f"experiment={name}", *given, f"scale={scale}", f"seed={number}"]
                result.append(Cell(name, row, column, scale, number, folder, own, choices, said, changes))
    if len({cell.folder for cell in result}) < len(result):
        raise check.InputError(f"experiment={name}: two labels would share a folder; give them other names")
    return sorted(result, key=lambda cell: seeds.index(cell.seed))


def composed(name: str, overrides: Sequence[str]) -> DictConfig:
    """What Hydra composes. Groups alone take it a tenth of a second, and most cells of a table differ in values only,
    so these are put on top here, as Hydra does it."""
    lines = [f"experiment={name}", *overrides]
    try:
        parsed = OverridesParser.create().parse_overrides(lines)
        plain = [o for o in parsed if o.type == OverrideType.CHANGE and not (CONF / str(o.key_or_group)).is_dir()]
        config = copy.deepcopy(_of_groups(tuple(cast(str, o.input_line) for o in parsed if o not in plain)))
        for override in plain:
            OmegaConf.update(config, str(override.key_or_group), override.value(), merge=True)
        return config
    except (HydraException, OmegaConfBaseException) as error:
        GlobalHydra.instance().clear()  # explain() composes by itself
        raise check.InputError(explain(error, lines)) from error


@cache
def _of_groups(overrides: tuple[str, ...]) -> DictConfig:
    return compose("config", list(overrides), return_hydra_config=True)


def cell_folder(row: str, column: str, number: int) -> str:
    return folder_name([f"row={row}", f"column={column}", f"seed={number}"])


def chosen(axis: str, axes: Mapping[str, Sequence[str]], labels: Mapping[str, Any]) -> list[str]:
    """The labels that were typed, or all of them, in the table's order."""
    wanted = axes.get(axis, list(labels))
    for label in wanted:
        one(axis, [label], list(labels))
    return [label for label in labels if label in wanted]


def one(key: str, given: Sequence[str], valid: Sequence[str]) -> str:
    if len(given) != 1 or given[0] not in valid:
        text = ",".join(given)
        near = get_close_matches(text, valid, n=2) or [label for label in valid if text.lower() in label.lower()][:2]
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise check.BadValue(key, text, f"must be one of {', '.join(valid)}{meant}")
    return given[0]


def seed(given: object) -> int:
    if not str(given).isdecimal():
        raise check.BadValue("seed", given, "must be a whole number >= 0")
    return int(str(given))


def resolved(cell: Cell, paired: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Its config's values, those that come from another cell's run among them (`paired`: given instead of read)."""

    def value(column: str, metric: str, factor: float = 1.0) -> float:
        return factor * (paired[metric] if paired else mean_over_rounds(cell, column, metric))

    OmegaConf.register_new_resolver("paired", value, replace=True)
    return cast(dict[str, Any], OmegaConf.to_container(cell.config, resolve=True, throw_on_missing=True))


def mean_over_rounds(cell: Cell, column: str, metric: str) -> float:
    """What the paired run logged under `metric`, as one number."""
    path = cell.beside(column)
    try:
        status = yaml.safe_load((path / "summary.json").read_text(encoding="utf-8"))["status"]
        mean = float(pd.read_csv(path / "metrics.csv")[metric].mean())
    except (OSError, ValueError, KeyError, TypeError):
        status, mean = "missing", math.nan
    if status != "finished" or not math.isfinite(mean):
        raise check.InputError(
            f"{cell.name}: takes {metric} from column {column}, whose run in {path} is {status}; run that one first"
        )
    return round(mean, 6)


def paired_columns(cell: Cell) -> Iterator[str]:
    """Which other columns it takes values from."""
    for text in cell.overrides:
        _, found, rest = text.partition("${paired:")
        if found:
            yield rest.partition(",")[0]
