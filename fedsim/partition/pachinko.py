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
from fedsim.partition.dirichlet import choose, dirichlet

TOGETHER = 4096
"""Clients that draw at once."""


@dataclass(frozen=True)
class Pachinko(Sized):
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("alpha", self.alpha, ge=1e-9, le=1e12)
        check.number("beta", self.beta, ge=1e-9, le=1e12)

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
        below = [np.flatnonzero(coarse == c) for c in range(coarse.max() + 1)]
        roots = dirichlet(self.alpha, (self.num_clients, len(below)), generator)
        leaves = [dirichlet(self.beta, (self.num_clients, len(fine)), generator) for fine in below]
        taken = allot(sizes, roots, leaves, below, np.bincount(labels, minlength=len(coarse)), generator)
        owners = [np.repeat(np.arange(self.num_clients), taken[:, label]) for label in range(len(coarse))]
        return deal(labels, owners, generator)


def allot(
    sizes: np.ndarray,
    roots: np.ndarray,
    leaves: list[np.ndarray],
    below: list[np.ndarray],
    supply: np.ndarray,
    generator: rng.Rng,
) -> np.ndarray:
    """[clients, fine labels]: how many samples of each label a client gets.

    Many clients draw together, and those count whose draws find nothing exhausted before them: up to the first client
    that uses a label up, or asks for more than is left of it. The clients behind it draw anew, from what is left.
    """
    left, taken, done = supply.copy(), np.zeros((len(sizes), len(supply)), dtype=np.int64), 0
    while done < len(sizes):
        now = slice(done, done + TOGETHER)
        mix = renormalised(roots[now], [leaf[now] for leaf in leaves], below, left)
        rows = np.repeat(np.arange(len(mix)), sizes[now])
        asked = np.bincount(rows * mix.shape[1] + choose(mix, rows, generator), minlength=mix.size).reshape(mix.shape)
        total = asked.cumsum(0)
        changes = ((total >= left) & (left > 0)).any(1)
        last = int(np.argmax(changes)) if changes.any() else len(asked)  # the client with whom things change
        taken[done : done + last] = asked[:last]
        left -= asked[:last].sum(0)
        done += last
        if last < len(asked):
            settle(asked[last], taken[done], roots[done], [leaf[done] for leaf in leaves], below, left, generator)
            done += 1
    return taken


def settle(
    asked: np.ndarray,
    taken: np.ndarray,
    root: np.ndarray,
    leaves: list[np.ndarray],
    below: list[np.ndarray],
    left: np.ndarray,
    generator: rng.Rng,
) -> None:
    """Give one client what it asked for as far as there is any; the places that are refused ask again: under the same
    coarse label as long as that has anything, anew when it has not. Refusing what is exhausted and asking again is
    drawing from the renormalised mix, so this is the law of one place after another."""

    def serve(fine: np.ndarray, counts: np.ndarray) -> int:
        served = np.minimum(counts, left[fine])
        left[fine] -= served
        taken[fine] += served
        return int(counts.sum() - served.sum())

    refused = [serve(fine, asked[fine]) for fine in below]
    while True:
        for c, fine in enumerate(below):
            while refused[c] and left[fine].any():
                refused[c] = serve(fine, generator.multinomial(refused[c], available(leaves[c][None], left[fine])[0]))
        if not sum(refused):
            return
        supply = np.array([left[fine].sum() for fine in below])
        refused = generator.multinomial(sum(refused), available(root[None], supply)[0]).tolist()


def renormalised(roots: np.ndarray, leaves: list[np.ndarray], below: list[np.ndarray], left: np.ndarray) -> np.ndarray:
    """[clients, fine labels]: the probability of each label, of what is left at both levels."""
    coarse = available(roots, np.array([left[fine].sum() for fine in below]))
    mix = np.zeros((len(roots), len(left)))
    for c, fine in enumerate(below):
        if left[fine].any():
            mix[:, fine] = coarse[:, c : c + 1] * available(leaves[c], left[fine])
    return mix


def available(mixes: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Mixes without what is exhausted; where nothing of one is left, what there is."""
    open_ = np.where(left > 0, mixes, 0.0)
    open_ = np.where(open_.sum(1, keepdims=True) > 0, open_, left.astype(np.float64))
    return np.asarray(open_ / open_.sum(1, keepdims=True))
