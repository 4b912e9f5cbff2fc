"""What every client optimizer has: a rate, weight decay, and whether its state outlives the round."""

from dataclasses import dataclass

from fedsim import check
from fedsim.types import Tree


@dataclass(frozen=True)
class Base:
    lr: float
    weight_decay: float
    persist_state: bool

    def __post_init__(self) -> None:
        check.number("lr", self.lr, gt=0)
        check.number("weight_decay", self.weight_decay, ge=0)
        check.boolean("persist_state", self.persist_state)

    def decayed(self, params: Tree, grads: Tree) -> Tree:
        """g + lambda w: the gradient of the loss plus (lambda/2) ||w||^2."""
        decay = self.weight_decay
        return {n: g + decay * params[n] for n, g in grads.items()} if decay else grads
