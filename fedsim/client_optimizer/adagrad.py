"""AdaGrad. Duchi et al., JMLR 2011.   a <- a + g^2 ,   w <- w - lr g / (sqrt(a) + eps)."""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.client_optimizer.base import Base
from fedsim.types import State, Tree


@dataclass(frozen=True)
class Adagrad(Base):
    initial_accumulator: float
    eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("initial_accumulator", self.initial_accumulator, ge=0)
        check.number("eps", self.eps, gt=0)

    def init(self, params: Tree) -> State:
        return {"a": {n: torch.full_like(p, self.initial_accumulator) for n, p in params.items()}}

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        g = self.decayed(params, grads)
        a = {n: old + g[n].square() for n, old in state["a"].items()}
        return {n: p - lr * g[n] / (a[n].sqrt() + self.eps) for n, p in params.items()}, {"a": a}
