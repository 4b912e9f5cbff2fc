"""A run's folder: who may write to it, whether it belongs to the same experiment, and what it holds when done."""

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock
import pandas as pd
import yaml

from fedsim import check

VOLATILE = ("rounds", "device", "data_dir", "cache_dir", "overwrite", "checkpoint", "logger")
"""Keys that may change between the start of a run and its continuation: they do not decide the results."""

VOLATILE_KEYS = ("dataset.data_dir", "dataset.cache_dir", "partition.preview", "engine.workers")
"""The same, of keys within groups. (That the data are the same is seen from their fingerprint.)"""

FILES = (
    "config.yaml",
    "metrics.csv",
    "layers.csv",
    "summary.json",
    "checkpoint.pt",
    "clients.csv",
    "partition.png",
    "curves.png",
)


class RunFolder:
    """Locked while in use, so that two processes never write to one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(path / ".lock")

    def __enter__(self) -> "RunFolder":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise check.InputError(f"{self.path} is in use by another fedsim process; wait for it to end") from error
        except OSError as error:
            raise check.InputError(f"{self.path} cannot be written to: {error.strerror or error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if not self._started() and not (self.path / "summary.json").exists():  # refused: leave no trace
            for name in ("config.yaml", ".lock"):
                (self.path / name).unlink(missing_ok=True)
        self._lock.release()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def claim(self, config: Mapping[str, Any], overwrite: bool) -> None:
        """Make the folder this config's: refuse one made by another, empty it where that is asked for."""
        if overwrite:
            for name in FILES:
                (self.path / name).unlink(missing_ok=True)
        if self._started():
            differing = differences(self._stored_config(), config)
            if differing:
                horizon = any(d.startswith("schedule.rounds:") for d in differing)
                going_on = ", or give the old schedule.rounds to go on" if horizon else ""
                raise check.InputError(
                    f"{self.path} was made by another config ({'; '.join(differing)}); choose another hydra.run.dir "
                    f"(of a sweep or a table, hydra.sweep.dir), or overwrite=true{going_on}"
                )
        write_atomically(self.path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))

    def _started(self) -> bool:
        return any((self.path / name).exists() for name in ("metrics.csv", "checkpoint.pt"))

    def _stored_config(self) -> dict[str, Any]:
        path = self.path / "config.yaml"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, UnicodeDecodeError, yaml.YAMLError):
            content = None
        if not isinstance(content, dict):
            raise check.InputError(f"{path} is missing or damaged; overwrite=true starts the run again")
        return content

    def summary(self) -> dict[str, Any]:
        """What the last process to write here said of the run; empty for a new folder, or where that is lost."""
        try:
            content = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write_summary(self, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / "summary.json", json.dumps(content, indent=2) + "\n")

    def metrics(self) -> pd.DataFrame:
        return pd.read_csv(self.path / "metrics.csv", dtype=float)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: old there, new here` for every key that decides results and differs."""
    old, new = (flatten({k: v for k, v in c.items() if k not in VOLATILE}) for c in (before, now))
    missing = "nothing"
    return [
        f"{key}: {old.get(key, missing)} there, {new.get(key, missing)} here"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, missing) != new.get(key, missing) and key not in VOLATILE_KEYS
    ]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def accuracies(metrics: pd.DataFrame) -> dict[str, Any]:
    """Last, best and mean of the last ten evaluations, each under its own name; the last of what has only a last."""
    result: dict[str, Any] = {}
    for kind in ("test", "train", "sent"):
        known = metrics[["round", f"{kind}/accuracy"]].dropna()
        if len(known):
            values = known[f"{kind}/accuracy"]
            result[f"{kind}_accuracy_last"] = float(values.iloc[-1])
            result[f"{kind}_accuracy_best"] = float(values.max())
            result[f"{kind}_accuracy_best_round"] = int(known["round"].iloc[values.to_numpy().argmax()])
            result[f"{kind}_accuracy_mean_last_10"] = float(values.tail(10).mean())
    for name in ("personal/accuracy_before", "personal/accuracy_after", "privacy/epsilon", "time/virtual_s"):
        seen = metrics[name].dropna()
        if len(seen):
            result[name.replace("/", "_")] = float(seen.iloc[-1])
    losses = metrics["test/loss"].replace(float("inf"), float("nan")).dropna()
    if len(losses):
        result["test_loss_last"] = float(losses.iloc[-1])
    return result


def time_to_accuracy(metrics: pd.DataFrame) -> dict[str, float]:
    """Virtual seconds until test accuracy first reached 10 %, 20 % ... 90 %, 95 %."""
    known = metrics[["time/virtual_s", "test/accuracy"]].dropna()
    reached = {
        goal: known.loc[known["test/accuracy"] >= goal / 100, "time/virtual_s"] for goal in (*range(10, 91, 10), 95)
    }
    return {f"{goal} %": float(times.iloc[0]) for goal, times in reached.items() if len(times)}


def round_times(metrics: pd.DataFrame) -> dict[str, float]:
    """Seconds of the first round, with all that is started or compiled in it, and the median of the others."""
    times = metrics["time/round_s"]
    return {"first": float(times.iloc[0]), "median_later": float(times.iloc[1:].median())} if len(times) > 1 else {}


def versions() -> dict[str, str]:
    packages = ("fedsim-lab", "torch", "torchvision", "numpy", "hydra-core", "omegaconf")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
