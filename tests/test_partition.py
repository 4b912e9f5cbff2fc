"""Partitions: every sample to exactly one client, in bounded time, by the stated law, the same on any machine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.check import BadValue
from fedsim.data import Population, Split
from fedsim.partition.base import Partition, apportion
from fedsim.partition.classes import Classes
from fedsim.partition.dirichlet import Dirichlet, dirichlet
from fedsim.partition.iid import Iid
from fedsim.partition.one_class import OneClass
from fedsim.rng import generator

BALANCED = np.repeat(np.arange(10), 200)
MNIST_LABELS = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def common(num_clients: int, sigma: float = 0.0, power: float = 0.0, fraction: float = 0.1) -> dict[str, float]:
    return {"num_clients": num_clients, "sigma": sigma, "power": power, "sensitivity_fraction": fraction}


def everything(split: Split) -> np.ndarray:
    return np.concatenate([np.concatenate([split.training(k), split.sensitivity(k)]) for k in range(split.num_clients)])


def label_sets(split: Split, labels: np.ndarray) -> list[set[int]]:
    own = [np.concatenate([split.training(k), split.sensitivity(k)]) for k in range(split.num_clients)]
    return [set(labels[i].tolist()) for i in own]


def label_counts(split: Split, labels: np.ndarray) -> np.ndarray:
    own = [np.concatenate([split.training(k), split.sensitivity(k)]) for k in range(split.num_clients)]
    return np.array([np.bincount(labels[i], minlength=labels.max() + 1) for i in own])


ALL = {
    "iid": lambda **k: Iid(**k),
    "dirichlet": lambda **k: Dirichlet(**k, alpha=0.3),
    "dirichlet, nearly one class": lambda **k: Dirichlet(**k, alpha=1e-3),
    "dirichlet, nearly even": lambda **k: Dirichlet(**k, alpha=1e6),
    "classes": lambda **k: Classes(**k, classes_per_client=2),
    "one class": lambda **k: OneClass(**k, non_iid=1.0),
    "one class, 99 %": lambda **k: OneClass(**k, non_iid=0.99),
}


@pytest.mark.parametrize("law", ALL)
@pytest.mark.parametrize(("sigma", "power"), [(0, 0), (0.8, 0), (5.0, 0), (0, 1.2), (0, 8.0)])
def test_every_sample_goes_to_exactly_one_client(law: str, sigma: float, power: float) -> None:
    split = ALL[law](**common(40, sigma, power))(Population(MNIST_LABELS), seed=3)
    assert np.array_equal(np.sort(everything(split)), np.arange(len(MNIST_LABELS)))
    assert split.sizes.min() >= 1


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=200),
    clients=st.integers(1, 30),
    alpha=st.floats(1e-4, 1e4),
    sigma=st.floats(0, 10),
    fraction=st.floats(0, 0.95),
    seed=st.integers(0, 2**40),
)
def test_dirichlet_partitions_any_legal_input(labels, clients, alpha, sigma, fraction, seed) -> None:
    y = np.array(labels)
    partition = Dirichlet(**common(clients, sigma, fraction=fraction), alpha=alpha)
    if clients > len(y):
        with pytest.raises(BadValue, match="num_clients"):
            partition(Population(y), seed)
        return
    split = partition(Population(y), seed)
    assert np.array_equal(np.sort(everything(split)), np.arange(len(y)))
    assert split.sizes.min() >= 1


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.sampled_from([0] * 20 + [1] * 9 + [2] * 4 + [3, 4, 5]), min_size=1, max_size=200),
    clients=st.integers(1, 30),
    n=st.integers(1, 4),
    power=st.floats(0, 3),
    seed=st.integers(0, 1000),
)
def test_classes_gives_exactly_n_or_says_why_not(labels, clients, n, power, seed) -> None:
    """It can be done exactly when n <= C <= K n <= sum_c min(N_c, K): every class held, none by more than it has."""
    y = np.array(labels)
    supply = np.unique(y, return_counts=True)[1]
    partition = Classes(**common(clients, power=power), classes_per_client=n)
    if not n <= len(supply) <= clients * n <= np.minimum(supply, clients).sum():
        with pytest.raises(BadValue):
            partition(Population(y), seed)
        return
    split = partition(Population(y), seed)
    assert np.array_equal(np.sort(everything(split)), np.arange(len(y)))
    assert {len(s) for s in label_sets(split, y)} == {n}


def test_the_same_seed_gives_the_same_split_on_any_machine() -> None:
    """Fingerprints written down once. A change here is a change of everybody's results."""
    found = {
        law: ALL[law](**common(20, sigma=0.5))(Population(BALANCED), seed=7).fingerprint()
        for law in ("iid", "dirichlet", "classes", "one class, 99 %")
    }
    assert found == {
        "iid": "c4b560a2961254df",
        "dirichlet": "6c2441808820c1ad",
        "classes": "672dc29dbb6667ae",
        "one class, 99 %": "9f55a0055782c715",
    }


