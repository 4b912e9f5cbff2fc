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
from fedsim.native import party
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
        # judges a difference of two models: one of them is another's, packed or not
        ("dataset=mnist5k", "model=cnn_pfl", "partition.num_clients=200", "aggregator=fednnnn", "client.batch_size=8"),
    ],
    ids=" ".join,
)
def test_compiled_clients_have_the_same_bits_in_any_process_and_after_a_stop(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    keys = [*(o for m in methods for o in (m, *NEEDS.get(m, ()))), "rounds=4", "engine.compile=true"]
    make = experiment if "dataset=mnist5k" in keys else small
    one, rows = play(make(*keys, "engine=sequential"))
    begun, first = play(make(*keys, "engine=process", "rounds=2", "schedule=constant"))
    checkpoint.save(tmp_path / "checkpoint.pt", begun, 0.0)
    state, _ = checkpoint.load(tmp_path / "checkpoint.pt", torch.device("cpu"))
    other, rest = play(make(*keys, "engine=process"), state)
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


def test_processors_of_those_who_have_no_job_are_lent() -> None:
    def lent(work: Work, job: Job) -> list[int]:
        found = []
        for _ in job.clients:
            time.sleep(0.01)
            found.append(party.processors())
        return found

    pool = Pool(3, 1, first_work(small()), lent)
    longest, *others = pool.run(first_work(small()), [Job([0] * 60), Job([0] * 2), Job([0] * 2)])
    assert longest[-1] == 3
    assert max(map(max, others)) < 3
    assert party.processors() == 1


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


def test_rounds_before_a_worker_died_are_kept(tmp_path: Path, fedsim: Command) -> None:
    keys = ["dataset=synthetic", "engine.compile=false", "checkpoint.every=1000"]
    command = [sys.executable, "-m", "fedsim", *keys, "engine=process", "engine.workers=2", "rounds=100000"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    folder = tmp_path / "outputs" / "dataset=synthetic,engine.compile=false,engine=process"
    until = time.time() + 100
    while not (folder / "metrics.csv").exists() or len(metrics(folder)) < 3:
        assert time.time() < until
        time.sleep(0.1)
    psutil.Process(process.pid).children()[1].kill()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, b"engine: a worker process ended with -9" in said) == (2, True)
    rounds = int(metrics(folder)["round"].iloc[-1])
    assert checkpoint.load(folder / "checkpoint.pt", torch.device("cpu"))[0].round == rounds
    for engine in ("process", "sequential"):
        assert fedsim(*keys, f"engine={engine}", f"rounds={rounds + 2}").returncode == 0
    other = folder.with_name(folder.name.replace("process", "sequential"))
    assert metrics(folder).equals(metrics(other))


ODD = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape[0], num_classes)
        self.register_buffer("fixed", torch.ones(1, 2, 4, 4))
        self.free = nn.Parameter(torch.ones(1, 2, 4, 4))
    def forward(self, x):
        return super().forward(x) + (self.fixed.view(8, 4) * self.free.view(8, 4)).mean()
"""


def test_only_filters_are_laid_out_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else has four dimensions is seen by its module as it was made."""
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["model=custom", "model.load=odd.Net", "rounds=2", "engine=sequential"]
    (_, rows), (_, same) = (play(small(*keys, f"engine.compile={yes}")) for yes in ("true", "false"))
    assert rows[-1]["test/loss"] == pytest.approx(same[-1]["test/loss"], rel=1e-5)


@pytest.mark.parametrize("engine", ["sequential", "process"])
def test_a_checkpoint_has_no_more_numbers_than_the_state(engine: str, tmp_path: Path) -> None:
    """Whatever memory its tensors share with others."""
    methods = ("client=scaffold", "server_optimizer=fedadam", f"engine={engine}", "engine.compile=true", "rounds=2")
    state, _ = play(experiment("dataset=mnist5k", "model=cnn_mnist", "partition.num_clients=200", *methods))
    checkpoint.save(tmp_path / "checkpoint.pt", state, 0.0)
    numbers = sum(t.nbytes for t in tensors(state).values())
    assert numbers <= (tmp_path / "checkpoint.pt").stat().st_size < 1.1 * numbers
