"""Samples gathered beforehand: the same ones, or none; and nobody is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import environment, play, small, work_of
from test_contract import tensors

from fedsim.engine import vmap
from fedsim.engine.ahead import SLOTS, Ahead, last, made, worth_it
from fedsim.program import Program
from fedsim.runner import Experiment, initial_state
from fedsim.stack import cut
from fedsim.trees import leaves
from fedsim.types import Work

# clients of unequal sizes, so of unequal numbers of steps, of training and of measuring
UNEQUAL = ["partition.sigma=1.0", "partition.sensitivity_fraction=0.4", "client.batch_size=4", "rounds=9"]
ENGINE = ["engine=vmap", "engine.workers=1"]


def given(*keys: str) -> tuple[Experiment, Work, Program]:
    exp = small(*UNEQUAL, *ENGINE, "engine.compile=false", *keys)
    work = work_of(exp, initial_state(exp))
    return exp, work, Program(work, stacked=True, compile=True)  # compiled when it is called, which it is not here


def until(true: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    assert true()


def lies_ready(ahead: Ahead, round: int) -> None:
    """Whether or not the round is asked for in the end: what the pipe has is heard."""

    def heard() -> bool:
        with contextlib.suppress(BlockingIOError):
            ahead._made = last(os.read(ahead._told, 4096))
        return ahead._made >= round - ahead._first

    until(heard)


@pytest.mark.parametrize("keys", [["aggregator=elastic"], ["aggregator=elastic", "aggregator.batch_size=2"],
                                  ["aggregator=fedavg", "client.epochs=2"]], ids=" ".join)  # fmt: skip
def test_what_lies_ready_is_what_the_round_would_make(keys: list[str]) -> None:
    exp, work, program = given(*keys)
    ahead, lengths = Ahead(work, program, 3), set()
    for round in range(1, exp.rounds):
        (clients,) = cut(work, exp.foreseen(round) or (), 3)
        lies_ready(ahead, round)
        found, expected = ahead.take(round, clients), made(replace(work, round=round), program, 3, clients)
        assert found is not None
        assert (found.sizes == expected.sizes).all()
        pairs = zip(leaves((found.moments, found.probe)), leaves((expected.moments, expected.probe)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        lengths.add(len(found.sizes))
    assert len(lengths) > 1  # so that shorter rounds came after longer ones


def foreseen(exp: Experiment, work: Work, round: int) -> list[int]:
    (clients,) = cut(work, exp.foreseen(round) or (), 3)
    return clients


def test_a_round_that_is_late_is_made_where_it_is_needed() -> None:
    exp, work, program = given("aggregator=elastic", "rounds=50")
    ahead = Ahead(work, program, 3)
    os.kill(ahead._process.pid, signal.SIGSTOP)
    assert ahead.take(40, foreseen(exp, work, 40)) is None  # behind by far
    os.kill(ahead._process.pid, signal.SIGCONT)
    lies_ready(ahead, 42)
    assert ahead.take(42, foreseen(exp, work, 42)) is not None  # it has caught up


@pytest.mark.parametrize("round", [1, 2, 3])
def test_after_a_round_again_or_one_that_nobody_foresaw_it_ends(round: int) -> None:
    exp, work, program = given("aggregator=elastic", "rounds=50")
    ahead = Ahead(work, program, 3)
    lies_ready(ahead, 4)
    assert ahead.take(2, foreseen(exp, work, 2)) is not None
    assert ahead.take(round, [0, 0, 0] if round == 3 else foreseen(exp, work, round)) is None
    assert not ahead._process.is_alive()
    assert ahead.take(4, foreseen(exp, work, 4)) is None


def test_it_may_die() -> None:
    exp, work, program = given("aggregator=elastic", "rounds=50")
    ahead = Ahead(work, program, 3)
    lies_ready(ahead, 1)
    os.kill(ahead._process.pid, signal.SIGKILL)
    until(lambda: not ahead._process.is_alive())
    assert all(ahead.take(round, foreseen(exp, work, round)) is None for round in range(1, 9))


def test_clients_that_kept_something_are_no_other_kind_to_it() -> None:
    """As after a resume, where some have taken part before."""
    _, work, program = given("client=scaffold", "client.option=2", "rounds=50")
    kept, _ = play(small(*UNEQUAL, "client=scaffold", "client.option=2", "engine=sequential", "rounds=1"))
    work = replace(work, states=kept.clients)
    assert len({bool(kept.clients.get(k)) for k in range(6)}) == 2
    ahead = Ahead(work, program, 3)
    lies_ready(ahead, SLOTS)  # it goes on, whatever they kept
    assert ahead._process.is_alive()


def test_no_more_than_a_few_rounds_and_not_beyond_the_last() -> None:
    exp, work, program = given("aggregator=fedavg", "rounds=7")
    ahead = Ahead(work, program, 3)
    lies_ready(ahead, SLOTS)
    time.sleep(0.2)
    with pytest.raises(BlockingIOError):
        os.read(ahead._told, 1)
    assert ahead.take(6, foreseen(exp, work, 6)) is None
    until(lambda: not ahead._process.is_alive())
    assert ahead._process.exitcode == 0


def test_it_goes_with_its_owner() -> None:
    _, work, program = given("aggregator=fedavg")
    ahead = Ahead(work, program, 3)
    process = psutil.Process(ahead._process.pid)
    del ahead
    until(lambda: not process.is_running())


@pytest.mark.parametrize(
    "keys",
    [["participation.dropout=0.2"], ["participation.stragglers=0.2"], ["client=perfedavg"], ["client=loadaboost"],
     ["client=scaffold", "client.option=1"],
     ["participation=async", "aggregator=fedasync"], ["client.batch_size=null"], ["rounds=1"]],
    ids=" ".join,
)  # fmt: skip
def test_only_where_everything_is_known(keys: list[str]) -> None:
    _, work, program = given("aggregator=fedavg", *keys)
    assert not worth_it(work, program, 3, 3)


def test_only_for_a_cohort_in_one_stack() -> None:
    _, work, program = given("aggregator=fedavg")
    assert worth_it(work, program, 3, 3)
    assert not worth_it(work, program, 3, 2)


@pytest.mark.parametrize("keys", [["aggregator=elastic", "client.epochs=2"],
                                  ["client=scaffold", "client.option=2", "aggregator=fedavg",
                                   "participation.clients_per_round=1.0"]], ids=" ".join)  # fmt: skip
def test_results_do_not_know_of_it(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    class Waiting(Ahead):
        def take(self, round: int, clients: Any) -> Any:
            if self._end.alive and round > self._at + self._first:
                lies_ready(self, round)
            found = super().take(round, clients)
            taken.append(found is not None)
            return found

    monkeypatch.setattr(vmap, "Ahead", Waiting)
    exp = small(*UNEQUAL, *ENGINE, *keys, "client.batch_size=8", "engine.compile=true")
    one, rows = play(exp)
    assert taken == [False] + [True] * 8  # all but the first round, in which it begins
    other, same = play(exp)  # from the beginning again: nothing lies ready
    assert taken[9:] == [False] * 9
    assert all(torch.equal(t, tensors(other)[name]) for name, t in tensors(one).items())
    assert [{**row, "time/round_s": 0} for row in rows] == [{**row, "time/round_s": 0} for row in same]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nobody_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    keys = ["dataset=synthetic", *ENGINE, "engine.compile=true", "rounds=1000000", "checkpoint.every=1"]
    process = subprocess.Popen([sys.executable, "-m", "fedsim", *keys], cwd=tmp_path, env=environment(),
                               start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        until(lambda: list(tmp_path.glob("outputs/*/checkpoint.pt")), 200)
        children = psutil.Process(process.pid).children()  # the one that draws ahead and the one that evaluates
        assert children
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        process.communicate(timeout=60)
        assert psutil.wait_procs(children, timeout=20)[1] == []
    finally:
        process.kill()
        process.communicate()
