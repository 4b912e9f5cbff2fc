"""The plain server step.   theta <- theta - lr direction    (naive aggregation, lr = 1: the clients' average)"""

from dataclasses import dataclass

from fedsim import check
from fedsim.trees import combined
from fedsim.types import State, Tree


@dataclass(frozen=True)
class Sgd:
    lr: float

    def __post_init__(self) -> None:
        check.number("lr", self.lr, gt=0)

    def init(self, params: Tree) -> State:
        return {}

    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]:
        return combined(lambda p, d: [x - lr * y for x, y in zip(p, d, strict=True)], params, grads), state
