"""Local only: every client trains a model of its own and nothing is ever exchanged. The reference that federated
learning must beat. The global model stays as it was drawn; personal accuracy is the one to look at."""

from dataclasses import dataclass

from fedsim.client.sgd import Sgd
from fedsim.types import Adaptation, ClientOptimizer, Context, Finished, Model


@dataclass(frozen=True)
class Own(Sgd):
    """Begins with the client's own model."""

    def start(self, context: Context) -> Model:
        own = context.own
        return Model(own["params"], own.get("buffers", {})) if "params" in own else context.model


@dataclass(frozen=True)
class Local(Own):
    @property
    def traffic(self) -> tuple[int, int]:
        return 0, 0

    @property
    def personal(self) -> bool:
        return True

    def finish(self, model: Model, steps: int, context: Context) -> Finished:
        return Finished(context.model, kept={"params": model.params, "buffers": model.buffers})

    def adaptation(self, optimizer: ClientOptimizer, lr: float) -> Adaptation:
        """There is nothing to adapt: the client's model, as it is."""
        return Adaptation(Own(self.epochs, self.batch_size), optimizer, lr, steps=0)
