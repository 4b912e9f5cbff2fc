"""A global set that clients share: what is in it, who gets which part, the warm-up, and how far labels are off."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from conftest import play, small
from torch import nn

from fedsim import rng
from fedsim.check import BadValue
from fedsim.data import FederatedData
from fedsim.runner import Experiment, initial_state, weights
from fedsim.shared_data import SharedData, earth_movers_distance
from fedsim.types import Tree

SKEWED = ("partition.alpha=0.1", "aggregator=fedavg")


def shared(beta: float, alpha: float = 0.5, warmup: int = 0, *overrides: str) -> Experiment:
    """240 samples of 10 classes over 6 clients."""
    values = (f"shared_data.beta={beta}", f"shared_data.alpha={alpha}", f"shared_data.warmup_epochs={warmup}")
    return small("shared_data=global", *values, *overrides)


def labels(exp: Experiment) -> np.ndarray:
    return exp.data.dataset.train_y.numpy()


def own_data(data: FederatedData, client: int) -> np.ndarray:
    """D_k and B_k: all that was given to the client itself."""
    return data.split.indices[data.split.offsets[client] : data.split.offsets[client + 1]]


def linear(params: Tree) -> reference.Params:
    return {"W": params["layers.0.weight"].numpy().astype(float), "b": params["layers.0.bias"].numpy().astype(float)}


def samples(data: FederatedData, client: int, round: int, batch_size: int | None = 10) -> list[list[float]]:
    """What a client sees in one epoch of a round, in an order that can be compared."""
    return sorted(x.tolist() for batch, _ in data.client(client, round, batch_size).batches(1) for x in batch)


@pytest.mark.parametrize(("alpha", "warmup"), [(0.5, 0), (0.0, 3), (1.0, 5)])
def test_without_a_global_set_it_is_fedavg_bit_for_bit(alpha: float, warmup: int) -> None:
    plain_exp = small(*SKEWED, "rounds=3", "eval.train=true")
    zero_exp = shared(0.0, alpha, warmup, *SKEWED, "rounds=3", "eval.train=true")
    assert zero_exp.data.split.fingerprint() == plain_exp.data.split.fingerprint()
    assert len(zero_exp.data.global_set) == 0
    plain, plain_rows = play(plain_exp)
    zero, zero_rows = play(zero_exp)
    for name, p in plain.model.params.items():
        assert torch.equal(p, zero.model.params[name])
    drop = "time/round_s"
    assert [{k: v for k, v in r.items() if k != drop} for r in zero_rows] == [
        {k: v for k, v in r.items() if k != drop} for r in plain_rows
    ]


@pytest.mark.parametrize(
    ("beta", "size"),
    [(0.2, 40), (0.05, 11), (0.1, 22), (1.0, 120), (0.25, 48)],  # 240 beta/(1+beta): 40, 11.43, 21.8, 120, 48
)
def test_the_global_sets_size_and_balance(beta: float, size: int) -> None:
    exp = shared(beta, 0.5, 0, *SKEWED)
    G = exp.data.global_set
    D = np.concatenate([own_data(exp.data, k) for k in range(6)])
    assert len(G) == size
    assert len(D) == 240 - size
    assert abs(len(G) - beta * len(D)) <= (1 + beta) / 2 + 1e-9, "the nearest |G| with |G| + |D| = 240"
    counts = np.bincount(labels(exp)[G], minlength=10)
    assert counts.max() - counts.min() <= 1
    assert counts.sum() == size


@pytest.mark.parametrize("partition", ["dirichlet", "iid", "classes", "one_class"])
def test_every_sample_is_in_the_global_set_or_with_exactly_one_client(partition: str) -> None:
    clients = "partition.num_clients=10" if partition == "one_class" else "partition.num_clients=6"
    exp = shared(0.2, 0.5, 0, f"partition={partition}", clients)
    everything = [exp.data.global_set, *(own_data(exp.data, k) for k in range(exp.data.num_clients))]
    assert np.array_equal(np.sort(np.concatenate(everything)), np.arange(240))
    for k in range(exp.data.num_clients):
        assert not set(exp.data.split.sensitivity(k)) & set(exp.data.training(k)), "B_k stays apart"


def test_the_partition_follows_its_law_on_what_is_left() -> None:
    """Each client of `classes` holds two classes of its own, by the labels of the samples it really has."""
    exp = shared(0.2, 0.5, 0, "partition=classes", "partition.num_clients=5")
    held = [set(labels(exp)[own_data(exp.data, k)]) for k in range(5)]
    assert [len(h) for h in held] == [2] * 5
    assert set.union(*held) == set(range(10))


def test_the_global_set_is_a_function_of_the_seed() -> None:
    one, again, two = (shared(0.2, 0.5, 0, f"seed={s}").data for s in (0, 0, 1))
    other_method = shared(0.2, 0.9, 2, "aggregator=elastic", "client=fedprox").data
    assert np.array_equal(one.global_set, again.global_set)
    assert np.array_equal(one.global_set, other_method.global_set)
    assert not np.array_equal(one.global_set, two.global_set)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.73, 1.0])
def test_each_client_adds_its_own_portion(alpha: float) -> None:
    exp = shared(0.2, alpha, 0, "partition.sigma=0.5")
    G = set(exp.data.global_set.tolist())
    portions = []
    for k in range(6):
        own, whole = exp.data.split.training(k), exp.data.training(k)
        portion = sorted(set(whole.tolist()) - set(own.tolist()))
        assert len(whole) == len(own) + round(alpha * 40)
        assert len(portion) == round(alpha * 40), "distinct, and none of its own"
        assert set(portion) <= G
        assert set(own.tolist()) <= set(whole.tolist())
        portions.append(tuple(portion))
    assert (len(set(portions)) == 6) == (0 < alpha < 1), "all different, unless they are nothing or everything"


def test_portions_are_drawn_evenly() -> None:
    exp = shared(0.2, 0.25, 0, "partition.num_clients=60", "partition.sigma=0")
    added = np.concatenate([exp.data.training(k)[len(exp.data.split.training(k)) :] for k in range(60)])
    counts = np.bincount(np.searchsorted(exp.data.global_set, added), minlength=40)
    assert counts.sum() == 600
    assert np.abs(counts - 15).max() < 4.5 * np.sqrt(60 * 0.25 * 0.75)


def test_portions_are_the_same_in_every_round_and_are_trained_on() -> None:
    exp = shared(0.2, 0.5)
    data = exp.data
    for k in range(3):
        expected = sorted(x.tolist() for x in data.dataset.train_x[data.training(k)])
        for r in (0, 1, 7):
            assert samples(data, k, r) == expected
        assert samples(data, k, 3, None) == expected
    orders = [torch.cat([x for x, _ in data.client(0, r, 10).batches(1)]) for r in (0, 1)]
    assert not torch.equal(*orders)


def test_weights_steps_and_time_count_the_portion() -> None:
    exp = shared(0.2, 0.5, 0, "partition.sigma=0.8", "participation.speed=2.0", "rounds=1")
    sizes = np.array([len(exp.data.split.training(k)) + 20 for k in range(6)])
    assert exp.data.sizes.tolist() == sizes.tolist()
    clients = exp.participation.draw(0, 0, 6)
    assert weights(exp, clients) == pytest.approx((sizes[clients] / sizes[clients].sum()).tolist())
    assert list(exp.steps) == [-(-n // 10) for n in sizes]
    assert play(exp)[1][0]["time/virtual_s"] == pytest.approx(max(exp.steps[k] for k in clients) / 2)


def test_a_round_against_numpy() -> None:
    """theta = sum_k w_k theta_k, each trained on D_k and its portion; every client takes one full-batch step."""
    exp = shared(0.2, 0.5, 0, "partition.sigma=0.8", "client=fedsgd", "aggregator=fedavg", "rounds=1")
    start = linear(exp.task.initial_model().params)
    x, y = exp.data.dataset.train_x.numpy().astype(float), labels(exp)
    clients = exp.participation.draw(0, 0, 6)
    total = sum(len(exp.data.training(k)) for k in clients)
    expected = {n: np.zeros_like(v) for n, v in start.items()}
    for k in clients:
        own = exp.data.training(k)
        end = reference.sgd(start, [(x[own], y[own])], lr=0.1)
        expected = {n: e + len(own) / total * end[n] for n, e in expected.items()}
    found = linear(play(exp)[0].model.params)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)


def test_the_warm_up_is_descent_on_the_global_set() -> None:
    """With whole batches the order plays no part: seven steps on G in NumPy."""
    exp = shared(0.2, 0.5, 7, "client.batch_size=null", "rounds=1")
    G = exp.data.global_set
    x, y = exp.data.dataset.train_x.numpy().astype(float)[G], labels(exp)[G]
    expected = reference.sgd(linear(exp.task.initial_model().params), [(x, y)] * 7, lr=0.1)
    found = linear(initial_state(exp).model.params)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_the_warm_up_in_batches_against_torch() -> None:
    """Epochs over G in fresh orders, in the clients' batches (the last one short), with their optimizer."""
    overrides = ("model=mlp", "client.batch_size=7", "client_optimizer=momentum", "client_optimizer.weight_decay=0.01")
    exp = shared(0.2, 0.5, 3, *overrides)
    G, data, rule = exp.data.global_set, exp.data.dataset, exp.client_optimizer
    found, module = initial_state(exp).model.params, exp.task.module
    module.load_state_dict(exp.task.initial_model().params)
    optimizer = torch.optim.SGD(module.parameters(), rule.lr, momentum=rule.momentum, weight_decay=0.01)
    order = rng.generator(exp.seed, "warm-up", 0, 0)
    steps = 0
    for _ in range(3):
        epoch = G[order.permutation(40)]
        for i in range(0, 40, 7):
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                module(data.train_x[epoch[i : i + 7]]), data.train_y[epoch[i : i + 7]]
            ).backward()
            optimizer.step()
            steps += 1
    assert steps == 18
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-4, atol=1e-5)


