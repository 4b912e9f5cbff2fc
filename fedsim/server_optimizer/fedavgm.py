"""FedAvgM: momentum on the server. Elastic's supplement, Algorithm 1 (`ema`), and Hsu et al. 2019 (`heavy_ball`):

    ema:         m <- momentum m + (1 - momentum) D ,   heavy_ball:  m <- momentum m + D        D = direction
    theta <- theta - lr m                               nesterov:    theta <- theta - lr (momentum m + g)

with g what was just added to m. `ema` at rate lr is `heavy_ball` at rate (1 - momentum) lr.
"""

from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.types import State, Tree


@dataclass(frozen=True)
class FedAvgM:
    lr: float
    momentum: float
    form: str
    nesterov: bool

    def __post_init__(self) -> None:
        check.number("lr", self.lr, gt=0)
        check.number("momentum", self.momentum, ge=0, lt=1)
        check.choice("form", self.form, ("ema", "heavy_ball"))
        check.boolean("nesterov", self.nesterov)
        if self.nesterov and not self.momentum:
            raise check.BadValue("nesterov", self.nesterov, "needs momentum > 0")

    def init(self, params: Tree) -> State:
        return {"m": {n: torch.zeros_like(p) for n, p in params.items()}}

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        share = 1 - self.momentum if self.form == "ema" else 1.0
        m = {n: self.momentum * old + share * grads[n] for n, old in state["m"].items()}
        move = {n: self.momentum * t + share * grads[n] for n, t in m.items()} if self.nesterov else m
        return {n: p - lr * move[n] for n, p in params.items()}, {"m": m}