def test_seeds_differ() -> None:
    assert len({ALL["dirichlet"](**common(20))(Population(BALANCED), seed).fingerprint() for seed in range(5)}) == 5


def test_dirichlet_moments() -> None:
    """E p = 1/C and Var p = (1/C)(1 - 1/C) / (C alpha + 1), for alphas on both sides of one."""
    for alpha in (0.05, 0.5, 5.0):
        p = dirichlet(alpha, (20_000, 10), generator(0, "test"))
        variance = 0.1 * 0.9 / (10 * alpha + 1)
        assert np.allclose(p.sum(1), 1)
        assert np.allclose(p.mean(0), 0.1, atol=5 * np.sqrt(variance / 20_000))
        assert np.allclose(p.var(0), variance, rtol=0.06)


def test_dirichlet_of_a_tiny_alpha_is_one_class_and_never_nan() -> None:
    p = dirichlet(1e-5, (1000, 10), generator(0, "test"))
    assert np.allclose(p.max(1), 1)
    assert np.allclose(np.bincount(p.argmax(1)) / 1000, 0.1, atol=0.05)


@pytest.mark.parametrize("alpha", [0.5, 5.0, 100.0])
def test_label_counts_follow_the_dirichlet_multinomial(alpha: float) -> None:
    """A client's count of a class has variance n p (1 - p) (n + C alpha) / (1 + C alpha): the Dirichlet-multinomial.
    (Drawing without replacement from a finite set bends this a little; 50 of 20,000 a client keeps that small.)"""
    labels = np.repeat(np.arange(10), 2000)
    counts = label_counts(Dirichlet(**common(400), alpha=alpha)(Population(labels), seed=1), labels)
    n, a = 50, 10 * alpha
    expected = n * 0.1 * 0.9 * (n + a) / (1 + a)
    assert counts.sum(1).tolist() == [n] * 400
    assert counts.var() == pytest.approx(expected, rel=0.15)


def test_lognormal_sizes_have_the_stated_spread() -> None:
    for sigma in (0.3, 1.0):
        split = Iid(**common(2000, sigma=sigma, fraction=0))(Population(np.zeros(2_000_000, dtype=int)), seed=0)
        log_sizes = np.log(split.sizes)
        assert log_sizes.std() == pytest.approx(sigma, rel=0.05)
        skewness = (((log_sizes - log_sizes.mean()) / log_sizes.std()) ** 3).mean()
        assert abs(skewness) < 0.2, "the logarithm is symmetric"


def test_power_law_sizes() -> None:
    split = Iid(**common(100, power=1.0, fraction=0))(Population(np.zeros(100_000, dtype=int)), seed=0)
    sizes = np.sort(split.sizes)[::-1]
    harmonic = (1 / np.arange(1, 101)).sum()
    assert np.allclose(sizes, 100_000 / harmonic / np.arange(1, 101), atol=1)


def test_balanced_sizes_differ_by_one_at_most() -> None:
    for law in ("iid", "dirichlet"):
        sizes = np.diff(ALL[law](**common(7))(Population(np.zeros(100, dtype=int)), seed=0).offsets)
        assert sorted(set(sizes.tolist())) == [14, 15]


def test_classes_is_balanced_to_the_sample_where_it_can_be() -> None:
    split = Classes(**common(100), classes_per_client=2)(Population(MNIST_LABELS), seed=0)
    sizes = np.diff(split.offsets)
    assert sizes.min() >= 598
    assert sizes.max() <= 602
    assert {len(s) for s in label_sets(split, MNIST_LABELS)} == {2}
    pairs = {tuple(sorted(s)) for s in label_sets(split, MNIST_LABELS)}
    assert len(pairs) > 20, "clients do not all hold the same few pairs"


