"""Small made-up data in the form of the real ones, for `scale=smoke`: they show that a table runs, nothing else."""

import numpy as np
import torch
from torch import Tensor

from fedsim import rng
from fedsim.data import Dataset, standardization

TEST, CLIENTS = 50, 10
NAMES = tuple(f"client {k}" for k in range(CLIENTS))


def pictures(shape: list[int], num_classes: int, groups: int, train: int, seed: int) -> Dataset:
    """A picture a class, with noise over it. Classes in `groups` coarse ones, samples of ten clients in turn."""
    generator = rng.generator(seed, "small")
    patterns = generator.randint(0, 192, (num_classes, *shape))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = generator.permutation(np.arange(count) % num_classes)
        noisy = patterns[labels] + generator.randint(0, 64, (count, *shape))
        return torch.from_numpy(noisy.astype(np.uint8)), torch.from_numpy(labels)

    channels = shape[0]
    return Dataset(
        *draw(train),
        *draw(TEST),
        num_classes,
        *standardization([0.5] * channels, [0.25] * channels, True),
        train_client=np.arange(train) % CLIENTS,
        test_client=np.arange(TEST) % CLIENTS,
        client_names=NAMES,
        coarse=np.arange(num_classes) % groups,
    )


def text(length: int, num_classes: int, train: int, seed: int) -> Dataset:
    """Lines of a made-up language in which each character has two successors; a target at every position."""
    generator = rng.generator(seed, "small")
    successors = generator.randint(1, num_classes, (num_classes, 2))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        lines = np.empty((count, length + 1), np.int64)
        lines[:, 0] = generator.randint(1, num_classes, count)
        for place in range(length):
            lines[:, place + 1] = successors[lines[:, place], generator.randint(0, 2, count)]
        return torch.from_numpy(lines[:, :-1].astype(np.uint8)), torch.from_numpy(lines[:, 1:].copy())

    return Dataset(
        *draw(train),
        *draw(TEST),
        num_classes,
        torch.ones(1),
        torch.zeros(1),
        tokens=True,
        train_client=np.arange(train) % CLIENTS,
        test_client=np.arange(TEST) % CLIENTS,
        client_names=NAMES,
    )
