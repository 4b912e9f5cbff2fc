"""Adam. Kingma & Ba, ICLR 2015.

m <- beta1 m + (1 - beta1) g ,   v <- beta2 v + (1 - beta2) g^2 ,
w <- w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
"""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.client_optimizer.base import Base
from fedsim.types import State, Tree


@dataclass(frozen=True)
class Adam(Base):
    beta1: float
    beta2: float
    eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("beta1", self.beta1, ge=0, lt=1)
        check.number("beta2", self.beta2, ge=0, lt=1)
        check.number("eps", self.eps, gt=0)

    def init(self, params: Tree) -> State:
        zeros = {n: torch.zeros_like(p) for n, p in params.items()}
        return {
            "m": zeros,
            "v": zeros,
            "t": {"t": torch.zeros((), device=next(iter(params.values())).device)},
        }

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        g = self.decayed(params, grads)
        t = state["t"]["t"] + 1
        m = {n: self.beta1 * old + (1 - self.beta1) * g[n] for n, old in state["m"].items()}
        v = {n: self.beta2 * old + (1 - self.beta2) * g[n].square() for n, old in state["v"].items()}
        m_scale, v_scale = 1 / (1 - self.beta1**t), 1 / (1 - self.beta2**t)
        new = {n: p - lr * (m[n] * m_scale) / ((v[n] * v_scale).sqrt() + self.eps) for n, p in params.items()}
        return new, {"m": m, "v": v, "t": {"t": t}}