def test_the_warm_up_happens_once_and_before_the_first_round() -> None:
    exp = shared(0.2, 0.5, 3, "rounds=2")
    warm = initial_state(exp)
    cold = initial_state(replace(exp, warmup_epochs=0))
    assert not torch.equal(warm.model.params["layers.0.weight"], cold.model.params["layers.0.weight"])
    assert (warm.round, warm.clock) == (0, {"now": 0.0})
    assert not warm.clients
    _, rows = play(exp)
    assert rows[0]["comm/down_bytes"] == 3 * 210 * 4, "not counted as communication"
    one, two = (play(replace(exp, rounds=1), warm)[0].model, play(replace(exp, rounds=1))[0].model)
    assert all(torch.equal(p, two.params[n]) for n, p in one.params.items())


def test_a_warm_model_starts_better() -> None:
    losses = [play(shared(0.25, 0.5, e, "rounds=1", *SKEWED))[1][0]["test/loss"] for e in (0, 5)]
    assert losses[1] < losses[0]


def test_with_alpha_zero_the_clients_do_not_see_the_global_set() -> None:
    exp = shared(0.2, 0.0, 0, "rounds=2", "eval.train=true")
    bare = replace(exp, data=FederatedData(exp.data.dataset, exp.data.split, exp.seed))
    one, two = play(exp), play(bare)
    for name, p in one[0].model.params.items():
        assert torch.equal(p, two[0].model.params[name])
    assert one[1][-1]["train/loss"] == two[1][-1]["train/loss"]


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_the_training_set_is_what_some_client_trains_on(alpha: float) -> None:
    exp = shared(0.2, alpha)
    trained = np.unique(np.concatenate([exp.data.training(k) for k in range(6)]))
    assert exp.data.training_set.tolist() == trained.tolist()


