"""FedProx: stay near the broadcast model. Li et al., MLSys 2020.

Minimises  loss(w) + (mu/2) ||w - w_t||^2 ,  so the gradient is  grad loss(w) + mu (w - w_t).
(Elastic's supplement, Algorithm 2, prints rho (theta - theta_k) added to the step: the same term, moved across.)
"""

from dataclasses import dataclass

from torch import Tensor

from fedsim import check
from fedsim.client.sgd import Sgd
from fedsim.task import Task
from fedsim.types import Batch, Context, Tree


@dataclass(frozen=True)
class FedProx(Sgd):
    mu: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("mu", self.mu, ge=0)

    def gradient(self, task: Task, params: Tree, buffers: Tree, batch: Batch, context: Context) -> tuple[Tree, Tensor]:
        grads, loss = task.gradient(params, buffers, batch)
        return {n: g + self.mu * (params[n] - context.anchor[n]) for n, g in grads.items()}, loss
