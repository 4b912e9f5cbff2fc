"""Pachinko allocation over a hierarchy of labels. Elastic's supplement, Sec. 2 (Fed-CIFAR100); Li and McCallum 2006.

The law. Client k has a mix over the coarse labels ~ Dirichlet(alpha, ...) and, for each coarse label, a mix over the
fine labels under it ~ Dirichlet(beta, ...). Clients are served one after another. Each of a client's places draws a
coarse label from the first mix, a fine label from the second, and gets a random sample with that label, without
replacement. A fine label that is exhausted leaves its coarse label's mix, which is renormalised; a coarse label with
none left leaves the coarse mix likewise.
"""

from dataclasses import dataclass

import numpy as np

from fedsim import check, rng
from fedsim.data import Population
from fedsim.partition.base import Sized, apportion, deal
from fedsim.partition.dirichlet import dirichlet


@dataclass(frozen=True)
class Pachinko(Sized):
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("alpha", self.alpha, gt=0)
        check.number("beta", self.beta, gt=0)

    def assign(self, population: Population, generator: rng.Rng) -> np.ndarray:
        labels, coarse = population.one_label, population.coarse
        if coarse is None:
            raise check.InputError(
                "partition=pachinko: this dataset has no coarse labels; dataset=cifar100 has, partition=dirichlet "
                "needs none"
            )
        if len(coarse) <= labels.max():
            raise check.InputError(
                f"partition=pachinko: {len(coarse)} classes have coarse labels, but there is a label {labels.max()}"
            )
        coarse = np.unique(coarse, return_inverse=True)[1]  # numbered without gaps
        sizes = apportion(len(labels), self.relative_sizes(generator))
        # Drawn for all clients at once, in blocks of one fine mix a coarse label.
        roots = dirichlet(self.alpha, (self.num_clients, int(coarse.max()) + 1), generator)
        below = [np.flatnonzero(coarse == c) for c in range(roots.shape[1])]
        leaves = [dirichlet(self.beta, (self.num_clients, len(fine)), generator) for fine in below]
        left = np.bincount(labels, minlength=len(coarse))
        taken = np.zeros((self.num_clients, len(coarse)), dtype=np.int64)
        for client, size in enumerate(sizes):
            fill(taken[client], int(size), roots[client], [mix[client] for mix in leaves], below, left, generator)
        owners = [np.repeat(np.arange(self.num_clients), taken[:, label]) for label in range(len(coarse))]
        return deal(labels, owners, generator)


def fill(
    taken: np.ndarray,
    size: int,
    root: np.ndarray,
    leaves: list[np.ndarray],
    below: list[np.ndarray],
    left: np.ndarray,
    generator: rng.Rng,
) -> None:
    """Draw one client's places, counting them in `taken` and out of `left`.

    Places are drawn together and those that ask for more than is left ask again: of an exhausted fine label under the
    same coarse label, of an exhausted coarse label anew. Refusing what is exhausted and asking again is drawing from
    the renormalised mix, so this is the law of one place after another.
    """
    while size:
        supply = np.array([left[fine].sum() for fine in below])
        for c, wanted in enumerate(generator.multinomial(size, available(root, supply))):
            fine = below[c]
            while wanted and left[fine].any():
                served = np.minimum(generator.multinomial(wanted, available(leaves[c], left[fine])), left[fine])
                left[fine] -= served
                taken[fine] += served
                wanted -= served.sum()
                size -= int(served.sum())


def available(mix: np.ndarray, left: np.ndarray) -> np.ndarray:
    """A mix without what is exhausted; where nothing of it is left, what there is."""
    open_ = np.where(left > 0, mix, 0.0)
    if not open_.sum() > 0:
        open_ = left.astype(np.float64)
    return np.asarray(open_ / open_.sum())
