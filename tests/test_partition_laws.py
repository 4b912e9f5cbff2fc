"""Pachinko, shards and natural partitions against their laws; a partition's numbers; its cache; what is refused.

Statistical tests have fixed seeds. A chi-square must leave p > 1e-4; a mean must lie within five standard errors of its
exact expectation (a true law is further off once in two million)."""

import functools
import inspect
import io
import json
import random
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import config, environment
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import betabinom, chi2_contingency, chisquare

import fedsim
from fedsim import build
from fedsim.check import BadValue, InputError
from fedsim.data import Population, Split
from fedsim.partition import cache
from fedsim.partition.base import Partition
from fedsim.partition.classes import Classes
from fedsim.partition.dirichlet import Dirichlet
from fedsim.partition.iid import Iid
from fedsim.partition.natural import Natural
from fedsim.partition.one_class import OneClass
from fedsim.partition.pachinko import Pachinko
from fedsim.partition.shards import Shards
from fedsim.partition.statistics import gini, statistics
from fedsim.runner import Experiment
from fedsim.shared_data import earth_movers_distance

UNLIKELY = 1e-4
CIFAR100 = Population(np.repeat(np.arange(100), 500), coarse=np.arange(100) // 5)


def pachinko(num_clients: int, alpha: float = 0.1, beta: float = 10.0, **other: float) -> Pachinko:
    given = {"sensitivity_fraction": 0.0, "sigma": 0.0, "power": 0.0, **other}
    return Pachinko(num_clients=num_clients, alpha=alpha, beta=beta, **given)


def shards(num_clients: int, shards_per_client: int = 2, fraction: float = 0.0) -> Shards:
    return Shards(num_clients=num_clients, shards_per_client=shards_per_client, sensitivity_fraction=fraction)


def natural(num_clients: int | None = None, min_samples: int = 1, fraction: float = 0.0) -> Natural:
    return Natural(num_clients=num_clients, min_samples=min_samples, sensitivity_fraction=fraction)


def holdings(split: Split) -> list[np.ndarray]:
    """All that each client has, B_k included."""
    return [np.concatenate([split.sensitivity(k), split.training(k)]) for k in range(split.num_clients)]


def table(split: Split, labels: np.ndarray) -> np.ndarray:
    """[clients, labels]: how many of each label a client has."""
    return np.array([np.bincount(labels[own], minlength=labels.max() + 1) for own in holdings(split)])


def is_a_partition(split: Split, samples: int) -> bool:
    return np.array_equal(np.sort(np.concatenate(holdings(split))), np.arange(samples))


def even(counts: Counter[Any], outcomes: int) -> float:
    """p of equally likely outcomes; one that never came counts too."""
    assert len(counts) <= outcomes
    return float(chisquare([*counts.values(), *[0] * (outcomes - len(counts))]).pvalue)


# Pachinko: elastic's supplement, Sec. 2.


def test_fed_cifar100_is_500_clients_of_100() -> None:
    split = pachinko(500)(CIFAR100, seed=0)
    assert is_a_partition(split, 50_000)
    assert np.diff(split.offsets).tolist() == [100] * 500
    counts = table(split, CIFAR100.labels)
    assert counts.sum(0).tolist() == [500] * 100
    coarse = counts[:100].reshape(100, 20, 5).sum(2)  # before much is exhausted
    # A Dirichlet(0.1) over 20 labels: E sum p^2 = 1.1 / 3, as if a client had 1 / 0.367 = 2.7 coarse labels.
    pairs = (coarse * (coarse - 1)).sum(1) / (100 * 99)
    assert abs(pairs.mean() - 1.1 / 3) < 5 * pairs.std() / 10


@settings(max_examples=80, deadline=None)
@given(
    labels=st.lists(st.integers(0, 7), min_size=1, max_size=150),
    parents=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    clients=st.integers(1, 20),
    alpha=st.floats(1e-5, 1e5),
    beta=st.floats(1e-5, 1e5),
    sigma=st.floats(0, 5),
    fraction=st.floats(0, 0.95),
    seed=st.integers(0, 2**40),
)
def test_pachinko_gives_every_sample_to_exactly_one_client(
    labels, parents, clients, alpha, beta, sigma, fraction, seed
) -> None:
    """Whatever the hierarchy, the mixes and the sizes; also where classes have no samples."""
    parents = np.unique(parents, return_inverse=True)[1]
    population = Population(np.array(labels), coarse=parents)
    law = pachinko(clients, alpha, beta, sigma=sigma, sensitivity_fraction=fraction)
    if clients > len(labels):
        with pytest.raises(BadValue, match="num_clients"):
            law(population, seed)
        return
    split = law(population, seed)
    assert is_a_partition(split, len(labels))
    assert split.sizes.min() >= 1
    if not sigma:
        assert np.ptp(np.diff(split.offsets)) <= 1
    again = law(population, seed)
    assert all(np.array_equal(getattr(split, part), getattr(again, part)) for part in ("indices", "offsets", "held"))


def test_pachinko_takes_coarse_labels_by_any_number() -> None:
    """Coarse label 1 has no class of its own; nor has anything above 1000."""
    labels = np.arange(300) % 6
    gaps = pachinko(10)(Population(labels, coarse=np.array([0, 0, 2, 2, 1000, 1000])), seed=0)
    assert is_a_partition(gaps, 300)


def test_pachinko_is_a_function_of_the_seed() -> None:
    prints = [pachinko(50)(CIFAR100, seed).fingerprint() for seed in (0, 0, 1, 2)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


UNSPENT = 1000
"""Of 3,000 clients, so many are served before any label is used up."""


def unspent_counts(alpha: float, beta: float, size: int) -> np.ndarray:
    """[clients, 4 coarse, 3 fine]: clients who chose freely, and so are independent of each other."""
    labels = np.repeat(np.arange(12), 3000 * size // 12)
    split = pachinko(3000, alpha, beta)(Population(labels, coarse=np.arange(12) // 3), seed=5)
    counts = table(split, labels)
    assert (counts[:UNSPENT].sum(0) < 3000 * size // 12).all(), "nothing is exhausted yet"
    return counts[:UNSPENT].reshape(UNSPENT, 4, 3)


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 10.0), (1.0, 1.0), (5.0, 0.2)])
def test_pachinko_mixes_have_the_moments_of_two_dirichlet_multinomials(alpha: float, beta: float) -> None:
    """With p ~ Dirichlet(alpha) over C coarse and q ~ Dirichlet(beta) over F fine labels, two different places of a
    client have labels (c, f) and (d, g) with probability E[p_c p_d] E[q_f q_g]; of n places, n (n - 1) such pairs."""
    n, C, F = 20, 4, 3
    counts = unspent_counts(alpha, beta, n)
    same, other = (alpha + 1) / (C * (C * alpha + 1)), alpha / (C * (C * alpha + 1))  # E p_c^2, E p_c p_d
    same_fine, other_fine = (beta + 1) / (F * (F * beta + 1)), beta / (F * (F * beta + 1))
    flat = counts.reshape(len(counts), C * F)
    pairs = flat[:, :, None] * flat[:, None, :] - np.einsum("kf,fg->kfg", flat, np.eye(C * F, dtype=int))
    c, f = np.divmod(np.arange(C * F), F)
    one_coarse, one_fine = c[:, None] == c, f[:, None] == f
    expected = n * (n - 1) * np.where(one_coarse, same * np.where(one_fine, same_fine, other_fine), other / F**2)
    deviation = np.abs(pairs.mean(0) - expected) / (pairs.std(0) / np.sqrt(len(pairs)))
    assert deviation.max() < 5
    deviation = np.abs(flat.mean(0) - n / (C * F)) / (flat.std(0) / np.sqrt(len(flat)))
    assert deviation.max() < 5


def test_pachinko_coarse_counts_are_beta_binomial() -> None:
    """The marginal of the Dirichlet-multinomial, as a whole distribution."""
    n, alpha = 20, 0.5
    found = np.bincount(unspent_counts(alpha, 10.0, n)[:, 0].sum(1), minlength=n + 1)
    expected = UNSPENT * betabinom(n, alpha, 3 * alpha).pmf(np.arange(n + 1))
    assert expected.min() > 5
    assert chisquare(found, expected * found.sum() / expected.sum()).pvalue > UNLIKELY


Outcome = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Tiny:
    """A few samples, so that labels run out under everybody's hands."""

    supply: tuple[int, ...]
    parents: tuple[int, ...]
    clients: int
    alpha: float
    beta: float

    @property
    def population(self) -> Population:
        return Population(np.repeat(np.arange(len(self.supply)), self.supply), coarse=np.array(self.parents))

    @property
    def law(self) -> Pachinko:
        return pachinko(self.clients, self.alpha, self.beta)


COARSE_RUN_OUT = Tiny((1, 1, 4, 2, 1), (0, 0, 0, 1, 2), 3, 0.5, 2.0)
FINE_RUN_OUT = Tiny((1, 1, 1, 3, 4), (0, 0, 0, 0, 1), 2, 3.0, 0.3)


def place_by_place(tiny: Tiny, draw: random.Random) -> Outcome:
    """The supplement's words: for each of a client's places a coarse label, a fine label under it, a sample; a label
    that is exhausted leaves its multinomial, which is renormalised (as random.choices does)."""
    left, outcome = list(tiny.supply), []
    for _ in range(tiny.clients):
        root = [draw.gammavariate(tiny.alpha, 1) for _ in set(tiny.parents)]
        leaf = [draw.gammavariate(tiny.beta, 1) for _ in tiny.supply]
        own = [0] * len(tiny.supply)
        for _ in range(sum(tiny.supply) // tiny.clients):
            open_coarse = sorted({tiny.parents[f] for f, n in enumerate(left) if n})
            (c,) = draw.choices(open_coarse, [root[c] for c in open_coarse])
            open_fine = [f for f, n in enumerate(left) if n and tiny.parents[f] == c]
            (f,) = draw.choices(open_fine, [leaf[f] for f in open_fine])
            left[f] -= 1
            own[f] += 1
        outcome.append(tuple(own))
    return tuple(outcome)


@pytest.mark.parametrize("tiny", [COARSE_RUN_OUT, FINE_RUN_OUT], ids=["coarse", "fine"])
def test_pachinko_with_exhausted_labels_is_the_process_place_by_place(tiny: Tiny) -> None:
    """The same distribution of who has how many of what. Outcomes that came fewer than 20 times count as one."""
    draw, law, population = random.Random(1), tiny.law, tiny.population
    wanted = Counter(place_by_place(tiny, draw) for _ in range(8000))
    found: Counter[Outcome] = Counter()
    for seed in range(2500):
        found[tuple(map(tuple, table(law(population, seed), population.labels).tolist()))] += 1
    cells: dict[Outcome | None, list[int]] = {}
    for outcome in wanted | found:
        row = cells.setdefault(outcome if wanted[outcome] + found[outcome] >= 20 else None, [0, 0])
        row[0], row[1] = row[0] + wanted[outcome], row[1] + found[outcome]
    assert len(cells) > 25
    assert chi2_contingency(np.array(list(cells.values()))).pvalue > UNLIKELY


def test_pachinko_draws_any_sample_of_a_label() -> None:
    """Where the first client has one of label 2's four samples, each of them is as likely."""
    law, population = COARSE_RUN_OUT.law, COARSE_RUN_OUT.population
    first: Counter[int] = Counter()
    for seed in range(1200):
        own = law(population, seed).training(0)
        mine = own[population.labels[own] == 2]
        if len(mine) == 1:
            first[int(mine[0])] += 1
    assert first.total() > 100
    assert even(first, 4) > UNLIKELY


# Shards: McMahan et al. 2017, Sec. 3.


def test_shards_of_mnist() -> None:
    """200 shards of 300 for 100 clients: everyone has 600 images, and of at most four digits, most of two."""
    labels = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
    mixed = np.random.default_rng(0).permutation(labels)
    split = shards(100)(Population(mixed), seed=0)
    assert is_a_partition(split, 60_000)
    assert np.diff(split.offsets).tolist() == [600] * 100
    kinds = np.count_nonzero(table(split, mixed), axis=1)
    assert kinds.max() <= 4
    assert (kinds <= 2).mean() > 0.8, "9 of 200 shards lie across a border"


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 6),
    per_client=st.integers(1, 3),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_a_client_is_a_sum_of_shards(clients: int, per_client: int, size: int, seed: int, data: st.DataObject) -> None:
    count = clients * per_client
    labels = np.array(data.draw(st.lists(st.integers(0, 4), min_size=count * size, max_size=count * size)))
    pieces = [np.bincount(piece, minlength=labels.max() + 1) for piece in np.split(np.sort(labels), count)]
    possible = {tuple(np.sum(chosen, axis=0).tolist()) for chosen in combinations(pieces, per_client)}
    split = shards(clients, per_client)(Population(labels), seed)
    assert is_a_partition(split, len(labels))
    assert {tuple(row) for row in table(split, labels).tolist()} <= possible


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 200),
    clients=st.integers(1, 12),
    per_client=st.integers(1, 5),
    fraction=st.floats(0, 0.95),
    seed=st.integers(0, 2**40),
)
def test_shards_of_any_number_of_samples(samples, clients, per_client, fraction, seed) -> None:
    law, population = shards(clients, per_client, fraction), Population(np.arange(samples) % 7)
    if clients * per_client > samples:
        with pytest.raises(BadValue, match=r"(num_clients|shards_per_client)="):
            law(population, seed)
        return
    split = law(population, seed)
    assert is_a_partition(split, samples)
    assert np.ptp(np.diff(split.offsets)) <= per_client, "a shard is at most one larger than another"
    assert split.sizes.min() >= 1


def test_every_deal_of_shards_is_as_likely() -> None:
    """Six shards to three clients, two each: 6! / 2!^3 = 90 deals."""
    law = shards(3)
    deals = Counter(
        tuple(map(tuple, table(law(Population(np.arange(6)), seed), np.arange(6)).tolist())) for seed in range(2700)
    )
    assert even(deals, 90) > UNLIKELY


def test_a_shard_is_any_of_its_labels_samples() -> None:
    """Four samples of one label in two shards: the first client has any two of them."""
    law = shards(2, 1)
    pairs = Counter(
        tuple(sorted(law(Population(np.zeros(4, dtype=int)), seed).training(0).tolist())) for seed in range(1200)
    )
    assert even(pairs, 6) > UNLIKELY


# Natural: the clients the data come with.


def owned(sizes: list[int], seed: int = 0) -> Population:
    """Clients with so many samples each, in no order; every sample has its own label."""
    clients = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return Population(np.arange(len(clients)), clients)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any),
    least=st.integers(1, 13),
    drawn=st.none() | st.integers(1, 13),
    fraction=st.floats(0, 0.99),
    seed=st.integers(0, 2**40),
)
def test_natural_clients_are_the_datas_own(sizes, least, drawn, fraction, seed) -> None:
    population, law = owned(sizes), natural(drawn, least, fraction)
    fit = [k for k, n in enumerate(sizes) if n >= least]
    if not fit or (drawn or 0) > len(fit):
        with pytest.raises(BadValue, match=r"(min_samples|num_clients)="):
            law(population, seed)
        return
    split = law(population, seed)
    assert split.codes is not None
    assert len(set(split.codes.tolist())) == split.num_clients == (drawn or len(fit))
    assert set(split.codes.tolist()) <= set(fit)
    assert population.clients is not None
    for code, own in zip(split.codes, holdings(split), strict=True):
        assert np.array_equal(np.sort(own), np.flatnonzero(population.clients == code))
    assert len(split.indices) == sum(sizes[k] for k in split.codes), "the others' samples belong to nobody"
    for whole, held in zip(np.diff(split.offsets), split.held, strict=True):
        assert 0 <= held < whole, "D_k is never empty"
        if fraction and whole >= 2:
            assert held >= 1
            assert abs(held - min(max(fraction * whole, 1), whole - 1)) <= 0.5


