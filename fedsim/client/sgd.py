"""Plain local training: every batch gives its own gradient. What it is descended with is `client_optimizer`."""

from dataclasses import dataclass

from torch import Tensor

from fedsim import check
from fedsim.task import Task
from fedsim.types import Batch, Context, Tree


@dataclass(frozen=True)
class Sgd:
    epochs: int
    batch_size: int | None

    def __post_init__(self) -> None:
        check.integer("epochs", self.epochs, ge=1)
        if self.batch_size is not None:
            check.integer("batch_size", self.batch_size, ge=1)

    def gradient(self, task: Task, params: Tree, buffers: Tree, batch: Batch, context: Context) -> tuple[Tree, Tensor]:
        return task.gradient(params, buffers, batch)
