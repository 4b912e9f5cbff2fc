"""engine=vmap: a stack of clients ends where each of them would end alone, whatever the method.

In float64 the two engines agree to 1e-9, so that what is left in float32 is rounding and nothing else.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import doubled, experiment, metrics, play, small
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import CLIENTS, NEEDS, tensors

from fedsim import stack
from fedsim.cohort import Deferred
from fedsim.engine import auto
from fedsim.model.dropout import Dropout, mixed
from fedsim.runner import Experiment, RunState, initial_state
from fedsim.server import Server
from fedsim.whole import widest

Command = Callable[..., subprocess.CompletedProcess[str]]
BOUND, ROUNDED = 1e-9, 1e-6
"""In float64, relative to the largest entry of a tensor. N and E, PFNM's matching and the masks' ring are float32."""


def furthest(one: RunState, other: RunState) -> float:
    """The largest difference between two states, relative to the largest entry of the tensor."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    found = [(a[n].double() - b[n].double()).abs().max() / a[n].double().abs().max().clamp_min(1e-6) for n in a]
    return float(max(found))


def compare(make: Callable[..., Experiment], keys: list[str], *engine: str) -> float:
    one, rows = play(doubled(make(*keys, "engine=sequential")))
    other, same = play(doubled(make(*keys, *engine)))
    assert [row.keys() for row in rows] == [row.keys() for row in same]
    for row, twin in zip(rows, same, strict=True):
        for name in row.keys() - {"time/round_s"}:
            assert twin[name] == pytest.approx(row[name], rel=1e-5, abs=1e-6), name  # sums of norms are float32
    return furthest(one, other)


STRAGGLERS = "participation.stragglers=0.5"
METHODS: list[tuple[str, ...]] = [
    *((f"client={client}", "client_optimizer.persist_state=true", STRAGGLERS) for client in CLIENTS),
    ("client=scaffold", "client.option=1", "client_optimizer=adam"),
    ("client=perfedavg", "client.variant=first_order"),
    ("client=pfedme", "client.tolerance=0.5"),
    *((f"client_optimizer={name}", "client_optimizer.persist_state=true") for name in ("adam", "adagrad", "rmsprop")),
    ("client_optimizer.momentum=0.9", "client_optimizer.nesterov=true", "client_optimizer.persist_state=true"),
    ("client_optimizer.weight_decay=0.1",),
    *((f"aggregator={name}",) for name in ("fedavg", "momentum", "norm_norm", "fednnnn")),
    ("aggregator.sensitivity=average",),
    ("aggregator=pfnm", "aggregator.sigma2=0.001", "model=mlp", "model.hidden=[8]"),
    ("aggregator=pfnm", "aggregator.tau=0.5", "client=scaffold", "model=mlp", "model.hidden=[8]"),
    ("participation=async", "aggregator=fedasync"),
    ("participation.dropout=0.4",),
    ("privacy=masked", "client=scaffold"),
    ("privacy=gaussian",),
    ("shared_data=global",),
    ("client.epochs=3", "client.batch_size=7", "schedule=cosine"),
    ("client.batch_size=null",),
    ("client.batch_size=1000",),
    ("server_optimizer=fedadam", "partition=iid"),
]


@pytest.mark.parametrize("methods", METHODS, ids=" ".join)
def test_the_sequential_engines_results(methods: tuple[str, ...]) -> None:
    keys = [o for m in methods for o in (m, *NEEDS.get(m, ()))]
    keys = [*dict.fromkeys(reversed(keys))][::-1]
    if not any(o.startswith("rounds=") for o in keys):
        keys.append("rounds=4")
    bound = ROUNDED if methods[0] in ("aggregator=pfnm", "aggregator=norm_norm", "aggregator=fednnnn") else BOUND
    bound = ROUNDED if methods[0].startswith("privacy=") else bound
    assert compare(small, keys, "engine=vmap", "engine.compile=false") < bound


IMAGES = ["dataset=mnist5k", "partition.num_clients=500", "participation.clients_per_round=3", "rounds=1"]


