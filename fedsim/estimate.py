"""What a table's runs would take: found by playing a few rounds of each kind of cell, uncompiled."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedsim import build, check, table
from fedsim.runner import Experiment, initial_state, play
from fedsim.table import Cell

UNKNOWN = dict.fromkeys(("elastic/mean_zeta", "norm_norm/rate"), 1.0)
"""In place of what cells that have not run yet will have logged: it changes no times."""


@dataclass(frozen=True)
class Pace:
    """Seconds of the first round, of a later one, and of an evaluation."""

    first: float
    later: float
    evaluation: float


@dataclass(frozen=True)
class Forecast:
    """Of one cell."""

    status: str
    """`new`, what its folder's summary says, or why it cannot be run."""
    done: int
    rounds: int
    seconds: float
    """Still to go; NaN where it cannot be run."""


def each(cells: Sequence[Cell]) -> Iterator[Forecast]:
    """A forecast for each cell; one that has begun goes by its own times."""
    paces: dict[str, Pace | str] = {}
    for cell in cells:
        config = table.resolved(cell, UNKNOWN)
        before, rounds = summary(cell.folder), config["rounds"]
        done, status = before.get("rounds", 0), before.get("status", "new")
        if status in ("finished", "diverged") and done >= rounds:
            yield Forecast(status, done, rounds, 0.0)
            continue
        key = kind(cell, config)
        if key not in paces:
            paces[key] = tried(config)
        pace = paces[key]
        if isinstance(pace, str):
            yield Forecast(pace, done, rounds, math.nan)
            continue
        later = before.get("round_s", {}).get("median_later", pace.later)
        evaluations = -(-rounds // config["eval"]["every"]) - done // config["eval"]["every"]
        yield Forecast(status, done, rounds, pace.first + later * (rounds - done) + pace.evaluation * evaluations)


def summary(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def kind(cell: Cell, config: dict[str, Any]) -> str:
    """Cells with the same choices and the same amount of work take the same time, whatever their tau or rate."""
    choices = {k: v for k, v in cell.choices.items() if k not in ("logger", "experiment")}
    amount = [config["client"], config["participation"], config["partition"], config["eval"]]
    return json.dumps([choices, amount], sort_keys=True, default=str)


def tried(config: dict[str, Any]) -> Pace | str:
    """Four rounds: the first with all that is started in it, two to take the faster of, one with an evaluation."""
    try:
        where = build.device(config["device"])
        exp = build.experiment({**config, "engine": {**config["engine"], "compile": False}}, where)
    except check.InputError as error:
        return str(error)
    state, times = initial_state(exp), []
    for every in (10**9, 10**9, 10**9, 1):
        started = time.perf_counter()
        state, _, _ = play(rehearsed(exp, every), state)
        times.append(time.perf_counter() - started)
    first, second, third, evaluated = times
    later = min(second, third)
    return Pace(first, later, max(0.0, evaluated - later))


def rehearsed(exp: Experiment, every: int) -> Experiment:
    return replace(exp, rounds=10**9, eval=replace(exp.eval, every=every))


def peak_bytes() -> int:
    """The most memory that this process, and the largest of its workers, have held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    own, workers = (resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return unit * (own + workers) + device