@pytest.mark.parametrize(("clients", "drawn", "subsets"), [(5, 2, 10), (9, 2, 36)])
def test_natural_clients_are_drawn_evenly(clients: int, drawn: int, subsets: int) -> None:
    """Every set of clients is as likely, whatever their sizes."""
    population, law = owned(list(range(1, clients + 1))), natural(drawn)
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(50 * subsets):
        codes = law(population, seed).codes
        assert codes is not None
        found[tuple(sorted(codes.tolist()))] += 1
    assert even(found, subsets) > UNLIKELY


def test_any_sample_may_be_b_k() -> None:
    law, population = natural(fraction=0.25), owned([4, 3])
    held = Counter(int(law(population, seed).sensitivity(0)[0]) for seed in range(800))
    assert even(held, 4) > UNLIKELY


def test_the_same_seed_gives_the_same_split_on_any_machine() -> None:
    """Fingerprints written down once. A change here is a change of everybody's results."""
    found = [
        law(population, seed=7).fingerprint()
        for law, population in (
            (pachinko(500, sensitivity_fraction=0.1), CIFAR100),
            (shards(100, fraction=0.1), CIFAR100),
            (natural(20, 5, 0.1), owned(list(range(1, 41)))),
        )
    ]
    assert found == ["67f245d0b43969d4", "aba439821d86bbfb", "81f0bb496c880fb1"]


