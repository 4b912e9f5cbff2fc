"""The virtual clock: how long clients take, and which of them fail.

A client needs  delay + steps / speed  virtual seconds for its round: delay for the two transfers, afresh each time, and
speed in steps a second, once for all. Both are constant, or log-normal around the given value with the given sigma.
Every draw is a function of (seed, client ...), so that the same clients are slow for every method compared.
"""

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim import check, rng


def steps_taken(steps: int, share: float) -> int:
    """How many of its steps a client takes that manages a share of them: one at least."""
    return max(int(share * steps), 1)


@dataclass(frozen=True)
class Participation(ABC):
    """`clients_per_round` is a count (a whole number) or a fraction C in (0, 1] (written with a point): 1 is one, 1.0
    is all of them."""

    clients_per_round: int | float
    dropout: float
    stragglers: float
    least_effort: float
    speed: float
    speed_sigma: float
    delay: float
    delay_sigma: float

    def __post_init__(self) -> None:
        key, value = "clients_per_round", self.clients_per_round
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not whole and not (isinstance(value, float) and 0 < value <= 1):
            raise check.BadValue(
                key,
                value,
                "must be a whole number of clients >= 1, or a fraction with 0 < C <= 1 (1.0 is all)",
            )
        check.number("dropout", self.dropout, ge=0, lt=1)
        check.number("stragglers", self.stragglers, ge=0, le=1)
        check.number("least_effort", self.least_effort, ge=0, le=1)
        check.number("speed", self.speed, gt=0)
        check.number("speed_sigma", self.speed_sigma, ge=0, le=10)
        check.number("delay", self.delay, ge=0)
        check.number("delay_sigma", self.delay_sigma, ge=0, le=10)

    def count(self, num_clients: int) -> int:
        wanted = self.clients_per_round
        if isinstance(wanted, float):
            return max(round(wanted * num_clients), 1)
        if wanted > num_clients:
            raise check.BadValue("clients_per_round", wanted, f"must be at most the number of clients, {num_clients}")
        return wanted

    def foreseen(self, seed: int, round: int, num_clients: int) -> Sequence[int] | None:
        return None

    def fails(self, seed: int, time: int, client: int) -> bool:
        """Whether a client that was sent the model of a round never answers."""
        return bool(self.dropout and rng.generator(seed, "fails", time, client).random_sample() < self.dropout)

    def effort(self, seed: int, time: int, clients: Sequence[int]) -> Mapping[int, float]:
        """The stragglers among them, and the share of their steps they manage: uniform above `least_effort`."""
        shares = {}
        for client in clients if self.stragglers else ():
            straggles, share = rng.generator(seed, "straggles", time, client).random_sample(2)
            if straggles < self.stragglers:
                shares[client] = float(self.least_effort + (1 - self.least_effort) * share)
        return shares

    def duration(self, seed: int, time: int, client: int, steps: int) -> float:
        """Virtual seconds between sending a client the model and having its update."""
        speed, delay = self.speed, self.delay
        if self.speed_sigma:
            speed *= math.exp(self.speed_sigma * rng.generator(seed, "speed", client).standard_normal())
        if self.delay_sigma:
            delay *= math.exp(self.delay_sigma * rng.generator(seed, "delay", time, client).standard_normal())
        return delay + steps / speed

    def slowest(self, seed: int, time: int, taken: Mapping[int, int]) -> float:
        """The longest of these clients' durations; `taken` are their steps."""
        if not (self.speed_sigma or self.delay_sigma):  # all alike: no need to ask each
            return self.delay + max(taken.values()) / self.speed if taken else 0.0
        return max((self.duration(seed, time, k, n) for k, n in taken.items()), default=0.0)
