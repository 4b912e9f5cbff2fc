"""LoAdaBoost: clients whose loss stays high train longer. Huang et al. 2020; the FedAvg slides.

Train E/2 epochs. While the client's loss is above the last round's median loss, train E/2 - r + 1 more (r = 1, 2 ...),
3E/2 epochs in all at most. The clients' final losses go up, and their median goes out with the next model.

The first round has no median and is E/2 epochs for everyone. (The slides write E/2 - 1 for the first repetition beside
the general E/2 - r + 1; the general form is used.)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.client.sgd import Sgd
from fedsim.cohort import Cohort
from fedsim.types import Context, Finished, Model, State, Tree


@dataclass(frozen=True)
class LoAdaBoost(Sgd):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs % 2:
            raise check.BadValue("epochs", self.epochs, "must be even: training starts with E/2")

    @property
    def looks_back(self) -> bool:
        return True

    def init(self, params: Tree) -> State:
        return {"median": {"loss": torch.full((), torch.inf, device=next(iter(params.values())).device)}}

    def plan(self, context: Context, loss: Callable[[], float]) -> Iterator[int]:
        half, most = self.epochs // 2, 3 * self.epochs // 2
        yield half
        done, median = half, context.shared["median"]["loss"].item()
        for more in range(half, 0, -1):
            if done == most or loss() <= median:
                return
            more = min(more, most - done)
            yield more
            done += more

    def finish(self, model: Model, steps: int, context: Context) -> Finished:
        return Finished(model, report=context.task.mean_loss(model, context.data))

    def merge(self, state: State, cohort: Cohort, num_clients: int) -> State:
        if not cohort.reports:
            return state
        return {"median": {"loss": torch.stack(list(cohort.reports)).quantile(0.5)}}
