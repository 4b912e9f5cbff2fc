"""FedAsync: mix each client's model in as it arrives, the less the staler it is. Xie et al. 2019; the slides.

    x_t = (1 - a_t) x_{t-1} + a_t x_new ,   a_t = alpha s(d)
    constant:    s = 1
    polynomial:  s = (d + 1)^-a
    hinge:       s = 1 if d <= b, else 1 / (a (d - b) + 1)

d is the number of updates the server has made since the client was sent its model, so s(0) = 1. As a direction to
descend:  a_t (x_{t-1} - x_new).  Goes with participation=async; in synchronous rounds d = 0 and alpha is a server rate.
"""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.aggregator.fedavg import FedAvg
from fedsim.cohort import Cohort
from fedsim.types import Direction, State


@dataclass(frozen=True)
class FedAsync(FedAvg):
    alpha: float
    staleness: str
    a: float
    b: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("alpha", self.alpha, gt=0, le=1)
        check.choice("staleness", self.staleness, ("constant", "polynomial", "hinge"))
        check.number("a", self.a, gt=0)
        check.integer("b", self.b, ge=0)

    def s(self, d: int) -> float:
        if self.staleness == "polynomial":
            return float((d + 1) ** -self.a)
        if self.staleness == "hinge" and d > self.b:
            return 1 / (self.a * (d - self.b) + 1)
        return 1.0

    def direction(self, cohort: Cohort, state: State) -> Direction:
        a_t = self.alpha * self.s(cohort.staleness)
        old = cohort.server.buffers
        mixed = {n: torch.lerp(old[n], b, a_t) if b.is_floating_point() else b for n, b in cohort.buffers.items()}
        return Direction({n: a_t * d for n, d in cohort.delta.items()}, buffers=mixed)
