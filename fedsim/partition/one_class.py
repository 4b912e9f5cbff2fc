"""One class a client. Felbab et al., Sec. 2.2: "full-non-iid" and, with non_iid = 0.99, "99% non-iid".

The law. Client k's class is k modulo the number of classes. A share `non_iid` of every class goes to that class's
clients (in equal parts, or by sigma or power where several clients have the class); the rest, the same share of every
class, is pooled and dealt evenly over all clients.
"""

from dataclasses import dataclass

import numpy as np

from fedsim import check, rng
from fedsim.data import Population
from fedsim.partition.base import Sized, apportion, deal


@dataclass(frozen=True)
class OneClass(Sized):
    non_iid: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("non_iid", self.non_iid, gt=0, le=1)

    def assign(self, population: Population, generator: rng.Rng) -> np.ndarray:
        labels = population.one_label
        supply = np.bincount(labels)
        classes, clients = len(supply), np.arange(self.num_clients)
        if self.num_clients < classes:
            raise check.BadValue("num_clients", self.num_clients, f"must be at least the number of classes, {classes}")
        key = "sigma" if self.sigma else "power"
        if (self.sigma or self.power) and self.num_clients < 2 * classes:
            raise check.BadValue(
                key,
                getattr(self, key),
                f"must be 0 where a class has a single client: partition.num_clients={self.num_clients} "
                f"must be at least {2 * classes} for unequal sizes",
            )
        weights = self.relative_sizes(generator)
        pooled = supply - np.rint(self.non_iid * supply).astype(np.int64)
        spread = generator.permutation(np.arange(pooled.sum()) % self.num_clients)
        starts = np.concatenate([[0], np.cumsum(pooled)])
        wanted = []
        for c in range(classes):
            own = clients[clients % classes == c]
            if supply[c] - pooled[c] < len(own):
                raise check.BadValue(
                    "non_iid",
                    self.non_iid,
                    f"leaves {supply[c] - pooled[c]} of class {c}'s {supply[c]} samples to its {len(own)} clients; "
                    "must be larger, or partition.num_clients smaller",
                )
            amounts = apportion(int(supply[c] - pooled[c]), weights[own])
            wanted.append(np.concatenate([np.repeat(own, amounts), spread[starts[c] : starts[c + 1]]]))
        return deal(labels, wanted, generator)
