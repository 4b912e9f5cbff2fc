"""SCAFFOLD: control variates against client drift. Karimireddy et al., ICML 2020, Algorithm 1.

On client i, with x the server's model and K local steps of rate eta:

    y <- y - eta (g_i(y) - c_i + c)
    option 1:  c_i+ = gradient of client i's whole data at x
    option 2:  c_i+ = c_i - c + (x - y) / (K eta)

On the server:  c <- c + |S|/N mean_i (c_i+ - c_i) ,  so that c is the mean of all c_i.   All start at zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import check
from fedsim.client.sgd import Sgd
from fedsim.client_optimizer.sgd import Sgd as PlainSgd
from fedsim.cohort import Cohort
from fedsim.task import Task
from fedsim.types import Adaptation, Batch, ClientOptimizer, Context, Finished, Model, State, Tree


@dataclass(frozen=True)
class Scaffold(Sgd):
    option: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("option", self.option, ge=1, le=2)

    @property
    def traffic(self) -> tuple[int, int]:
        return 2, 2  # x and c; delta and c_i's change

    @property
    def looks_back(self) -> bool:
        return self.option == 1

    def check(self, optimizer: ClientOptimizer) -> None:
        """(x - y) / (K eta) is the mean of the gradients only where every step is eta times one of them."""
        if self.option == 2 and not (isinstance(optimizer, PlainSgd) and optimizer.momentum == 0):
            raise check.BadValue("option", 2, "needs client_optimizer=sgd without momentum; option=1 goes with any")

    def init(self, params: Tree) -> State:
        return {"c": {n: torch.zeros_like(p) for n, p in params.items()}}

    def gradient(self, task: Task, params: Tree, buffers: Tree, batch: Batch, context: Context) -> tuple[Tree, Tensor]:
        g, loss = task.gradient(params, buffers, batch)
        c = context.shared["c"]
        if "c" not in context.own:  # c_i = 0
            return {n: t + c[n] for n, t in g.items()}, loss
        c_i = context.own["c"]
        return {n: t - c_i[n] + c[n] for n, t in g.items()}, loss

    def finish(self, model: Model, steps: int, context: Context) -> Finished:
        x, y, c = context.anchor, model.params, context.shared["c"]
        c_i = context.own.get("c") or {n: torch.zeros_like(t) for n, t in x.items()}
        if self.option == 1:
            new = context.task.full_gradient(context.model, context.data.all())
        elif not context.lr:  # the end of a schedule: no step was taken that could say anything
            new = c_i
        else:
            new = {n: c_i[n] - c[n] + (t - y[n]) / (steps * context.lr) for n, t in x.items()}
        return Finished(model, kept={"c": new}, sent={n: t - c_i[n] for n, t in new.items()})

    def adaptation(self, optimizer: ClientOptimizer, lr: float) -> Adaptation:
        """Fine-tuning on the client's own loss: corrected steps would go where all clients want to go."""
        return Adaptation(Sgd(self.epochs, self.batch_size), optimizer, lr)

    def merge(self, state: State, cohort: Cohort, num_clients: int) -> State:
        if cohort.sent is None:
            return state
        share = cohort.count / num_clients
        return {"c": {n: c + share * cohort.sent[n] for n, c in state["c"].items()}}
