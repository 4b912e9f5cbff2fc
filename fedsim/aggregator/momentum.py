"""Momentum on the server. Nagura et al., FedNNNN, Eq. 10-11:  v <- gamma v + mean_k d_k ,  w <- w + v."""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.aggregator.fedavg import FedAvg
from fedsim.cohort import Cohort
from fedsim.types import Direction, State, Tree


@dataclass(frozen=True)
class Momentum(FedAvg):
    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("gamma", self.gamma, ge=0, lt=1)

    def init(self, params: Tree) -> State:
        return {"v": {n: torch.zeros_like(p) for n, p in params.items()}}

    def direction(self, cohort: Cohort, state: State) -> Direction:
        v = {n: self.gamma * state["v"][n] + d for n, d in cohort.delta.items()}
        return Direction(v, {"v": v})
