"""FedAdagrad, FedAdam, FedYogi: adaptive server steps. Reddi et al., ICLR 2021, Algorithm 2.

m <- beta1 m + (1 - beta1) D                            D = direction (the paper's Delta is -D)
v <- v + D^2                                            FedAdagrad
v <- beta2 v + (1 - beta2) D^2                          FedAdam
v <- v - (1 - beta2) D^2 sign(v - D^2)                  FedYogi
theta <- theta - lr m / (sqrt(v) + tau)                 no bias correction; v starts at tau^2
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import check
from fedsim.types import State, Tree


@dataclass(frozen=True)
class Adaptive(ABC):
    lr: float
    beta1: float
    tau: float

    def __post_init__(self) -> None:
        check.number("lr", self.lr, gt=0)
        check.number("beta1", self.beta1, ge=0, lt=1)
        check.number("tau", self.tau, gt=0)

    @abstractmethod
    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        """The new v, from the old one and D^2."""

    def init(self, params: Tree) -> State:
        return {
            "m": {n: torch.zeros_like(p) for n, p in params.items()},
            "v": {n: torch.full_like(p, self.tau**2) for n, p in params.items()},
        }

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        m = {n: self.beta1 * old + (1 - self.beta1) * grads[n] for n, old in state["m"].items()}
        v = {n: self.second(old, grads[n].square()) for n, old in state["v"].items()}
        return {n: p - lr * m[n] / (v[n].sqrt() + self.tau) for n, p in params.items()}, {"m": m, "v": v}


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@dataclass(frozen=True)
class FedAdam(Adaptive):
    beta2: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("beta2", self.beta2, ge=0, lt=1)

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogi(FedAdam):
    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)