# Statistics.


def test_statistics_by_hand() -> None:
    """Three clients with 4, 4 and 8 samples of two classes; the population has 6 and 10."""
    counts = np.array([[4, 0], [2, 2], [0, 8]])
    distances = earth_movers_distance(counts, counts.sum(0))
    assert distances.tolist() == [1.25, 0.25, 0.75]
    assert statistics(counts, counts.sum(1), distances) == {
        "clients": 3,
        "samples": 16,
        "size": {"mean": 5.333333, "min": 4, "q25": 4, "median": 4, "q75": 6, "max": 8},
        "size_gini": 0.166667,  # differences 0, 4, 4, each seen twice, over 9 pairs; 16 / 9 / (2 x 16 / 3)
        "classes_per_client": {"mean": 1.333333, "min": 1, "q25": 1, "median": 1, "q75": 1.5, "max": 2},
        "emd": {"mean": 0.75, "min": 0.25, "q25": 0.5, "median": 0.75, "q75": 1, "max": 1.25},
    }


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40))
def test_gini_is_the_mean_difference_over_twice_the_mean(sizes: list[int]) -> None:
    differences = sum(abs(a - b) for a in sizes for b in sizes)
    assert gini(np.array(sizes)) == pytest.approx(differences / (2 * len(sizes) * sum(sizes)), abs=1e-12)


