"""Made-up data: a Gaussian mixture of any size, and the two-client quadratic that anyone can check by hand."""

import numpy as np
import torch
from torch import Tensor

from fedsim import check, rng
from fedsim.data import Dataset


def mixture(
    train_samples: int, test_samples: int, num_classes: int, features: int, separation: float, seed: int
) -> Dataset:
    """Class c is N(separation * u_c, I) with u_c a random unit vector; labels are as balanced as the count allows."""
    for key, count in (
        ("train_samples", train_samples),
        ("test_samples", test_samples),
        ("features", features),
    ):
        check.integer(key, count, ge=1, le=10**9)
    check.integer("num_classes", num_classes, ge=2, le=10**9)
    check.number("separation", separation, ge=0)
    check.integer("seed", seed, ge=0)
    generator = rng.generator(seed, "mixture")
    centres = generator.standard_normal((num_classes, features))
    centres *= separation / np.linalg.norm(centres, axis=1, keepdims=True)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = generator.permutation(np.arange(count) % num_classes)
        points = centres[labels] + generator.standard_normal((count, features))
        return torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels)

    return Dataset(*draw(train_samples), *draw(test_samples), num_classes, torch.ones(1), torch.zeros(1))


def quadratic(m: float, G: float, samples: int) -> Dataset:
    """f1(x) = m x^2 + G x and f2(x) = -G x: the lower bound of elastic's supplement, Sec. 9.5. Their mean has its
    optimum at 0. A sample is the pair (a, b) of a x^2 + b x; each client holds `samples` copies of its own."""
    check.number("m", m, gt=0)
    check.number("G", G)
    check.integer("samples", samples, ge=1, le=10**9)
    own = torch.tensor([[m, G], [0.0, -G]])
    train, whose = own.repeat_interleave(samples, 0), torch.arange(2).repeat_interleave(samples)
    return Dataset(train, whose, own, torch.arange(2), 2, torch.ones(1), torch.zeros(1), classification=False)
