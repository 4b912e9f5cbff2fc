"""Who trains in a round."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsim import check, rng


@dataclass(frozen=True)
class Uniform:
    """Uniformly at random, without replacement within a round, afresh every round.

    `clients_per_round` is a count (a whole number) or a fraction C in (0, 1] (written with a point): 1 is one client,
    1.0 is all of them.
    """

    clients_per_round: int | float

    def __post_init__(self) -> None:
        key, value = "clients_per_round", self.clients_per_round
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not whole and not (isinstance(value, float) and 0 < value <= 1):
            raise check.BadValue(
                key,
                value,
                "must be a whole number of clients >= 1, or a fraction with 0 < C <= 1 (1.0 is all)",
            )

    def count(self, num_clients: int) -> int:
        wanted = self.clients_per_round
        if isinstance(wanted, float):
            return max(round(wanted * num_clients), 1)
        if wanted > num_clients:
            raise check.BadValue("clients_per_round", wanted, f"must be at most partition.num_clients={num_clients}")
        return wanted

    def __call__(self, seed: int, round: int, num_clients: int) -> Sequence[int]:
        generator = rng.generator(seed, "cohort", round)
        chosen: list[int] = rng.sample(generator, num_clients, self.count(num_clients)).tolist()
        return chosen