@pytest.mark.parametrize(
    "methods",
    [
        ["model=cnn_emnist", "client_optimizer.lr=0.01"],  # dropout
        # batch norm: batches of one size go together
        ["model=resnet20", "client_optimizer.lr=0.001", "aggregator.batch_norm=batch", "client=scaffold"],
        ["model=cnn_mnist", "client=perfedavg", "client_optimizer.lr=0.01"],
    ],
    ids=" ".join,
)
def test_networks(methods: list[str]) -> None:
    assert compare(experiment, [*IMAGES, *methods], "engine=vmap", "engine.compile=false") < 1e-7


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("memory", [0.0002, 0.0005, 1.0])
def test_stacks_and_workers_do_not_matter(workers: int, memory: float) -> None:
    keys = ["client=scaffold", "rounds=3", "participation.clients_per_round=6"]
    engine = ["engine=vmap", "engine.compile=false", f"engine.workers={workers}", f"engine.memory={memory}"]
    assert compare(small, keys, *engine) < BOUND


@pytest.mark.parametrize("methods", [("privacy=masked",), ("aggregator=pfnm", "model.hidden=[8]")])
def test_workers_send_clients_one_by_one_where_they_must(methods: tuple[str, ...]) -> None:
    engine = ["engine=vmap", "engine.compile=false", "engine.workers=2", "engine.memory=0.0005"]
    assert compare(small, [*methods, "rounds=2"], *engine) < 1e-6


def test_the_number_of_workers_leaves_the_bits_alone() -> None:
    keys = ["rounds=3", "engine=vmap", "engine.compile=false", "engine.memory=0.0005"]
    one, two = (play(small(*keys, f"engine.workers={n}"))[0] for n in (1, 2))
    for name, t in tensors(one).items():
        assert torch.equal(t, tensors(two)[name]), name


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 12), max_size=3), min_size=1, max_size=4),
    width=st.integers(1, 8),
)
def test_steps_hold_every_sample_once_and_in_order(sizes: list[list[int]], width: int) -> None:
    """[S, K, B]: what a client has in its steps, read in order, is its epochs; only its last batches are short."""
    counter = iter(range(10**6))
    orders = [[np.array([next(counter) for _ in range(n)]) for n in client] for client in sizes]
    table = stack.cut_into_steps(orders, width)
    for place, client in enumerate(orders):
        column = table[:, place]
        assert column[column >= 0].tolist() == [i for order in client for i in order]
        steps = [row[row >= 0].tolist() for row in column if (row >= 0).any()]
        expected = [order[i : i + width].tolist() for order in client for i in range(0, len(order), width)]
        assert steps == expected


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=8),
    exact=st.booleans(),
)
def test_groups_hold_everyone_who_has_a_batch(sizes: list[tuple[int, int]], exact: bool) -> None:
    found = stack.groups(np.array(sizes), exact)
    assert sorted(k for members in found for k in members) == [k for k, (n, _) in enumerate(sizes) if n]
    if exact:
        kinds = [{sizes[k] for k in members} for members in found]
        assert all(len(kind) == 1 for kind in kinds)
        assert len(set.union(set(), *kinds)) == len(found)


def test_clients_too_small_to_measure_on() -> None:
    """One sample each: all of it is D_k, B_k is empty, in every stack."""
    keys = ["dataset.train_samples=8", "partition.num_clients=8", "partition=iid", "partition.sensitivity_fraction=0.5"]
    assert compare(small, [*keys, "rounds=2"], "engine=vmap", "engine.compile=false") < BOUND


def test_padding_counts_nowhere() -> None:
    """Loss and gradient of a padded batch are those of its samples."""
    exp = doubled(small())
    task, model = exp.task.for_stacks(), initial_state(exp).model
    x = exp.data.dataset.inputs(exp.data.dataset.train_x[:6])
    y = exp.data.dataset.train_y[:6]
    grads, loss = task.gradient(model.params, {}, (x[:4], y[:4]))
    y = torch.cat([y[:4], torch.full_like(y[4:], -100)])
    padded, same = task.gradient(model.params, {}, (x, y))
    assert same.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, g in grads.items():
        torch.testing.assert_close(padded[name], g, rtol=1e-12, atol=1e-14)


