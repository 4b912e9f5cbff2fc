"""pFedMe: personal models tied to the global one by Moreau envelopes. T Dinh et al., NeurIPS 2020, Algorithm 1.

Every local step solves, on its batch and from w,

    theta ~ argmin f(theta) + (lambda/2) ||theta - w||^2        until its gradient's norm is at most `tolerance`,
                                                                or `inner_steps` steps of rate `inner_lr`
and then descends the envelope, whose gradient is  lambda (w - theta).  The server mixes
w <- (1 - beta) w + beta mean_i w_i; here each client mixes before it sends, which gives the same sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import check
from fedsim.client.fedprox import FedProx
from fedsim.client.sgd import Sgd
from fedsim.client_optimizer.sgd import Sgd as PlainSgd
from fedsim.task import Task
from fedsim.types import Adaptation, Batch, ClientOptimizer, Context, Finished, Model, Tree


@dataclass(frozen=True)
class PFedMe(Sgd):
    lambda_: float
    inner_lr: float
    inner_steps: int
    tolerance: float
    beta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("lambda_", self.lambda_, gt=0)
        check.number("inner_lr", self.inner_lr, gt=0)
        check.integer("inner_steps", self.inner_steps, ge=1)
        check.number("tolerance", self.tolerance, ge=0)
        check.number("beta", self.beta, gt=0)

    @property
    def personal(self) -> bool:
        return True

    def gradient(self, task: Task, params: Tree, buffers: Tree, batch: Batch, context: Context) -> tuple[Tree, Tensor]:
        theta, loss = self.inner(task, params, buffers, batch)
        return {n: self.lambda_ * (w - theta[n]) for n, w in params.items()}, loss

    def inner(self, task: Task, w: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        """(theta, loss at w)."""
        theta, first = w, torch.zeros(())
        for step in range(self.inner_steps):
            # Batch norm's statistics follow the first pass alone: the others see the same batch again.
            seen = buffers if step == 0 else {n: b.clone() for n, b in buffers.items()}
            g, loss = task.gradient(theta, seen, batch)
            first = loss if step == 0 else first
            g = {n: t + self.lambda_ * (theta[n] - w[n]) for n, t in g.items()}
            new = {n: t - self.inner_lr * g[n] for n, t in theta.items()}
            if self.tolerance:  # said by the device to itself: from here on nothing moves any more
                far = torch.stack([t.square().sum() for t in g.values()]).sum() > self.tolerance**2
                new = {n: torch.where(far, t, theta[n]) for n, t in new.items()}
            theta = new
        return theta, first

    def finish(self, model: Model, steps: int, context: Context) -> Finished:
        mixed = {n: w + self.beta * (model.params[n] - w) for n, w in context.anchor.items()}
        return Finished(Model(mixed, model.buffers))

    def adaptation(self, optimizer: ClientOptimizer, lr: float) -> Adaptation:
        """theta at the present w: the inner problem on all of the client's data, which is FedProx'."""
        descent = PlainSgd(lr=self.inner_lr, weight_decay=0.0, persist_state=False, momentum=0.0, nesterov=False)
        return Adaptation(FedProx(self.inner_steps, None, self.lambda_), descent, self.inner_lr)
