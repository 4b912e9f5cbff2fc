"""Runs read back from their folders, as tidy tables: `fedsim.load("outputs").runs`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedsim import check
from fedsim.folder import accuracies, differences, flatten
from fedsim.metrics import LAYER_METRICS, METRICS

PLACE = ("experiment", "row", "column", "scale")
"""Where a run stands in a paper's table, if it is a cell of one."""


OF_METRICS = ("test_", "train_", "sent_", "personal_")
"""Numbers of a summary that are taken from metrics.csv."""


@dataclass(frozen=True)
class Results:
    """`run` joins the four; it is the run's folder."""

    runs: pd.DataFrame
    """A row a run: run, status, rounds (done), rounds_asked, seed; experiment, row, column, scale, if it is a cell; the
    groups' choices (aggregator, client ...), each value of its config (aggregator.tau ...), what the summary says."""
    metrics: pd.DataFrame
    """metrics.csv of every run."""
    layers: pd.DataFrame
    """layers.csv of every run."""
    clients: pd.DataFrame
    """clients.csv of every run."""
    notes: tuple[str, ...] = ()
    """What was left out, and why: cells that are there twice; and what is missing of runs that were not."""
    damaged: tuple[str, ...] = ()
    """Runs that were left out because they cannot be read."""


@dataclass(frozen=True)
class Stored:
    """What one folder holds."""

    folder: Path
    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    metrics: pd.DataFrame
    layers: pd.DataFrame
    clients: pd.DataFrame

    @property
    def place(self) -> tuple[Any, ...] | None:
        table = self.summary.get("table")
        return (*(table[key] for key in PLACE), self.seed) if table else None

    @property
    def seed(self) -> Any:
        return self.summary.get("seed", self.config.get("seed"))

    @property
    def rounds(self) -> int:
        return len(self.metrics)


class Damaged(Exception):
    """A file of a run cannot be read."""


def load(*folders: str | Path, layers: bool = True) -> Results:
    """Every run in or below the folders, however far it got. `layers=False` saves the time and memory of layers.csv."""
    found: list[Stored] = []
    damaged: list[str] = []
    for path in _run_folders([Path(folder).expanduser() for folder in folders]):
        try:
            found.append(_stored(path, layers))
        except Damaged as damage:
            damaged.append(f"{path} is left out: {damage}")
    if not found:
        given = ", ".join(str(folder) for folder in folders)
        why = f"no run in {given} can be read: {'; '.join(damaged)}" if damaged else f"no runs in {given}"
        raise check.InputError(why)
    kept, twice = _once(found)
    bare = [f"{run.folder} has no config.yaml: nobody can tell its settings" for run in kept if not run.config]
    return Results(
        pd.DataFrame([_row(run) for run in kept]).astype({"seed": "Int64"}),
        _joined(kept, "metrics", tuple(METRICS)),
        _joined(kept, "layers", tuple(LAYER_METRICS)),
        _joined(kept, "clients", ("client", "samples", "classes", "emd")),
        (*twice, *bare),
        tuple(damaged),
    )


def _run_folders(roots: Sequence[Path]) -> Iterator[Path]:
    seen = set()
    for root in roots:
        if not root.is_dir():
            raise check.InputError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}")
        for path, below, names in os.walk(root):
            below.sort()
            folder = Path(path)
            if {"summary.json", "metrics.csv"} & set(names) and folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _stored(folder: Path, layers: bool) -> Stored:
    summary = _mapping(folder / "summary.json", json.loads)
    config = _mapping(folder / "config.yaml", yaml.safe_load)
    table = summary.get("table", {})
    if table != {} and not (isinstance(table, dict) and all(isinstance(table.get(k), str) for k in PLACE)):
        raise Damaged("summary.json does not say which cell of its table it is")
    metrics = _csv(folder / "metrics.csv")
    try:
        metrics = metrics.astype(float)
        metrics = metrics.astype({"round": int}) if len(metrics) else metrics
    except (ValueError, KeyError) as error:
        raise Damaged(f"metrics.csv: {error}") from error
    if summary.get("rounds") and not len(metrics):
        raise Damaged("metrics.csv is missing or empty, though rounds were played")
    by_layer = _csv(folder / "layers.csv") if layers else pd.DataFrame()
    stored = Stored(folder, summary, config, metrics, by_layer, _csv(folder / "clients.csv"))
    if not isinstance(stored.seed, int | None) or not isinstance(summary.get("rounds", 0), int):
        raise Damaged("summary.json: seed and rounds must be whole numbers")
    if not isinstance(config.get("rounds", 0), int):
        raise Damaged("config.yaml: rounds must be a whole number")
    if not isinstance(summary.get("choices", {}), dict) or not isinstance(summary.get("status", ""), str):
        raise Damaged("summary.json: status must be a word, choices a table")
    return stored