def test_dropout_is_the_share_asked_for_and_independent() -> None:
    """Means and correlations of the masks, over units, keys and steps, are those of independent draws."""
    drop = Dropout(0.3).train()
    masks = []
    for word in range(200):
        drop.key.copy_(mixed(torch.tensor([word, word + 1], dtype=torch.int32)))  # as a task makes them
        masks.append((drop(torch.ones(40, 50)) > 0).double().flatten())
    table = torch.stack(masks)  # keys x units
    n = table.numel()
    assert abs(table.mean() - 0.7) < 4 * (0.21 / n) ** 0.5
    assert (table.mean(0) - 0.7).abs().max() < 5 * (0.21 / len(table)) ** 0.5
    assert (table.mean(1) - 0.7).abs().max() < 5 * (0.21 / table.shape[1]) ** 0.5
    for other in (table.roll(1, 0), table.roll(1, 1), table.roll(50, 1)):  # the next key, unit, row
        assert abs(((table - 0.7) * (other - 0.7)).mean()) < 5 * 0.21 / n**0.5
    kept = drop(torch.full((10,), 7.0))
    assert all(v == 0 or v == pytest.approx(10) for v in kept.tolist())


def test_dropout_rests_outside_training_and_at_its_ends() -> None:
    x = torch.randn(5, 5)
    assert torch.equal(Dropout(0.9).eval()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)
    assert torch.equal(Dropout(1.0).train()(x), x * 0)


def test_a_users_dropout_becomes_ours_and_its_steps_differ(tmp_path: Path, fedsim: Command) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, input_shape, num_classes):\n"
        "        super().__init__(nn.Linear(input_shape[0], 32), nn.Dropout(0.5), nn.Linear(32, num_classes))\n"
    )
    keys = ["dataset=synthetic", "model=custom", "model.load=mine.Net", "rounds=5"]
    for engine in ("sequential", "vmap"):
        result = fedsim(*keys, f"engine={engine}", f"hydra.run.dir={engine}")
        assert result.returncode == 0, result.stderr
    one, other = (metrics(tmp_path / engine) for engine in ("sequential", "vmap"))
    np.testing.assert_allclose(one["client/loss"].astype(float), other["client/loss"].astype(float), rtol=1e-4)


def test_randomness_of_torchs_own_is_refused(tmp_path: Path, fedsim: Command) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, input_shape, num_classes):\n"
        "        super().__init__(input_shape[0], num_classes)\n"
        "    def forward(self, x):\n"
        "        return super().forward(x + torch.randn_like(x) if self.training else x)\n"
    )
    keys = ["dataset=synthetic", "model=custom", "model.load=mine.Net", "rounds=2"]
    refused = fedsim(*keys, "engine=vmap")
    assert refused.returncode == 2
    assert "engine=vmap cannot train this model" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert fedsim(*keys).returncode == 0  # engine=auto finds another way


def test_a_run_goes_on_as_if_it_had_not_stopped() -> None:
    keys = ["client=scaffold", "client_optimizer.persist_state=true", "engine=vmap", "engine.compile=false"]
    whole, _ = play(small(*keys, "rounds=6"))
    half, _ = play(small(*keys, "rounds=3"))
    rest, _ = play(small(*keys, "rounds=6"), half)
    for name, t in tensors(whole).items():
        assert torch.equal(t, tensors(rest)[name]), name


