"""Evaluation beside the rounds to come: the same numbers, a round later; and a process that ends with the run."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import environment, experiment, metrics, play, small

from fedsim import runner
from fedsim.engine import auto
from fedsim.engine.auto import settle
from fedsim.engine.beside import Pending
from fedsim.engine.pool import WorkerDied
from fedsim.runner import Experiment, Played, Row, extent, first_work, initial_state, run
from fedsim.task import Evaluation

ROUNDS = ("rounds=7", "eval.every=2")
METHODS = [
    ("engine=sequential",),
    ("engine=vmap", "engine.compile=false"),
    # three evaluations of a round, and memory for two models
    ("engine=sequential", "aggregator=fednnnn", "eval.train=true"),
    ("engine=sequential", "client=pfedme"),
    ("engine=sequential", "participation=async", "aggregator=fedasync"),
]


def beside(exp: Experiment, yes: bool) -> Experiment:
    return replace(exp, engine=replace(exp.engine, beside=yes))  # type: ignore[type-var]


@pytest.mark.parametrize("keys", METHODS, ids=" ".join)
def test_the_same_rows(keys: tuple[str, ...]) -> None:
    """To the last bit, in the same order."""
    exp = small(*keys, *ROUNDS)
    (_, there), (_, here) = (play(beside(exp, yes)) for yes in (True, False))
    assert [list(row) for row in there] != [], "some"
    for one, other in zip(there, here, strict=True):
        one.pop("time/round_s"), other.pop("time/round_s")
        assert one == other
    assert [round for round, row in enumerate(there, 1) if "test/accuracy" in row] == [2, 4, 6, 7]


def test_the_next_round_is_trained_before_the_last_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    begin = runner.begin
    monkeypatch.setattr(
        runner, "begin", lambda exp, state: (order.append(f"train {state.round + 1}"), begin(exp, state))[1]
    )
    exp = beside(small("engine=sequential", "rounds=3"), True)
    run(exp, initial_state(exp), lambda state, row, layers: order.append(f"tell {state.round}"))
    assert order == ["train 1", "train 2", "tell 1", "train 3", "tell 2", "tell 3"]


def test_a_loss_that_diverges_stops_the_run_where_it_does_otherwise() -> None:
    exp = small("engine=sequential", "rounds=30", "client_optimizer.lr=1e30", "server_optimizer.lr=1e8")
    rows: dict[bool, list[Row]] = {}
    for yes in (True, False):
        state, rows[yes] = play(beside(exp, yes))
        assert state.round == len(rows[yes]) < 30
    assert len(rows[True]) == len(rows[False])


def test_a_process_that_dies_is_told_of() -> None:
    exp = beside(small("engine=sequential", "rounds=1000"), True)
    told: list[int] = []

    def after(state: object, row: Row, layers: object) -> None:
        told.append(1)
        if len(told) == 3:
            exp.engine._beside[0]._pool._workers[0].process.kill()  # type: ignore[attr-defined]

    with pytest.raises(WorkerDied, match="ended with -9"):
        run(exp, initial_state(exp), after)


def test_what_is_waited_for_counts() -> None:
    class Slow(Pending):
        def result(self) -> Evaluation:
            time.sleep(0.05)
            return Evaluation(torch.tensor(1.0), None, 1)

    exp = small("engine=sequential", "rounds=1")
    played = Played(initial_state(exp), {"time/round_s": 1.0}, {}, {"test": Slow(iter(()))})
    row = played.whole_row()
    assert row["test/loss"] == 1
    assert row["time/round_s"] >= 1.05


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("engine=sequential", "rounds=100"), True),
        (("engine=sequential", "rounds=20"), False),  # 20 x 1,000 samples x 101,770 parameters
        (("engine=sequential", "rounds=100", "eval.every=50"), False),
        (("engine=sequential", "rounds=100", "engine.threads=2"), False),
        (("engine=vmap", "rounds=100", "engine.workers=1"), True),
        (("engine=vmap", "rounds=100", "engine.workers=2"), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_where(keys: tuple[str, ...], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores in (1, 2):
        monkeypatch.setattr(auto.os, "cpu_count", lambda cores=cores: cores)
        exp = experiment("dataset=mnist5k", "model=mlp", *keys)
        engine, _ = settle(exp.engine, first_work(exp), extent(exp), {})
        assert engine.beside is (expected and cores == 2)  # type: ignore[attr-defined]


KEYS = ("dataset=mnist5k", "model=mlp", "engine=sequential", "checkpoint.every=7", "rounds=100")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_goes_on_exactly_and_nobody_is_left(number: signal.Signals, tmp_path: Path) -> None:
    def fedsim(name: str, stop: bool) -> Path:
        command = [sys.executable, "-m", "fedsim", *KEYS, f"hydra.run.dir={name}"]
        with (tmp_path / "log").open("w") as log:
            begun = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
        table = tmp_path / name / "metrics.csv"
        if stop:
            while not table.exists() or len(table.read_text().splitlines()) < 12:
                assert begun.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.01)
            children = psutil.Process(begun.pid).children()
            assert len(children) == (1 if (os.cpu_count() or 1) > 1 else 0)
            begun.send_signal(number)
            begun.wait(60)
            psutil.wait_procs(children, timeout=10)
            assert not any(child.is_running() for child in children)
        else:
            assert begun.wait(300) == 0, (tmp_path / "log").read_text()
        return tmp_path / name

    fedsim("stopped", stop=True)
    stopped, whole = fedsim("stopped", stop=False), fedsim("whole", stop=False)
    assert metrics(stopped).equals(metrics(whole))
    assert json.loads((stopped / "summary.json").read_text())["status"] == "finished"
