"""Helpers: experiments built from the real configuration, and the real command run as a process."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fedsim import build
from fedsim.cli import register_resolvers
from fedsim.overrides import CONF
from fedsim.runner import Experiment, Row, RunState, assign, initial_state, run
from fedsim.task import Task
from fedsim.types import Turn, Work

torch.set_num_threads(1)
torch.ones((), requires_grad=True).backward()  # before a test imports torch's tracing modules: see Compiled._make
cache = tempfile.TemporaryDirectory(prefix="fedsim-tests-")  # a worker's own; removed when it ends
os.environ["FEDSIM_CACHE"] = cache.name


def config(*overrides: str) -> dict[str, Any]:
    """The resolved configuration of a command line; with the reference engine, where none is named."""
    register_resolvers([])
    if not any(o.startswith("engine=") for o in overrides):
        overrides = (*overrides, "engine=sequential")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        resolved = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(resolved, dict)
    return resolved


def experiment(*overrides: str) -> Experiment:
    """What `fedsim OVERRIDES` would run."""
    return build.experiment(config(*overrides), torch.device("cpu"))


SMALL = (
    *("dataset=synthetic", "dataset.train_samples=240", "dataset.test_samples=60"),
    *("partition.num_clients=6", "participation.clients_per_round=3"),
)


def small(*overrides: str) -> Experiment:
    """The same on 240 made-up samples over 6 clients, 3 a round."""
    given = {o.partition("=")[0] for o in overrides}
    return experiment(*(o for o in SMALL if o.partition("=")[0] not in given), *overrides)


def doubled(exp: Experiment) -> Experiment:
    """The same experiment in float64."""
    data = exp.data.dataset
    data = replace(data, scale=data.scale.double(), shift=data.shift.double())
    task = Task(exp.task.module.double(), data)
    return replace(exp, task=task, data=replace(exp.data, dataset=data))


def work_of(exp: Experiment, state: RunState, round: int = 0) -> Work:
    """What a synchronous round's clients are given."""
    return assign(exp, replace(state, round=round), Turn((), (), {}, round, {}, 0))


def play(exp: Experiment, state: RunState | None = None) -> tuple[RunState, list[Row]]:
    """All rounds of an experiment; the last state and every round's row."""
    rows: list[Row] = []
    final = run(exp, state or initial_state(exp), lambda s, row, layers: rows.append(row))
    return final, rows


@pytest.fixture
def fedsim(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The real command, in an empty folder."""

    def command(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fedsim", *args],
            cwd=options.pop("cwd", tmp_path),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
            **options,
        )

    return command


def environment() -> dict[str, str]:
    """No network, whatever the machine has: a proxy that nobody serves."""
    nowhere = "http://127.0.0.1:9"
    quiet = {"http_proxy": nowhere, "https_proxy": nowhere, "WANDB_SILENT": "true", "COLUMNS": "200"}
    return {**os.environ, **quiet}


def metrics(folder: Path) -> pd.DataFrame:
    """metrics.csv as text, without the one column that no two runs share."""
    return pd.read_csv(folder / "metrics.csv", dtype=str, keep_default_na=False).drop(columns="time/round_s")