COMPILED = ["engine.compile=true"]


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        # Adam's two moments are one tensor at the start; extra batches; a schedule; stacks that are not full
        (small, ["engine=vmap", "client=perfedavg", "client.variant=hessian_free", "client_optimizer=adam",
                 "schedule=cosine", "client.batch_size=7", "participation.clients_per_round=5", "engine.memory=0.0008",
                 "participation.stragglers=0.5", "rounds=3"]),
        # the server's half too: memories of aggregator, server optimizer and rule; what clients send and report
        (small, ["engine=vmap", "client=scaffold", "aggregator=elastic", "server_optimizer=fedadam", "rounds=3"]),
        (small, ["engine=vmap", "client=loadaboost", "client.epochs=2", "aggregator=fednnnn",
                 "server_optimizer=fedavgm", "rounds=3"]),
        (experiment, ["engine=sequential", *IMAGES, "model=cnn_emnist", "aggregator=fedavg",
                      "client_optimizer.lr=0.01", "partition=iid", "partition.num_clients=250"]),
        # B_k of 13 samples: a compiled batch and a short one; 20 to train on, and a last batch of 6 compiled as well
        (experiment, ["engine=sequential", *IMAGES, "model=resnet20", "partition=iid", "partition.num_clients=120",
                      "partition.sensitivity_fraction=0.4", "client_optimizer.lr=0.001", "client.batch_size=7"]),
    ],
    ids=["stacked", "server, rates", "server, lengths", "one client", "one client's sensitivities"],
)  # fmt: skip
def test_compiled_steps(make: Callable[..., Experiment], keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "CALLS", 0)
    monkeypatch.setattr(auto, "FEWER_CALLS", 0)
    others = [k for k in keys if not k.startswith("engine")]
    bound = ROUNDED if "aggregator=fednnnn" in keys else 1e-8
    assert compare(make, others, *[k for k in keys if k.startswith("engine")], *COMPILED) < bound


@pytest.mark.parametrize(
    "keys",
    [
        ["aggregator=elastic", "server_optimizer=fedavgm", "schedule=cosine", "rounds=3"],
        # several batches to measure on, whose mean is taken; some have fewer than others
        ["aggregator=elastic", "aggregator.sensitivity=average", "aggregator.batch_size=8",
         "partition.sensitivity_fraction=0.3", "partition.sigma=0.5", "client_optimizer=adam", "rounds=2"],
        ["client=fedprox", "aggregator=fednnnn", "server_optimizer=fedyogi", "model=mlp", "model.hidden=[6]",
         "client.epochs=2", "rounds=3"],
    ],
    ids=["elastic", "average", "fednnnn"],
)  # fmt: skip
def test_a_round_as_one_program(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring, steps, sums and the server's half."""
    played: list[type] = []
    learn = Server._learned

    def learned(self: Server, *given: Any) -> Any:
        played.append(type(self._cohort) if self.compiles else Server)
        return learn(self, *given)

    monkeypatch.setattr(Server, "_learned", learned)
    bound = ROUNDED if "aggregator=fednnnn" in keys else 1e-8
    keys = [*keys, "client.batch_size=20"]
    assert compare(small, keys, "engine=vmap", *COMPILED) < bound
    assert [kind for kind in played if kind is not Server] == [Deferred]  # recorded once, for all rounds


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 3))
def test_no_step_of_a_whole_round_is_cut_too_short(sizes: list[int], batch_size: int, epochs: int) -> None:
    """Nor wider than the client that has most samples there."""
    steps = stack.cut_into_steps([[np.arange(size)] * epochs for size in sizes], batch_size)
    expected = (steps >= 0).sum(2).max(1).tolist()
    assert widest(np.array(sizes), batch_size, epochs, len(steps)) == expected


WORDS = ["dataset=custom", "dataset.load=sequences.counting", "dataset.test_fraction=0.2", "partition=natural"]


def test_sequences() -> None:
    """Targets at every position, padding at the ends, and an LSTM, which has no batching rule of torch's own."""
    keys = [*WORDS, "model=lstm_shakespeare", "model.hidden=6", "rounds=3", "client_optimizer.lr=0.5"]
    keys += ["client.batch_size=4", "participation.clients_per_round=3"]
    assert compare(experiment, keys, "engine=vmap", "engine.compile=false") < BOUND
    # A single client's, compiled, has a kernel of its own, for its sensitivities too.
    assert compare(experiment, [*keys, "aggregator=elastic"], "engine=sequential", *COMPILED) < BOUND