def _mapping(path: Path, parse: Any) -> dict[str, Any]:
    """Nothing, where there is no such file."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Damaged(f"{path.name}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise Damaged(f"{path.name} holds no keys")
    return content


def _csv(path: Path) -> pd.DataFrame:
    """Nothing, where there is no such file; a last line that is still being written is not there yet."""
    try:
        whole = path.read_text(encoding="utf-8")
        lines = whole[: whole.rfind("\n") + 1]
        return pd.read_csv(StringIO(lines)) if lines else pd.DataFrame()
    except FileNotFoundError:
        return pd.DataFrame()
    except (OSError, ValueError) as error:
        raise Damaged(f"{path.name}: {' '.join(str(error).split())}") from error


def _once(found: Sequence[Stored]) -> tuple[list[Stored], list[str]]:
    """Of runs that are the same cell the one that got further; the others are named."""
    best: dict[Any, Stored] = {}
    for run in found:
        other = best.get(run.place)
        if run.place and (other is None or _progress(run) > _progress(other)):
            best[run.place] = run
    kept, notes = [], []
    for run in found:
        counts = best[run.place] if run.place else run
        if run is counts:
            kept.append(run)
            continue
        differing = differences(counts.config, run.config)
        notes.append(
            f"{run.folder} ({run.rounds} rounds) is left out: {counts.folder} is the same cell ({counts.rounds} rounds)"
            + (f"; their configs differ: {'; '.join(differing)}" if differing else "")
        )
    return kept, notes


def _progress(run: Stored) -> tuple[int, bool]:
    return run.rounds, run.summary.get("status") == "finished"


def _row(run: Stored) -> dict[str, Any]:
    """Numbers from metrics.csv as it stands, since the summary of a running run is as old as its start."""
    summary, config = run.summary, flatten(run.config)
    old = OF_METRICS if len(run.metrics) else ()
    numbers = {
        k: v
        for k, v in summary.items()
        if isinstance(v, int | float | str) and not isinstance(v, bool) and not k.startswith(old)
    }
    if isinstance(summary.get("partition"), dict) and "data" in summary["partition"]:
        numbers["data_fingerprint"] = str(summary["partition"]["data"])
    now = accuracies(run.metrics.reindex(columns=list(METRICS))) if len(run.metrics) else {}
    choices = {k: v for k, v in summary.get("choices", {}).items() if k != "experiment"}
    asked = config.pop("rounds", None)
    return {
        "run": str(run.folder),
        "status": summary.get("status", "unknown"),
        "rounds": run.rounds,
        "rounds_asked": run.rounds if asked is None else asked,
        "seed": run.seed,
        **{key: summary.get("table", {}).get(key) for key in PLACE},
        **choices,
        **config,
        **{k: v for k, v in (numbers | now).items() if k not in ("status", "rounds", "seed")},
    }


def _joined(runs: Sequence[Stored], name: str, columns: Sequence[str]) -> pd.DataFrame:
    parts = [part.assign(run=str(run.folder)) for run in runs if len(part := getattr(run, name))]
    if not parts:
        return pd.DataFrame(columns=["run", *columns])
    whole: pd.DataFrame = pd.concat(parts, ignore_index=True)
    whole.insert(0, "run", whole.pop("run"))
    return whole
