"""RMSProp. Hinton, 2012.   v <- rho v + (1 - rho) g^2 ,   w <- w - lr g / (sqrt(v) + eps)."""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.client_optimizer.base import Base
from fedsim.types import State, Tree


@dataclass(frozen=True)
class RMSprop(Base):
    rho: float
    eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("rho", self.rho, ge=0, lt=1)
        check.number("eps", self.eps, gt=0)

    def init(self, params: Tree) -> State:
        return {"v": {n: torch.zeros_like(p) for n, p in params.items()}}

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        g = self.decayed(params, grads)
        v = {n: self.rho * old + (1 - self.rho) * g[n].square() for n, old in state["v"].items()}
        return {n: p - lr * g[n] / (v[n].sqrt() + self.eps) for n, p in params.items()}, {"v": v}
