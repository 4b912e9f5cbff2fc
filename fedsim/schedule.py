"""The client learning rate over rounds. Rounds count from 0; `rounds` is the horizon R of schedules that have one."""

import math
from dataclasses import dataclass

from fedsim import check


@dataclass(frozen=True)
class Constant:
    def __call__(self, lr: float, round: int) -> float:
        return lr


@dataclass(frozen=True)
class Cosine:
    """factor (1 + cos(pi r / R)) lr. The elastic paper prints factor 1, which starts at twice its "initial rate"."""

    rounds: int
    factor: float

    def __post_init__(self) -> None:
        check.integer("rounds", self.rounds, ge=1)
        check.number("factor", self.factor, gt=0)

    def __call__(self, lr: float, round: int) -> float:
        return self.factor * (1 + math.cos(math.pi * min(round, self.rounds) / self.rounds)) * lr


@dataclass(frozen=True)
class TimeDecay:
    """lr / (1 + phi r), phi = lr / R unless given. Felbab et al., Sec. 2.3."""

    rounds: int
    phi: float | None

    def __post_init__(self) -> None:
        check.integer("rounds", self.rounds, ge=1)
        if self.phi is not None:
            check.number("phi", self.phi, ge=0)

    def __call__(self, lr: float, round: int) -> float:
        phi = lr / self.rounds if self.phi is None else self.phi
        return lr / (1 + phi * round)


@dataclass(frozen=True)
class Step:
    """lr gamma^floor(r / every)."""

    every: int
    gamma: float

    def __post_init__(self) -> None:
        check.integer("every", self.every, ge=1)
        check.number("gamma", self.gamma, gt=0, le=1)

    def __call__(self, lr: float, round: int) -> float:
        return lr * self.gamma ** (round // self.every)
