"""FedAvgM: a moving average of the rounds' directions. Elastic's supplement, Algorithm 1:

m <- momentum m + (1 - momentum) direction ,   theta <- theta - lr m
"""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.types import State, Tree


@dataclass(frozen=True)
class FedAvgM:
    lr: float
    momentum: float

    def __post_init__(self) -> None:
        check.number("lr", self.lr, gt=0)
        check.number("momentum", self.momentum, ge=0, lt=1)

    def init(self, params: Tree) -> State:
        return {"m": {n: torch.zeros_like(p) for n, p in params.items()}}

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        m = {n: self.momentum * old + (1 - self.momentum) * grads[n] for n, old in state["m"].items()}
        return {n: p - lr * m[n] for n, p in params.items()}, {"m": m}