def test_classes_with_power_law_sizes_approaches_them() -> None:
    split = Classes(**common(100, power=1.0), classes_per_client=2)(Population(MNIST_LABELS), seed=0)
    sizes = np.sort(np.diff(split.offsets))
    wanted = np.sort(apportion(60_000, np.arange(1, 101.0) ** -1.0))
    assert np.allclose(sizes, wanted, rtol=0.02, atol=3)


def test_full_non_iid_and_99_percent() -> None:
    split = OneClass(**common(10), non_iid=1.0)(Population(BALANCED), seed=0)
    assert label_counts(split, BALANCED).tolist() == (200 * np.eye(10, dtype=int)).tolist()
    counts = label_counts(OneClass(**common(10), non_iid=0.95)(Population(BALANCED), seed=0), BALANCED)
    assert counts.sum(1).tolist() == [200] * 10, "ten of each class are pooled, ten of the pool come back to everyone"
    assert (np.diag(counts) >= 190).all()
    assert counts.sum() - np.trace(counts) > 70, "the pooled share is spread over all clients"


def test_one_class_with_unequal_sizes() -> None:
    counts = label_counts(OneClass(**common(20, sigma=1.0), non_iid=1.0)(Population(BALANCED), seed=0), BALANCED)
    assert (np.count_nonzero(counts, axis=1) == 1).all()
    assert counts.sum(1).std() > 30


def test_b_k_is_a_tenth_and_at_least_one_where_there_are_two() -> None:
    split = Iid(**common(4, fraction=0.1))(Population(np.zeros(400, dtype=int)), seed=0)
    assert split.held.tolist() == [10] * 4
    tiny = Iid(**common(50, fraction=0.1))(Population(np.zeros(75, dtype=int)), seed=0)
    counts = np.diff(tiny.offsets)
    assert set(zip(counts.tolist(), tiny.held.tolist(), strict=True)) == {(1, 0), (2, 1)}
    assert Iid(**common(4, fraction=0.9))(Population(np.zeros(8, dtype=int)), seed=0).held.tolist() == [1] * 4
    assert Iid(**common(4, fraction=0.0))(Population(np.zeros(8, dtype=int)), seed=0).held.tolist() == [0] * 4


def test_b_k_is_a_random_part_of_the_client() -> None:
    """Not, say, its first class: over clients, B_k's labels are distributed as D_k's."""
    split = OneClass(**common(10), non_iid=0.5)(Population(MNIST_LABELS), seed=0)
    held = np.concatenate([split.sensitivity(k) for k in range(10)])
    expected = np.bincount(MNIST_LABELS) / 10
    assert np.allclose(np.bincount(MNIST_LABELS[held]), expected, rtol=0.15)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Iid(**common(2001)), "num_clients=2001: must be at most the number of training samples, 2000"),
        (Classes(**common(4), classes_per_client=2), "num_clients=4.*leaves some of the 10 classes to nobody"),
        (Classes(**common(4), classes_per_client=11), "classes_per_client=11: must be at most"),
        (
            Classes(**common(1500), classes_per_client=2),
            "num_clients=1500: must be at most 1000 for 2 classes a client",
        ),
        (OneClass(**common(9), non_iid=1.0), "num_clients=9: must be at least the number of classes, 10"),
        (OneClass(**common(10), non_iid=0.001), "non_iid=0.001: leaves 0 of class 0's 200 samples to its 1 clients"),
        (OneClass(**common(10, sigma=1.0), non_iid=1.0), "sigma=1.0: must be 0 where a class has a single client"),
    ],
)
def test_what_cannot_be_split_is_said_so(partition: Partition, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        partition(Population(BALANCED), seed=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_clients": 0},
        {"sigma": -1.0},
        {"power": float("nan")},
        {"sensitivity_fraction": 1.0},
        {"sigma": 1.0, "power": 1.0},
        {"num_clients": 2.5},
    ],
)
def test_bad_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadValue):
        Iid(**{**common(4), **wrong})
    with pytest.raises(BadValue, match="alpha"):
        Dirichlet(**common(4), alpha=0.0)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(lambda w: sum(w) > 1e-3),
    minimum=st.integers(0, 3),
    extra=st.integers(0, 1000),
)
def test_apportion_is_exact_and_proportional(weights: list[float], minimum: int, extra: int) -> None:
    w = np.array(weights)
    total = minimum * len(w) + extra
    shares = apportion(total, w, minimum)
    assert shares.sum() == total
    assert shares.min() >= minimum
    exact = total * w / w.sum()
    if (exact >= minimum).all():
        assert np.abs(shares - exact).max() <= 1
