"""What every partition has: a number of clients, and the subset B_k each sets aside; and sizes, where they are free."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim import check, rng
from fedsim.data import Population, Split


@dataclass(frozen=True)
class Partition(ABC):
    """Who holds which sample: a law of its own in each file beside this one."""

    num_clients: int | None
    sensitivity_fraction: float

    def __post_init__(self) -> None:
        check.integer("num_clients", self.num_clients, ge=1)
        check.number("sensitivity_fraction", self.sensitivity_fraction, ge=0, lt=1)

    def __call__(self, population: Population, seed: int) -> Split:
        """Give every sample to at most one client, then set each client's B_k aside: for every method alike."""
        if self.num_clients is not None and self.num_clients > len(population):
            raise check.BadValue(
                "num_clients",
                self.num_clients,
                f"must be at most the number of training samples, {len(population)}",
            )
        generator = rng.generator(seed, "partition")
        owner = self.assign(population, generator)
        shuffled = generator.permutation(len(population))
        shuffled = shuffled[owner[shuffled] >= 0]
        indices = shuffled[np.argsort(owner[shuffled], kind="stable")]
        counts = np.bincount(owner[owner >= 0], minlength=self.num_clients or 0)
        held = np.zeros_like(counts)
        if self.sensitivity_fraction:
            # At least one sample where the client has two or more, and never all of them.
            wanted = np.maximum(np.rint(self.sensitivity_fraction * counts).astype(np.int64), 1)
            held = np.minimum(wanted, np.maximum(counts - 1, 0))
        if (counts - held).min() < 1:
            empty = int(np.argmin(counts - held))
            raise check.BadValue(
                "num_clients",
                self.num_clients,
                f"leaves client {empty} with no training data; fewer clients or more equal sizes are needed",
            )
        return Split(indices, np.concatenate([[0], np.cumsum(counts)]), held)

    @abstractmethod
    def assign(self, population: Population, generator: rng.Rng) -> np.ndarray:
        """The client of every sample; -1 for one that nobody gets."""


@dataclass(frozen=True)
class Sized(Partition):
    """A law in which sizes are free: equal, unless sigma or power says otherwise: log-normal with that sigma, or the
    k-th largest client proportional to k^-power."""

    num_clients: int
    sigma: float
    power: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("sigma", self.sigma, ge=0, le=100)
        check.number("power", self.power, ge=0, le=100)
        if self.sigma and self.power:
            raise check.BadValue("power", self.power, f"must be 0 where sigma={self.sigma}: sizes follow one law")

    def relative_sizes(self, generator: rng.Rng) -> np.ndarray:
        """How large each client should be, up to a factor."""
        if self.sigma:
            exponent = self.sigma * generator.standard_normal(self.num_clients)
            return np.asarray(np.exp(exponent - exponent.max()))
        ranks = np.arange(1, self.num_clients + 1, dtype=np.float64)
        return generator.permutation(ranks**-self.power)


def apportion(total: int, weights: np.ndarray, minimum: int = 1) -> np.ndarray:
    """Whole numbers that sum to `total`, proportional to `weights` (largest remainder), none below `minimum`.

    Shares that would fall below the minimum are raised to it and the others share what is left.
    """
    assert total >= minimum * len(weights)
    raised = np.zeros(len(weights), dtype=bool)
    while True:
        rest = total - minimum * raised.sum()
        shares = np.where(raised, minimum, weights * (rest / max(weights[~raised].sum(), np.finfo(float).tiny)))
        below = (shares < minimum) & ~raised
        if not below.any():
            break
        raised |= below
    whole = np.floor(shares).astype(np.int64)
    remainder = np.argsort(-(shares - whole), kind="stable")[: total - whole.sum()]
    whole[remainder] += 1
    return whole


def deal(labels: np.ndarray, wanted: Sequence[np.ndarray], generator: rng.Rng) -> np.ndarray:
    """The client of every sample, from the clients wanted for each label (one entry a sample of that label)."""
    owner = np.empty(len(labels), dtype=np.int64)
    for label, clients in enumerate(wanted):
        members = np.flatnonzero(labels == label)
        owner[generator.permutation(members)] = clients
    return owner
