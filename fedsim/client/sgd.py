"""Plain local training: every batch gives its own gradient. What it is descended with is `client_optimizer`.

FedAvg's client (McMahan et al.); with one epoch of a single batch, FedSGD's (`client=fedsgd`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from fedsim import check
from fedsim.cohort import Cohort
from fedsim.task import Task
from fedsim.types import Adaptation, Batch, ClientOptimizer, Context, Finished, Model, State, Tree


@dataclass(frozen=True)
class Sgd:
    """Also what every other rule starts from: nothing kept, nothing sent beside the model."""

    epochs: int
    batch_size: int | None

    def __post_init__(self) -> None:
        check.integer("epochs", self.epochs, ge=1)
        if self.batch_size is not None:
            check.integer("batch_size", self.batch_size, ge=1)

    @property
    def traffic(self) -> tuple[int, int]:
        return 1, 1

    @property
    def personal(self) -> bool:
        return False

    @property
    def extra_batches(self) -> int:
        return 0

    @property
    def looks_back(self) -> bool:
        return False

    def check(self, optimizer: ClientOptimizer) -> None:
        pass

    def init(self, params: Tree) -> State:
        return {}

    def start(self, context: Context) -> Model:
        return context.model

    def plan(self, context: Context, loss: Callable[[], float]) -> Iterator[int]:
        yield self.epochs

    def gradient(self, task: Task, params: Tree, buffers: Tree, batch: Batch, context: Context) -> tuple[Tree, Tensor]:
        return task.gradient(params, buffers, batch)

    def finish(self, model: Model, steps: int, context: Context) -> Finished:
        return Finished(model)

    def merge(self, state: State, cohort: Cohort, num_clients: int) -> State:
        return state

    def adaptation(self, optimizer: ClientOptimizer, lr: float) -> Adaptation:
        """A round of local training (fine-tuning)."""
        return Adaptation(self, optimizer, lr)
