"""Stochastic gradient descent, with momentum and Nesterov's variant.

v <- momentum v + g ,   w <- w - lr v        (Nesterov: w <- w - lr (g + momentum v))
"""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.client_optimizer.base import Base
from fedsim.types import State, Tree


@dataclass(frozen=True)
class Sgd(Base):
    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("momentum", self.momentum, ge=0, lt=1)
        check.boolean("nesterov", self.nesterov)
        if self.nesterov and not self.momentum:
            raise check.BadValue("nesterov", self.nesterov, "needs momentum > 0")

    def init(self, params: Tree) -> State:
        return {"v": {n: torch.zeros_like(p) for n, p in params.items()}} if self.momentum else {}

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        g = self.decayed(params, grads)
        if not self.momentum:
            return {n: p - lr * g[n] for n, p in params.items()}, state
        v = {n: self.momentum * old + g[n] for n, old in state["v"].items()}
        move = {n: g[n] + self.momentum * v[n] for n in v} if self.nesterov else v
        return {n: p - lr * move[n] for n, p in params.items()}, {"v": v}
