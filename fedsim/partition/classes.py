"""Exactly n classes a client. FedNNNN, Sec. 5.1: "clients have images of only 2 classes".

The law. Clients, the largest first, are dealt the n classes that have most samples left to give, with a random
bonus of up to one client's worth, so that every class is held by about as many clients as it can feed; a class nobody
holds yet is dealt before it is too late. Amounts are then balanced (iterative proportional fitting) so that every
class is used up exactly and every client comes as near to its size as its classes allow.
(n classes in all that a client holds; where it has only a few samples, B_k may take the only one of a class.)
"""

from dataclasses import dataclass

import numpy as np

from fedsim import check, rng
from fedsim.data import Population
from fedsim.partition.base import Sized, apportion, deal

FITTING_PASSES = 200


@dataclass(frozen=True)
class Classes(Sized):
    classes_per_client: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("classes_per_client", self.classes_per_client, ge=1)

    def assign(self, population: Population, generator: rng.Rng) -> np.ndarray:
        labels = population.one_label
        supply = np.bincount(labels)
        n, present = self.classes_per_client, int((supply > 0).sum())
        if n > present:
            raise check.BadValue("classes_per_client", n, f"must be at most the number of classes, {present}")
        if self.num_clients * n < present:
            raise check.BadValue(
                "num_clients",
                self.num_clients,
                f"with classes_per_client={n} leaves some of the {present} classes to nobody; "
                f"must be at least {-(-present // n)}",
            )
        most = int(np.minimum(supply, self.num_clients).sum()) // n
        if self.num_clients > most:
            raise check.BadValue(
                "num_clients",
                self.num_clients,
                f"must be at most {most} for {n} classes a client: a class cannot have more holders than samples",
            )
        sizes = apportion(len(labels), self.relative_sizes(generator), minimum=n)
        holders = self._deal_classes(sizes, supply, generator)
        client, cls = np.repeat(np.arange(self.num_clients), n), holders.ravel()
        amount = _fit(client, cls, sizes / n, sizes, supply)
        return deal(labels, [self._amounts(c, client, cls, amount, supply) for c in range(len(supply))], generator)

    def _deal_classes(self, sizes: np.ndarray, supply: np.ndarray, generator: rng.Rng) -> np.ndarray:
        """[K, n]: the classes of each client. Where scarce classes leave the last clients too few, dealt again by how
        many more holders each class can have, which always comes out."""
        jitter = generator.random_sample((self.num_clients, len(supply)))
        order = np.lexsort((generator.random_sample(self.num_clients), -sizes))
        holders = self._try_to_deal(sizes, supply, order, jitter, by_room=False)
        if holders is None:
            holders = self._try_to_deal(sizes, supply, order, jitter, by_room=True)
        assert holders is not None, "checked to be feasible"
        return holders

    def _try_to_deal(
        self, sizes: np.ndarray, supply: np.ndarray, order: np.ndarray, jitter: np.ndarray, by_room: bool
    ) -> np.ndarray | None:
        n, left = self.classes_per_client, supply.astype(np.float64)
        room = np.minimum(supply, self.num_clients)  # every holder needs at least one sample
        unheld = supply > 0
        holders = np.empty((self.num_clients, n), dtype=np.int64)
        for dealt, client in enumerate(order):
            share = sizes[client] / n
            appeal = room + jitter[client] if by_room else left + jitter[client] * share
            appeal[room == 0] = -np.inf
            ranked = np.argsort(-appeal, kind="stable")
            later = (self.num_clients - dealt - 1) * n
            appeal[ranked[unheld[ranked]][: max(unheld.sum() - later, 0)]] = np.inf  # nobody could hold them later
            picked = np.argsort(-appeal, kind="stable")[:n]
            if room[picked].min() == 0:
                return None
            holders[client] = picked
            left[picked] -= share
            room[picked] -= 1
            unheld[picked] = False
        return holders

    def _amounts(
        self, c: int, client: np.ndarray, cls: np.ndarray, amount: np.ndarray, supply: np.ndarray
    ) -> np.ndarray:
        """The owners of class c's samples."""
        own = np.flatnonzero(cls == c)
        if len(own) == 0:
            return np.empty(0, dtype=np.int64)
        return np.repeat(client[own], apportion(int(supply[c]), amount[own]))


def _fit(client: np.ndarray, cls: np.ndarray, start: np.ndarray, sizes: np.ndarray, supply: np.ndarray) -> np.ndarray:
    """Amounts on the (client, class) pairs whose class totals are `supply` and whose client totals approach `sizes`."""
    amount = start[client].astype(np.float64)
    for _ in range(FITTING_PASSES):
        amount *= (sizes / np.bincount(client, amount))[client]
        totals = np.bincount(cls, amount, minlength=len(supply))
        amount *= (supply / np.where(totals > 0, totals, 1.0))[cls]
    return np.asarray(amount)
