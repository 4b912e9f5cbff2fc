"""Batches, standardisation and augmentation."""

import numpy as np
import pytest
import torch
from conftest import experiment, small
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim import data as data_module
from fedsim.data import PADDING, _draw_crops, crop_and_flip, standardization
from fedsim.rng import generator, sample, seed_torch


def test_an_epoch_is_every_sample_of_d_k_once() -> None:
    exp = small("partition.sigma=0.7")
    x = exp.data.dataset.train_x
    for k in range(6):
        own = exp.data.split.training(k)
        batches = list(exp.data.client(k, 0, 7).batches(2))
        per_epoch = -(-len(own) // 7)
        assert len(batches) == 2 * per_epoch
        assert [len(y) for _, y in batches[:per_epoch]][:-1] == [7] * (per_epoch - 1)
        for epoch in (batches[:per_epoch], batches[per_epoch:]):
            seen = torch.cat([b for b, _ in epoch])
            assert torch.equal(seen[seen[:, 0].argsort()], x[own][x[own][:, 0].argsort()])


def test_orders_differ_by_epoch_round_and_client_and_repeat_exactly() -> None:
    data = small("partition.num_clients=2", "participation.clients_per_round=2").data

    def first(round: int, client: int, epoch: int) -> torch.Tensor:
        return torch.cat([y for _, y in data.client(client, round, None).batches(epoch + 1)][-1:])

    orders = [tuple(first(r, k, e).tolist()) for r in range(2) for k in range(2) for e in range(2)]
    assert len(set(orders)) == 8
    assert orders == [tuple(first(r, k, e).tolist()) for r in range(2) for k in range(2) for e in range(2)]


def test_the_whole_client_is_one_batch_where_no_size_is_given() -> None:
    data = small().data
    assert [len(y) for _, y in data.client(1, 0, None).batches(1)] == [len(data.split.training(1))]


def test_sensitivity_batches_are_b_k_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    data = small("partition.sensitivity_fraction=0.3").data
    held = data.split.sensitivity(0)
    for at_once in (data_module.GATHERED, 0):  # together, or batch by batch
        monkeypatch.setattr(data_module, "GATHERED", at_once)
        first, second, third = (list(batches) for batches in data.sensitivity_batches([0, 1, 0], 5))
        assert [len(x) for x in first[:-1]] == [5] * (len(first) - 1)
        assert torch.equal(torch.cat(first), data.dataset.train_x[held])
        assert torch.equal(torch.cat(second), data.dataset.train_x[data.split.sensitivity(1)])
        assert torch.equal(torch.cat(third), torch.cat(first))
    assert set(held) & set(data.split.training(0)) == set()


def test_standardisation_brings_the_training_images_to_mean_zero_and_deviation_one() -> None:
    data = experiment("dataset=mnist5k").data.dataset
    x = data.inputs(data.train_x)
    assert x.dtype == torch.float32
    assert abs(x.mean().item()) < 0.02
    assert abs(x.std().item() - 1) < 0.02
    raw = experiment("dataset=mnist5k", "dataset.standardize=false").data.dataset
    plain = raw.inputs(raw.train_x)
    assert (plain.min().item(), plain.max().item()) == (0.0, 1.0)


def test_standardisation_by_hand() -> None:
    scale, shift = standardization([0.5, 0.25], [0.5, 0.125], active=True)
    x = torch.tensor([0.0, 255.0]).view(1, 2, 1, 1) * scale + shift
    assert x.flatten().tolist() == [-1.0, 6.0]


@settings(max_examples=30, deadline=None)
@given(b=st.integers(1, 4), c=st.integers(1, 3), h=st.integers(1, 9), w=st.integers(1, 9), seed=st.integers(0, 999))
def test_crop_and_flip_against_numpy(b: int, c: int, h: int, w: int, seed: int) -> None:
    """Pad with zeros, cut h x w back out at the drawn offset, mirror left to right."""
    r = np.random.default_rng(seed)
    x = r.integers(1, 255, size=(b, c, h, w), dtype=np.uint8)
    draws = r.integers(0, [2 * PADDING + 1, 2 * PADDING + 1, 2], size=(b, 3))
    padded = np.pad(x, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    expected = np.stack([padded[i, :, dy : dy + h, dx : dx + w] for i, (dy, dx, _) in enumerate(draws)])
    expected = np.stack([e[:, :, ::-1] if flip else e for e, (_, _, flip) in zip(expected, draws, strict=True)])
    found = crop_and_flip(torch.from_numpy(x), torch.from_numpy(draws))
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), expected)


def test_crops_and_flips_are_drawn_over_their_whole_range() -> None:
    draws = _draw_crops(generator(0, "test"), 9000)
    for column, values in ((0, 9), (1, 9), (2, 2)):
        counts = np.bincount(draws[:, column], minlength=values)
        assert len(counts) == values
        assert np.abs(counts - 9000 / values).max() < 5 * np.sqrt(9000 / values)


def test_augmented_batches_keep_labels_and_repeat_exactly() -> None:
    plain = experiment("dataset=mnist5k", "partition.num_clients=100").data
    from dataclasses import replace

    data = replace(plain, dataset=replace(plain.dataset, augment=True))
    once, again = list(data.client(5, 3, 10).batches(2)), list(data.client(5, 3, 10).batches(2))
    for (x1, y1), (x2, y2), (x0, y0) in zip(once, again, plain.client(5, 3, 10).batches(2), strict=True):
        assert torch.equal(x1, x2)
        assert torch.equal(y1, y2)
        assert torch.equal(y1, y0), "augmentation does not disturb the order"
        assert not torch.equal(x1, x0)


def test_generators_are_functions_of_their_key_and_never_change() -> None:
    """The first draws, written down: a change here is a change of everybody's results."""
    assert generator(0, "batches", 1, 2).permutation(8).tolist() == [3, 4, 1, 2, 7, 0, 6, 5]
    seed_torch(torch.device("cpu"), 0, "init")
    assert torch.initial_seed() == 2592134027112868765
    assert sample(generator(0, "cohort", 0), 10**9, 3).tolist() == [466618142, 485237582, 910987442]
    assert generator(0, "a", 1).randint(10**9) != generator(0, "a", 2).randint(10**9)
    assert generator(0, "a", np.int64(1)).randint(10**9) == generator(0, "a", 1).randint(10**9)
    assert generator(0, "a", 1, 23).randint(10**9) != generator(0, "a", 12, 3).randint(10**9)


@settings(max_examples=60, deadline=None)
@given(population=st.integers(1, 10**6), share=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_sample_is_distinct_sorted_and_in_range(population: int, share: float, seed: int) -> None:
    size = max(1, min(int(share * population), 500))
    chosen = sample(generator(seed, "test"), population, size)
    assert len(chosen) == len(set(chosen.tolist())) == size
    assert chosen.min() >= 0
    assert chosen.max() < population
    assert (np.diff(chosen) > 0).all()


def test_sample_is_uniform_on_both_sides_of_its_switch() -> None:
    for population, size in ((20, 4), (16, 4)):
        counts = np.zeros(population)
        for i in range(4000):
            counts[sample(generator(i, "test"), population, size)] += 1
        p = size / population
        assert np.abs(counts - 4000 * p).max() < 5 * np.sqrt(4000 * p * (1 - p))
