"""What a table's runs would take: found by playing a few rounds of each kind of cell, uncompiled."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from fedsim import build, check, fetch, table
from fedsim.folder import differences
from fedsim.runner import Experiment, extent, initial_state, play
from fedsim.table import Cell

UNKNOWN = dict.fromkeys(("elastic/mean_zeta", "elastic/step", "norm_norm/rate"), 1.0)
"""In place of what cells that have not run yet will have logged: it changes no times."""

SECONDS = 2.0
"""A round that takes longer is tried with some of its clients."""


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
    found: dict[str, Pace] = {}
    for cell in cells:
        config = table.resolved(cell, UNKNOWN)
        before, rounds = summary(cell.folder), config["rounds"]
        done, status = before.get("rounds", 0), before.get("status", "new")
        if before and (differing := changed(cell)):
            yield Forecast(f"made by another config ({'; '.join(differing)})", done, rounds, math.nan)
            continue
        if status == "diverged" or (status == "finished" and done >= rounds):
            yield Forecast(status, done, rounds, 0.0)
            continue
        kind = described(cell.choices, config)
        if kind not in paces:
            paces[kind] = tried(cell, config, found)
        pace = paces[kind]
        if isinstance(pace, str):
            yield Forecast(pace, done, rounds, math.nan)
            continue
        later = before.get("round_s", {}).get("median_later", pace.later)
        evaluations = -(-rounds // config["eval"]["every"]) - done // config["eval"]["every"]
        yield Forecast(status, done, rounds, pace.first + later * (rounds - done) + pace.evaluation * evaluations)


def changed(cell: Cell) -> list[str]:
    """In what a cell differs from its run that has begun, which will be refused then."""
    try:
        config = table.resolved(cell)
        now = build.on_device(config, build.device(config["device"]))
        stored = yaml.safe_load((cell.folder / "config.yaml").read_text(encoding="utf-8"))
    except (check.InputError, OSError, yaml.YAMLError):
        return []  # the run itself will say
    return differences(stored, now) if isinstance(stored, dict) else []


def summary(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def described(choices: Mapping[str, str], config: dict[str, Any], *without: str) -> str:
    """Cells with the same choices and the same amount of work take the same time, whatever their tau or rate."""
    named = {k: v for k, v in choices.items() if k not in ("logger", "experiment", *without)}
    amount = [config["client"], config["participation"], config["partition"], config["eval"]]
    return json.dumps([named, amount], sort_keys=True, default=str)


def tried(cell: Cell, config: dict[str, Any], found: dict[str, Pace]) -> Pace | str:
    """A few rounds: the first with all that is started in it, two to take the faster of, one with an evaluation. Where
    they are long, with some of their clients only. What `found` has of cells whose clients do the same is taken."""
    try:
        where = build.device(config["device"])
        with fetch.only_what_is_here():
            exp = build.experiment({**config, "engine": {**config["engine"], "compile": False}}, where)
    except check.InputError as error:
        return str(error)
    measures, whole = exp.aggregator.probe is not None, exp.aggregator.individual
    work = f"{measures} {whole} {described(cell.choices, config, 'aggregator', 'server_optimizer', 'schedule')}"
    if work not in found:
        found[work] = played(exp)
    return found[work]


def played(exp: Experiment) -> Pace:
    rounds, share = Rehearsal(exp), 1.0
    clients, few = extent(exp).clients, at_once(exp.engine_choice)
    if clients > few:
        some = Rehearsal(replace(exp, participation=replace(cast(Any, exp.participation), clients_per_round=few)))
        some.play()
        if some.play() * clients / few > SECONDS:
            rounds, share = some, clients / few
    first, later = rounds.play() * share, min(rounds.play(), rounds.play())
    return Pace(first, later * share, max(0.0, rounds.play(evaluated=True) - later))


def at_once(engine: Mapping[str, Any]) -> int:
    """As many clients as an engine trains at the same time, two at least."""
    return max(2, int(engine.get("workers", 1)) * int(engine.get("stack", 1)))


class Rehearsal:
    """Rounds that nobody keeps."""

    def __init__(self, exp: Experiment) -> None:
        self._exp, self._state = exp, initial_state(exp)

    def play(self, evaluated: bool = False) -> float:
        """One more of them; its seconds."""
        exp = replace(self._exp, rounds=10**9, eval=replace(self._exp.eval, every=1 if evaluated else 10**9))
        started = time.perf_counter()
        self._state, _, _ = play(exp, self._state)
        return time.perf_counter() - started


def peak_bytes() -> int:
    """The most memory that this process, and the largest of its workers, have held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    own, workers = (resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return unit * (own + workers) + device