# ---------------------------------------------------------------- earth mover's distance


def test_earth_movers_distance_by_hand() -> None:
    """Population (1/2, 1/4, 1/4). (1, 0, 0): 1/2 + 1/4 + 1/4 = 1. (0, 0, 1): 1/2 + 1/4 + 3/4 = 3/2. In its proportions:
    0. (1/4, 3/4, 0): 1/4 + 1/2 + 1/4 = 1."""
    counts = np.array([[7, 0, 0], [0, 0, 3], [20, 10, 10], [1, 3, 0]])
    found = earth_movers_distance(counts, np.array([50, 25, 25]))
    assert found.tolist() == pytest.approx([1.0, 1.5, 0.0, 1.0])


def test_one_class_of_ten_is_1_8_away() -> None:
    """A client of a single class out of ten equal ones: |1 - 0.1| + 9 * 0.1."""
    found = earth_movers_distance(np.eye(10, dtype=int) * 12, np.full(10, 500))
    assert found.tolist() == pytest.approx([1.8] * 10)
    assert earth_movers_distance(np.full((1, 10), 3), np.full(10, 500)).tolist() == pytest.approx([0.0])


def test_label_counts_are_those_of_what_is_trained_on() -> None:
    for exp in (shared(0.2, 0.5, 0, *SKEWED), shared(0.2, 0.0, 0, *SKEWED), small(*SKEWED)):
        expected = [np.bincount(labels(exp)[exp.data.training(k)], minlength=10) for k in range(6)]
        assert np.array_equal(exp.data.label_counts(), expected)


