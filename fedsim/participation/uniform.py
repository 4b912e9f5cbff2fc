"""Synchronous rounds: clients are sampled uniformly, without replacement within a round, and the server waits for all
that answer. A round takes as long as the slowest of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim import rng
from fedsim.participation.base import Participation, steps_taken
from fedsim.types import Clock, Turn


@dataclass(frozen=True)
class Uniform(Participation):
    def draw(self, seed: int, round: int, num_clients: int) -> list[int]:
        """Afresh every round, in ascending order."""
        generator = rng.generator(seed, "cohort", round)
        chosen: list[int] = rng.sample(generator, num_clients, self.count(num_clients)).tolist()
        return chosen

    def foreseen(self, seed: int, round: int, num_clients: int) -> list[int] | None:
        return None if self.dropout or self.stragglers else self.draw(seed, round, num_clients)

    def __call__(self, seed: int, round: int, steps: Sequence[int], clock: Clock) -> Turn:
        sampled = self.draw(seed, round, len(steps))
        clients = [k for k in sampled if not self.fails(seed, round, k)] if self.dropout else sampled
        effort = self.effort(seed, round, clients)
        taken = {k: steps_taken(steps[k], effort.get(k, 1.0)) for k in clients}
        slowest = self.slowest(seed, round, taken)
        now = clock.get("now", 0.0)
        assert isinstance(now, float)
        return Turn(sampled, clients, effort, version=round, clock={"now": now + slowest}, sent=len(sampled))
