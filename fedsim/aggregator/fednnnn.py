"""FedNNNN: norm normalisation with momentum. Nagura et al., Eq. 12-13.

    v <- gamma v + beta (E/N) mean_k d_k ,   w <- w + v          N ~ 0: keep w as it is

The model that is sent out next is w, whose own accuracy may be poor; the one that is evaluated is the plain average
of the clients' models (Sec. 4.1, step 4): `evaluate: averaged`.
"""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.aggregator.fedavg import FedAvg
from fedsim.aggregator.norm_norm import amplification
from fedsim.cohort import Cohort
from fedsim.types import Direction, State, Tree


@dataclass(frozen=True)
class FedNNNN(FedAvg):
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("beta", self.beta, gt=0)
        check.number("gamma", self.gamma, ge=0, lt=1)

    @property
    def lengths(self) -> bool:
        return True

    def init(self, params: Tree) -> State:
        return {"v": {n: torch.zeros_like(p) for n, p in params.items()}}

    def direction(self, cohort: Cohort, state: State) -> Direction:
        ratio, old = amplification(cohort), state["v"]
        moves = ratio > 0
        v = {
            n: torch.where(moves, self.gamma * old[n] + self.beta * ratio * d, old[n]) for n, d in cohort.delta.items()
        }
        moved = {n: torch.where(moves, t, torch.zeros_like(t)) for n, t in v.items()}
        return Direction(moved, {"v": v}, metrics={"norm_norm/rate": self.beta * ratio})
