"""engine=process: the sequential engine's bits, whatever the method; and workers that fail, die or are left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from conftest import environment, experiment, metrics, play, small
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import CLIENTS, NEEDS, tensors

from fedsim import checkpoint
from fedsim.engine.parcel import Inbox, Outbox
from fedsim.engine.pool import Job, Pool
from fedsim.runner import first_work
from fedsim.types import Model, Work

Command = Callable[..., subprocess.CompletedProcess[str]]

METHODS: list[tuple[str, ...]] = [
    *((f"client={client}", "client_optimizer.persist_state=true") for client in CLIENTS),
    ("aggregator=fednnnn", "client_optimizer=adam"),
    ("aggregator=pfnm", "aggregator.sigma2=0.001", "model=mlp", "model.hidden=[8]"),
    # keeps every client's sensitivities until the round's end
    ("aggregator=pfnm", "aggregator.tau=0.5", "model=mlp", "model.hidden=[8]"),
    ("participation=async", "aggregator=fedasync"),
    ("privacy=masked", "client=scaffold"),
    ("privacy=gaussian",),
    ("participation.dropout=0.4", "participation.stragglers=0.5"),
    ("dataset=mnist5k", "model=cnn_emnist", "partition.num_clients=200", "rounds=1"),
    ("dataset=mnist5k", "model=resnet20", "partition.num_clients=200", "rounds=2"),
]


@pytest.mark.parametrize("methods", METHODS, ids=" ".join)
def test_the_sequential_engines_bits(methods: tuple[str, ...]) -> None:
    keys = [o for m in methods for o in (m, *NEEDS.get(m, ()))]
    if not any(o.startswith("rounds=") for o in keys):
        keys.append("rounds=3")
    make = experiment if "dataset=mnist5k" in keys else small
    if make is small:  # all six: more results of a worker than it has pieces of memory for them
        keys.append("participation.clients_per_round=1.0")
    (one, rows), (other, same) = (
        play(make(*keys, *engine)) for engine in (("engine=sequential",), ("engine=process", "engine.compile=false"))
    )
    assert [{k: v for k, v in row.items() if k != "time/round_s"} for row in rows] == [
        {k: v for k, v in row.items() if k != "time/round_s"} for row in same
    ]
    found = tensors(other)
    for name, t in tensors(one).items():
        assert torch.equal(t, found[name]), name


@pytest.mark.parametrize(
    "methods",
    [
        # six clients: two jobs of measuring
        ("client=scaffold", "aggregator=elastic", "server_optimizer=fedadam", "participation.clients_per_round=1.0"),
        ("client=local", "client_optimizer=adam", "client_optimizer.persist_state=true"),
        ("client=pfedme", "aggregator=fednnnn", "client_optimizer=nesterov", "client_optimizer.persist_state=true"),
        ("aggregator=pfnm", "aggregator.tau=0.5", "model=mlp", "model.hidden=[8]"),
        ("participation=async", "aggregator=fedasync", "server_optimizer=fedavgm"),
        ("privacy=masked",),
    ],
    ids=" ".join,
)
def test_compiled_clients_have_the_same_bits_in_any_process_and_after_a_stop(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    keys = [*(o for m in methods for o in (m, *NEEDS.get(m, ()))), "rounds=4", "engine.compile=true"]
    one, rows = play(small(*keys, "engine=sequential"))
    begun, first = play(small(*keys, "engine=process", "rounds=2", "schedule=constant"))
    checkpoint.save(tmp_path / "checkpoint.pt", begun, 0.0)
    state, _ = checkpoint.load(tmp_path / "checkpoint.pt", torch.device("cpu"))
    other, rest = play(small(*keys, "engine=process"), state)
    for row, same in zip(rows, [*first, *rest], strict=True):
        for name in row.keys() & same.keys() - {"time/round_s"}:  # the second's last round is evaluated, too
            assert row[name] == same[name] or row[name] != row[name], name
    found = tensors(other)
    assert found.keys() == tensors(one).keys()
    for name, t in tensors(one).items():
        assert torch.equal(t, found[name]), name


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=5),
    kind=st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bool, torch.float64]),
    value=st.integers(0, 1),
)
def test_parcels_hold_what_was_packed(shapes: list[list[int]], kind: torch.dtype, value: int) -> None:
    tree = {str(i): torch.full(shape, value).to(kind) for i, shape in enumerate(shapes)}
    images = torch.arange(120).view(2, 3, 4, 5)
    tree |= {"channels last": images.contiguous(memory_format=torch.channels_last), "a part": images[:, 1:, ::2]}
    content = {"model": Model(tree, {"b": torch.arange(3)}), "states": {"own": tree}, "lr": 0.1, "none": None}
    sender, receiver = Outbox(), Inbox()
    larger = {"x": torch.ones(5, 5), **content}
    first, second = receiver.unpack(sender.pack(content), copy=True), receiver.unpack(sender.pack(larger), copy=True)
    parcel = sender.pack(content)
    assert parcel.memory is None, "the receiver has seen it: it is used again"
    third = receiver.unpack(parcel, copy=False)
    for found in (first, second, third):
        assert (found["lr"], found["none"]) == (0.1, None)
        for name, t in tree.items():
            for other in (found["model"].params[name], found["states"]["own"][name]):
                assert torch.equal(t, other)
                assert (t.dtype, t.shape) == (other.dtype, other.shape)


def test_parcels_that_change() -> None:
    """Other numbers in the same structure, another structure, another shape; and what has not changed is not sent."""
    sender, receiver = Outbox(), Inbox()
    contents = [{"a": torch.full((2,), float(i)), "round": i // 4, "more": [torch.tensor(i)]} for i in range(12)]
    contents[5] = {"b": torch.full((2,), 5.0), "round": 1, "more": [torch.tensor(5)]}
    contents[7]["a"] = torch.full((3,), 7.0)
    again = []
    for i, content in enumerate(contents):
        parcel = sender.pack(content)
        again.append(not parcel.rest)
        found = receiver.unpack(parcel, copy=i % 3 == 1)
        assert str(found) == str(content)
    # a piece of memory serves every second one: nothing new in 2, 3, 6 (the same round), 10, 11
    assert [i for i, same in enumerate(again) if same] == [2, 3, 6, 10, 11]


def slept(work: Work, job: Job) -> int:
    time.sleep(0.01 * len(job.clients))
    return os.getpid()


def test_nobody_waits_behind_a_long_client() -> None:
    """While others are free: who has half of the work is given no more of it, wherever in the order it comes."""
    work = first_work(small())
    pool = Pool(2, 1, work, slept)
    for long in (0, 4):
        jobs = [Job([0] * (40 if number == long else 5)) for number in range(9)]
        who = list(pool.run(work, jobs))
        assert [number for number in range(9) if who[number] == who[long]] == [long]


def test_workers_end_with_the_experiment() -> None:
    exp = small("engine=process", "engine.workers=2")
    play(exp)
    pool = exp.engine._pools[0]  # type: ignore[attr-defined]
    workers = [psutil.Process(p.pid) for p in (w.process for w in pool._workers)]
    assert all(w.is_running() for w in workers)
    exp.engine._pools.clear()  # type: ignore[attr-defined]
    del pool
    assert not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers)


MODEL = """
import os
from multiprocessing import parent_process
from torch import nn

