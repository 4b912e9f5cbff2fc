"""Label mixes drawn from a Dirichlet distribution. Elastic paper, Sec. 4 and supplement Sec. 2.

The law. Client k has n_k places (balanced, log-normal or power-law sizes, summing to the data) and a label mix
p_k ~ Dirichlet(alpha, ..., alpha) over the classes. Every place draws a label from its client's p_k. A label asked for
more often than it exists goes to a random choice of those who asked; it is then exhausted and leaves every mix,
which is renormalised, and the places left over draw again. (The rule the supplement gives for Pachinko allocation.)
Each pass fills every place or exhausts a label, so there are at most as many passes as labels.
"""

from dataclasses import dataclass

import numpy as np

from fedsim import check, rng
from fedsim.data import Population
from fedsim.partition.base import Sized, apportion, deal


@dataclass(frozen=True)
class Dirichlet(Sized):
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("alpha", self.alpha, ge=1e-9, le=1e12)

    def assign(self, population: Population, generator: rng.Rng) -> np.ndarray:
        labels = population.one_label
        sizes = apportion(len(labels), self.relative_sizes(generator))
        supply = np.bincount(labels)
        mixes = dirichlet(self.alpha, (self.num_clients, len(supply)), generator)
        places = generator.permutation(np.repeat(np.arange(self.num_clients), sizes))
        label = draw_labels(places, mixes, supply, generator)
        return deal(labels, [places[label == c] for c in range(len(supply))], generator)


def dirichlet(alpha: float, shape: tuple[int, int], generator: rng.Rng) -> np.ndarray:
    """Rows ~ Dirichlet(alpha, ..., alpha), for any alpha > 0.

    A Gamma(alpha) variate is Gamma(alpha + 1) * U^(1/alpha); taking logarithms keeps tiny alphas from underflowing
    to rows of zeros.
    """
    log = np.log(generator.standard_gamma(alpha + 1, shape)) + np.log1p(-generator.random_sample(shape)) / alpha
    weights = np.exp(log - log.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def choose(mix: np.ndarray, rows: np.ndarray, generator: rng.Rng) -> np.ndarray:
    """For each entry of `rows` a column, drawn with the weights in that row of `mix`."""
    edges = np.cumsum(mix, axis=1)
    edges /= edges[:, -1:]
    # One search serves all rows: row k of the cumulative weights is shifted to (k, k + 1].
    asked = rows + generator.random_sample(len(rows)) * (1 - 1e-9)
    found = np.searchsorted((edges + np.arange(len(mix))[:, None]).ravel(), asked, side="right")
    return np.asarray(found - rows * mix.shape[1])


def draw_labels(places: np.ndarray, mixes: np.ndarray, supply: np.ndarray, generator: rng.Rng) -> np.ndarray:
    """A label for every place, so that label c is drawn exactly supply[c] times."""
    label = np.full(len(places), -1)
    left = supply.copy()
    classes = mixes.shape[1]
    open_places = np.arange(len(places))
    while len(open_places):
        mix = np.where(left > 0, mixes, 0.0)
        # A client whose whole mix is exhausted takes what there is.
        mix = np.where(mix.sum(axis=1, keepdims=True) > 0, mix, left.astype(np.float64))
        wish = choose(mix, places[open_places], generator)
        # First come, first served: open places stand in random order.
        order = np.argsort(wish, kind="stable")
        starts = np.searchsorted(wish[order], np.arange(classes))
        rank = np.empty(len(wish), dtype=np.int64)
        rank[order] = np.arange(len(wish)) - starts[wish[order]]
        served = rank < left[wish]
        label[open_places[served]] = wish[served]
        left -= np.bincount(wish[served], minlength=classes)
        open_places = open_places[~served]
    return label