def distances(exp: Experiment) -> np.ndarray:
    """EMD from its definition."""
    population = np.bincount(labels(exp), minlength=10) / 240
    found = []
    for k in range(exp.data.num_clients):
        own = labels(exp)[exp.data.training(k)]
        found.append(sum(abs((own == c).mean() - population[c]) for c in range(10)))
    return np.array(found)


def test_distances_fall_as_the_global_set_grows() -> None:
    means = []
    for beta in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0):
        exp = shared(beta, 1.0, 0, "partition=one_class", "partition.num_clients=10")
        population = np.bincount(labels(exp), minlength=10)
        found = earth_movers_distance(exp.data.label_counts(), population)
        np.testing.assert_allclose(found, distances(exp), atol=1e-12)
        means.append(found.mean())
    assert means[0] == pytest.approx(1.8)
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.3
    assert len(set(means)) == 6


def test_distances_fall_as_the_portion_grows() -> None:
    exps = [shared(0.2, alpha, 0, "partition=one_class", "partition.num_clients=10") for alpha in (0.0, 0.25, 0.5, 1.0)]
    means = [distances(exp).mean() for exp in exps]
    assert means == sorted(means, reverse=True)
    assert len(set(means)) == 4


def test_the_command_writes_each_clients_distance(
    fedsim: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """In clients.csv: whom a client trains with, and how far its labels are off."""
    overrides = ("dataset=synthetic", "dataset.train_samples=240", "dataset.test_samples=60", "partition=one_class")
    overrides = (*overrides, "partition.num_clients=10", "participation.clients_per_round=3", "shared_data=global")
    done = fedsim(*overrides, "shared_data.beta=0.2", "rounds=1", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "run" / "clients.csv")
    exp = shared(0.2, 0.5, 5, "partition=one_class", "partition.num_clients=10")
    np.testing.assert_allclose(table["emd"], distances(exp), atol=1e-6)
    assert table["client"].tolist() == list(range(10))
    assert (table["samples"] + table["shared_samples"]).tolist() == [len(exp.data.training(k)) for k in range(10)]


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("beta=-0.1", "beta=-0.1: must be a number >= 0 and <= 1"),
        ("beta=1.5", "beta=1.5: must be a number >= 0 and <= 1"),
        ("beta=nan", "beta=nan: must be a number >= 0 and <= 1"),
        ("beta=much", "beta=much: must be a number >= 0 and <= 1"),
        ("alpha=-1", "alpha=-1: must be a number >= 0 and <= 1"),
        ("alpha=1.01", "alpha=1.01: must be a number >= 0 and <= 1"),
        ("alpha=null", "alpha=None: must be a number >= 0 and <= 1"),
        ("warmup_epochs=-1", "warmup_epochs=-1: must be a whole number >= 0"),
        ("warmup_epochs=1.5", "warmup_epochs=1.5: must be a whole number >= 0"),
        ("beta=0.01", "beta=0.01: leaves less than one sample for each of 10 classes"),
    ],
)
def test_bad_values_are_refused_in_one_line(override: str, said: str) -> None:
    with pytest.raises(BadValue) as error:
        small("shared_data=global", f"shared_data.{override}")
    assert str(error.value) == f"shared_data.{said}"


def test_a_class_that_is_too_small_is_named() -> None:
    """Of 100 samples two are of class 1: a balanced G of 50 would need 25."""
    rare = np.array([0] * 98 + [1] * 2)
    with pytest.raises(BadValue, match=r"^beta=1\.0: class 1 has only 2 samples$"):
        SharedData(1.0, 0.5, 0).draw(rare, 0)
    assert np.bincount(rare[SharedData(0.04, 0.5, 0).draw(rare, 0)]).tolist() == [2, 2]


def test_too_many_clients_for_what_is_left() -> None:
    with pytest.raises(
        BadValue, match=r"^partition\.num_clients=130: must be at most the number of training samples, 120"
    ):
        shared(1.0, 0.5, 0, "partition.num_clients=130")
