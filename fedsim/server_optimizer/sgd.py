"""The plain server step.   theta <- theta - lr direction    (naive aggregation, lr = 1: the clients' average)"""

from dataclasses import dataclass

from fedsim import check
from fedsim.types import State, Tree


@dataclass(frozen=True)
class Sgd:
    lr: float

    def __post_init__(self) -> None:
        check.number("lr", self.lr, gt=0)

    def init(self, params: Tree) -> State:
        return {}

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        return {n: p - lr * grads[n] for n, p in params.items()}, state