# The cache.


def same(a: Split, b: Split) -> bool:
    return all(
        (vars(a)[name] is None and other is None) or (np.array_equal(vars(a)[name], other))
        for name, other in vars(b).items()
    )


WRITERS = owned([5, 1, 7, 3])
REQUESTS: dict[str, tuple[Partition, Population]] = {
    "natural": (natural(3, fraction=0.2), WRITERS),
    "pachinko": (pachinko(4, sensitivity_fraction=0.2), Population(np.arange(60) % 6, coarse=np.arange(6) // 2)),
    "shards": (shards(4, fraction=0.2), Population(np.arange(60) % 6)),
    "dirichlet": (Dirichlet(4, 0.2, 0.5, 0.0, alpha=0.3), Population(np.arange(60) % 6)),
}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("law", REQUESTS)
def test_a_split_is_drawn_once(law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition, population = REQUESTS[law]
    first = cache.draw(partition, population, 0, "key", str(tmp_path))
    assert same(first, partition(population, 0))
    assert files(tmp_path) == ["partitions/key"]

    def never(*_: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(type(partition), "assign", never)
    again = cache.draw(partition, population, 0, "key", str(tmp_path))
    assert same(first, again)
    assert all(getattr(first, part).dtype == getattr(again, part).dtype for part in ("indices", "offsets", "held"))


def test_another_request_has_another_key() -> None:
    positions = np.arange(60)

    def key(partition: Partition, data: str = "d", where: np.ndarray = positions, seed: int = 0) -> str:
        return cache.key(partition, data, where, seed)

    base = pachinko(4)
    assert key(base) == key(pachinko(4))
    keys = [
        key(base),
        key(base, data="e"),
        key(base, where=positions[:-1]),
        key(base, where=positions[::-1]),
        key(base, seed=1),
        *(
            key(pachinko(4, **{name: value}))
            for name, value in (
                *(("alpha", 0.2), ("beta", 9.0), ("sigma", 0.1), ("power", 0.1), ("sensitivity_fraction", 0.1)),
            )
        ),
        key(pachinko(5)),
        key(shards(4)),
        key(shards(4, 3)),
        key(natural(4)),
        key(natural()),
        key(natural(4, 2)),
        key(Iid(4, 0.0, 0.0, 0.0)),
        key(Dirichlet(4, 0.0, 0.0, 0.0, alpha=0.1)),
    ]
    assert len(set(keys)) == len(keys)


@functools.cache
def composed(*overrides: str) -> str:
    """A configuration on 240 made-up samples, as text: composing one takes longer than all that follows."""
    made_up = ("dataset=synthetic", "dataset.train_samples=240", "dataset.test_samples=20")
    return json.dumps(config(*made_up, *overrides, "participation.clients_per_round=1"))


def built(*overrides: str, **values: object) -> Experiment:
    """What a command line gives, with some more values (group__key) set."""
    asked = json.loads(composed(*overrides))
    for name, value in values.items():
        *above, key = name.split("__")
        functools.reduce(dict.__getitem__, above, asked)[key] = value
    return build.experiment(asked, torch.device("cpu"))


def test_an_experiments_key_follows_all_it_was_asked_for() -> None:
    """The same where only the training differs; another one for other data, law, parameters, seed or global set."""
    keys = [
        built().data.partition_key,
        *(
            built(**{name: value}).data.partition_key
            for name, value in (
                *(("dataset__train_samples", 241), ("dataset__seed", 5), ("seed", 1), ("partition__alpha", 7.0)),
                *(("partition__num_clients", 7), ("partition__sensitivity_fraction", 0.2), ("shared_data__beta", 0.1)),
            )
        ),
    ]
    assert len(set(keys)) == len(keys)
    assert built(client_optimizer__lr=0.3, rounds=7, aggregator__tau=0.1).data.partition_key == keys[0]


HIERARCHIES = """
import numpy as np
import torch
from fedsim.data import Dataset


def load(coarse):
    x, y = torch.arange(240.0).view(60, 4), torch.arange(60) % 4
    return Dataset(x, y, x, y, 4, torch.ones(1), torch.zeros(1), coarse=np.array(coarse))
"""


def test_coarse_labels_are_part_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same samples under two hierarchies: Pachinko must not take one's clients for the other's."""
    (tmp_path / "hierarchies.py").write_text(HIERARCHIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hierarchies", raising=False)
    asked = config("dataset=custom", "dataset.load=hierarchies.load", "partition=pachinko", "partition.num_clients=10")
    found = []
    for coarse in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1]):
        asked["dataset"]["arguments"] = {"coarse": coarse}
        found.append(build.experiment(asked, torch.device("cpu")).data)
    assert found[0].split.fingerprint() == found[2].split.fingerprint()
    assert found[0].partition_key == found[2].partition_key
    assert found[0].partition_key != found[1].partition_key
    assert found[0].split.fingerprint() != found[1].split.fingerprint()


CODE = """
import sys
from pathlib import Path
import numpy as np
import fedsim
from fedsim.partition import cache
from fedsim.partition.pachinko import Pachinko
law = Pachinko(num_clients=4, sensitivity_fraction=0.1, sigma=0.0, power=0.0, alpha=0.1, beta=10.0)
for name in ("", *sys.argv[1:]):
    if name:
        with (Path(fedsim.__file__).parent / name).open("a") as file:
            file.write("# another law\\n")
    print(cache.key(law, "data", np.arange(9), 0))
"""


def test_another_code_has_another_key(tmp_path: Path) -> None:
    """All of a law's code: Pachinko's own, what all laws share, Dirichlet's draws and the generator."""
    shutil.copytree(
        Path(fedsim.__file__).parent, tmp_path / "fedsim", ignore=shutil.ignore_patterns("__pycache__", "*.tmp")
    )
    edited = ["partition/pachinko.py", "partition/base.py", "partition/dirichlet.py", "rng.py"]
    run = subprocess.run(
        [sys.executable, "-c", CODE, *edited], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    keys = run.stdout.split()
    unnoticed = [name for name, before, after in zip(edited, keys[:-1], keys[1:], strict=True) if before == after]
    assert unnoticed == []


def kept(tmp_path: Path) -> tuple[Path, Split]:
    """A cached natural split, and its file."""
    split = cache.draw(*REQUESTS["natural"], 0, "key", str(tmp_path))
    return tmp_path / "partitions" / "key", split


def drawn_again(tmp_path: Path, right: Split) -> bool:
    """The file is not believed, and replaced by a good one."""
    found = cache.draw(*REQUESTS["natural"], 0, "key", str(tmp_path))
    healed = cache.read(tmp_path / "partitions" / "key")
    return same(right, found) and healed is not None and same(right, healed) and files(tmp_path) == ["partitions/key"]


Content = dict[str, np.ndarray]


def swap(name: str) -> Callable[[Content], Content]:
    """The first and the last entry of an array exchanged: still a legal one."""

    def change(content: Content) -> Content:
        other = content[name].copy()
        other[[0, -1]] = other[[-1, 0]]
        assert not np.array_equal(other, content[name])
        return content | {name: other}

    return change


@pytest.mark.parametrize(
    "tamper",
    [
        swap("indices"),
        lambda content: content | {"held": content["held"][::-1] + np.arange(-1, 2)},
        swap("codes"),
        lambda content: {name: array for name, array in content.items() if name != "codes"},
        lambda content: content | {"more": np.zeros(3)},
        lambda content: content | {"offsets": content["offsets"][:-1]},
        lambda content: {},
    ],
    ids=[
        *("other indices", "other B_k", "other clients", "no clients", "more", "less", "empty"),
    ],
)
def test_a_file_with_another_content_is_drawn_again(tmp_path: Path, tamper: Callable[[Content], Content]) -> None:
    path, split = kept(tmp_path)
    head, changed = path.read_bytes()[:32], io.BytesIO()
    with np.load(io.BytesIO(path.read_bytes()[32:])) as stored:
        np.savez(changed, **tamper(dict(stored)))
    path.write_bytes(head + changed.getvalue())
    assert drawn_again(tmp_path, split)


def test_a_file_under_another_name_is_not_believed(tmp_path: Path) -> None:
    path, _ = kept(tmp_path)
    assert cache.read(path.rename(path.with_name("other"))) is None


@pytest.mark.parametrize("content", [b"", b"PK", b"not a zip file", b"\x93NUMPY\x01\x00", b"\x80\x04\x95"])
def test_a_file_that_is_none_of_ours_is_drawn_again(tmp_path: Path, content: bytes) -> None:
    path, split = kept(tmp_path)
    path.write_bytes(content)
    assert drawn_again(tmp_path, split)


def test_a_truncated_file_is_drawn_again(tmp_path: Path) -> None:
    path, split = kept(tmp_path)
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:size])
        assert drawn_again(tmp_path, split), f"of {len(whole)} bytes {size} are left"


def test_a_byte_that_changed_never_matters(tmp_path: Path) -> None:
    """Wherever it is, also in the archive's own tables: the split is right or drawn again."""
    path, split = kept(tmp_path)
    whole, wrong = path.read_bytes(), []
    directory = whole.index(b"PK\x01\x02")  # from here on the archive's own tables
    for place in (*range(0, directory, 11), *range(directory, len(whole))):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = cache.read(path)
        except Exception as error:
            wrong.append(f"byte {place}: {error!r}")
        else:
            wrong += [f"byte {place}: another split"] if found is not None and not same(split, found) else []
    assert wrong == []


def test_a_folder_in_the_files_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "partitions" / "key").mkdir(parents=True)
    with pytest.raises(InputError, match="cache_dir") as error:
        cache.draw(*REQUESTS["natural"], 0, "key", str(tmp_path))
    assert "\n" not in str(error.value)


def churn(folder: Path) -> set[str]:
    """Draw, write, read and remove the same file again and again; the fingerprints that were seen."""
    law, population = Shards(num_clients=40, shards_per_client=2, sensitivity_fraction=0.2), Population(np.arange(4000))
    seen = set()
    for turn in range(60):
        seen.add(cache.draw(law, population, 0, "key", str(folder)).fingerprint())
        if turn % 3 == 0:
            (folder / "partitions" / "key").unlink(missing_ok=True)
    return seen


def test_processes_may_write_at_once(tmp_path: Path) -> None:
    """Each always has the same split, and one file is left."""
    imports = "from pathlib import Path\nimport numpy as np\nfrom fedsim.data import Population\n"
    imports += "from fedsim.partition import cache\nfrom fedsim.partition.shards import Shards\n"
    code = f"{imports}{inspect.getsource(churn)}print(flush=True)\ninput()\nprint(*churn(Path({str(tmp_path)!r})))"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, text=True, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()  # it has imported everything
        other.stdin.write("go\n")
        other.stdin.flush()
        mine = churn(tmp_path)
        said, error = other.communicate(timeout=60)
    assert error == ""
    assert set(said.split()) == mine
    assert len(mine) == 1
    cache.draw(shards(40), Population(np.arange(4000)), 0, "key", str(tmp_path))
    assert files(tmp_path) == ["partitions/key"]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_cache_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "partitions").symlink_to(tmp_path / "nowhere")
    (tmp_path / "full").mkdir()
    for folder in (tmp_path, tmp_path / "full", tmp_path / "a file", tmp_path / "a file" / "below"):
        refused = pytest.raises(InputError, match=r"cache_dir: .* cannot be written to .*cache_dir=FOLDER")
        with refused as error, full_disk(300):
            cache.draw(*REQUESTS["natural"], 0, "key", str(folder))
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)
    assert files(tmp_path) == ["a file"], "nothing half written"