class Net(nn.Linear):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape[0], num_classes)
    def forward(self, x):
        if self.training and parent_process() is not None:  # in a worker
            {what}
        return super().forward(x)
"""


def own(folder: Path, what: str) -> list[str]:
    (folder / "mine.py").write_text(MODEL.format(what=what))
    return [
        "dataset=synthetic",
        "model=custom",
        "model.load=mine.Net",
        "engine=process",
        "engine.workers=2",
        "rounds=3",
    ]


def test_a_workers_exception_is_the_commands(fedsim: Command, tmp_path: Path) -> None:
    result = fedsim(*own(tmp_path, "raise MemoryError"))
    assert result.returncode == 2
    assert "out of memory" in result.stderr


def test_an_exception_says_where_it_was(fedsim: Command, tmp_path: Path) -> None:
    result = fedsim(*own(tmp_path, "raise type('Odd', (Exception,), {'__init__': lambda self, a, b: None})(1, 2)"))
    assert "RuntimeError: Odd" in result.stderr
    assert "In a worker process:" in result.stderr
    assert "in forward" in result.stderr


def test_a_worker_that_dies_is_one_line(fedsim: Command, tmp_path: Path) -> None:
    result = fedsim(*own(tmp_path, "os.kill(os.getpid(), 9)"))
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("fedsim: error: engine: a worker process ended with -9")
    (folder,) = (tmp_path / "outputs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_behind_and_the_run_goes_on(tmp_path: Path, number: signal.Signals, fedsim: Command) -> None:
    keys = ["dataset=synthetic", "engine=process", "engine.workers=2", "engine.compile=false", "checkpoint.every=1"]
    command = [sys.executable, "-m", "fedsim", *keys, "rounds=100000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    folder = tmp_path / "outputs" / "dataset=synthetic,engine.compile=false,engine=process"
    until = time.time() + 100
    while not (folder / "checkpoint.pt").exists() and time.time() < until:
        time.sleep(0.2)
    workers = psutil.Process(process.pid).children()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: the workers get it too
    else:
        process.send_signal(number)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert (len(workers), alive) == (2, [])
    rounds = int(metrics(folder)["round"].iloc[-1])
    result = fedsim(*keys, f"rounds={rounds + 2}", "engine.workers=3")  # how many does not matter
    assert result.returncode == 0, result.stderr
    assert fedsim("dataset=synthetic", "engine=sequential", f"rounds={rounds + 2}").returncode == 0
    assert metrics(folder).equals(metrics(tmp_path / "outputs" / "dataset=synthetic,engine=sequential"))
