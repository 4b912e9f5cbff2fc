"""Every client holds a uniformly random share of the data."""

from dataclasses import dataclass

import numpy as np

from fedsim import rng
from fedsim.partition.base import Partition, apportion


@dataclass(frozen=True)
class Iid(Partition):
    def assign(self, labels: np.ndarray, generator: rng.Rng) -> np.ndarray:
        sizes = apportion(len(labels), self.relative_sizes(generator))
        return generator.permutation(np.repeat(np.arange(self.num_clients), sizes))