def test_what_was_drawn_is_used_though_the_cache_was_lost(tmp_path: Path) -> None:
    first = cache.draw(*REQUESTS["shards"], 0, "key", str(tmp_path))
    shutil.rmtree(tmp_path / "partitions")
    assert same(first, cache.draw(*REQUESTS["shards"], 0, "key", str(tmp_path)))


# What cannot be split.

SIZED = {"sensitivity_fraction": 0.1, "sigma": 0.0, "power": 0.0}


@pytest.mark.parametrize(
    "law",
    [
        Dirichlet(num_clients=4, alpha=1.0, **SIZED),
        Classes(num_clients=4, classes_per_client=2, **SIZED),
        OneClass(num_clients=4, non_iid=1.0, **SIZED),
        pachinko(4),
        shards(4),
    ],
    ids=lambda law: type(law).__name__,
)
def test_sequences_have_no_label_to_be_dealt_by(law: Partition) -> None:
    targets = np.arange(60).reshape(20, 3) % 5
    with pytest.raises(InputError, match=r"partition.* target at every position .*partition=natural") as error:
        law(Population(targets, np.arange(20) % 4, np.zeros(5, dtype=int)), seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("law", [Iid(num_clients=4, **SIZED), natural(4)], ids=["iid", "natural"])
def test_sequences_by_client_or_at_random(law: Partition) -> None:
    split = law(Population(np.arange(60).reshape(20, 3) % 5, np.arange(20) % 4), seed=0)
    assert is_a_partition(split, 20)


@pytest.mark.parametrize(
    ("law", "values", "message"),
    [
        ("natural", {}, r"partition=natural: .*does not say whose"),
        ("pachinko", {"num_clients": 20}, r"partition=pachinko: .*no coarse labels"),
        ("pachinko", {"alpha": 0}, r"partition\.alpha=0: must be a number >= 1e-09"),
        ("pachinko", {"beta": -1}, r"partition\.beta=-1: must be a number >= 1e-09"),
        ("shards", {"num_clients": 241}, r"partition\.num_clients=241: must be at most .* 240"),
        ("shards", {"shards_per_client": 3}, r"partition\.shards_per_client=3: must be at most 2\b"),
        ("shards", {"shards_per_client": 0}, r"partition\.shards_per_client=0: .* >= 1"),
        ("shards", {"num_clients": None}, r"partition\.num_clients=None: must be a whole number"),
        ("natural", {"min_samples": 0}, r"partition\.min_samples=0: .* >= 1"),
        ("natural", {"num_clients": 0}, r"partition\.num_clients=0: .* >= 1"),
        ("natural", {"sensitivity_fraction": 1}, r"partition\.sensitivity_fraction=1: .* < 1"),
        ("natural", {"alpha": 1}, r"partition\.alpha=1: unknown key"),
    ],
)
def test_refusals_name_the_key_in_one_line(law: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        built(f"partition={law}", **{f"partition__{key}": value for key, value in values.items()})
    assert "\n" not in str(error.value)


def test_as_many_shards_as_there_are_samples_for() -> None:
    """240 samples in 200 shards, of one or two."""
    sizes = np.diff(built("partition=shards").data.split.offsets)
    assert sizes.sum() == 240
    assert {2, 3, 4} >= set(sizes.tolist())


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (natural(5), r"num_clients=5: must be at most 4\b"),
        (natural(4, 3), r"num_clients=4: must be at most 3\b.*min_samples=3"),
        (natural(None, 8), r"min_samples=8: must be at most 7\b"),
        (natural(17), r"num_clients=17: must be at most"),
    ],
)
def test_natural_clients_that_are_not_there(law: Natural, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        law(WRITERS, seed=0)
