"""The clients the data come with: writers, roles, a client_id column.

The law. Every client of the data that has at least `min_samples` training samples is a client with all of them; where
`num_clients` is given, so many of these, drawn uniformly without replacement.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedsim import check, rng
from fedsim.data import Population, Split
from fedsim.partition.base import Partition


@dataclass(frozen=True)
class Natural(Partition):
    min_samples: int

    def __post_init__(self) -> None:
        if self.num_clients is not None:
            super().__post_init__()
        check.number("sensitivity_fraction", self.sensitivity_fraction, ge=0, lt=1)
        check.integer("min_samples", self.min_samples, ge=1)

    def __call__(self, population: Population, seed: int) -> Split:
        split = super().__call__(population, seed)
        assert population.clients is not None  # assign() saw to it
        return replace(split, codes=population.clients[split.indices[split.offsets[:-1]]])

    def assign(self, population: Population, generator: rng.Rng) -> np.ndarray:
        if population.clients is None:
            raise check.InputError(
                "partition=natural: this dataset does not say whose its samples are (no client_id); "
                "use partition=dirichlet, iid, classes, one_class or shards"
            )
        samples = np.bincount(population.clients)
        chosen = np.flatnonzero(samples >= self.min_samples)
        if not len(chosen):
            raise check.BadValue(
                "min_samples", self.min_samples, f"must be at most {samples.max()}, the largest client"
            )
        if self.num_clients is not None:
            if self.num_clients > len(chosen):
                raise check.BadValue(
                    "num_clients",
                    self.num_clients,
                    f"must be at most {len(chosen)}, the clients of this dataset with min_samples={self.min_samples} "
                    "or more; null takes all",
                )
            chosen = chosen[rng.sample(generator, len(chosen), self.num_clients)]
        place = np.full(len(samples), -1)
        place[chosen] = np.arange(len(chosen))
        return np.asarray(place[population.clients])
