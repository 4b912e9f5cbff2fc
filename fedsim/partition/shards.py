"""Shards. McMahan et al. 2017, Sec. 3: "sort the data by digit label, divide it into 200 shards of size 300, and assign
each of 100 clients 2 shards".

The law. The samples, in random order within a label, stand sorted by label and are cut into num_clients *
shards_per_client pieces whose sizes differ by at most one; every client gets shards_per_client of them, drawn uniformly
without replacement.
"""

from dataclasses import dataclass

import numpy as np

from fedsim import check, rng
from fedsim.data import Population
from fedsim.partition.base import Partition, apportion


@dataclass(frozen=True)
class Shards(Partition):
    num_clients: int
    shards_per_client: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("shards_per_client", self.shards_per_client, ge=1)

    def assign(self, population: Population, generator: rng.Rng) -> np.ndarray:
        labels, shards = population.one_label, self.num_clients * self.shards_per_client
        if shards > len(labels):
            most = len(labels) // self.num_clients
            raise check.BadValue(
                "shards_per_client", self.shards_per_client, f"must be at most {most}: a shard needs a sample"
            )
        shuffled = generator.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        holder = generator.permutation(np.repeat(np.arange(self.num_clients), self.shards_per_client))
        owner = np.empty(len(labels), dtype=np.int64)
        owner[by_label] = np.repeat(holder, apportion(len(labels), np.ones(shards)))
        return owner
