"""Every client holds a uniformly random share of the data."""

from dataclasses import dataclass

import numpy as np

from fedsim import rng
from fedsim.data import Population
from fedsim.partition.base import Sized, apportion


@dataclass(frozen=True)
class Iid(Sized):
    def assign(self, population: Population, generator: rng.Rng) -> np.ndarray:
        sizes = apportion(len(population), self.relative_sizes(generator))
        return generator.permutation(np.repeat(np.arange(self.num_clients), sizes))
