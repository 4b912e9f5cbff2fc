"""Per-FedAvg: a model that one gradient step makes each client's own. Fallah et al., NeurIPS 2020, Algorithm 1.

Minimises  f_i(w - alpha grad f_i(w)).  With three independent batches D, D', D'' in every step:

    w' = w - alpha grad f(w; D)
    first_order:   grad f(w'; D')                                                        (the Hessian is dropped)
    hessian_free:  g - alpha [grad f(w + delta g; D'') - grad f(w - delta g; D'')] / (2 delta) ,  g = grad f(w'; D')

D' is the training batch that plain local training would take, so that alpha = 0 is FedAvg.
"""

from dataclasses import dataclass

from torch import Tensor

from fedsim import check
from fedsim.client.sgd import Sgd
from fedsim.client_optimizer.sgd import Sgd as PlainSgd
from fedsim.task import Task
from fedsim.types import Adaptation, Batch, ClientOptimizer, Context, Tree


@dataclass(frozen=True)
class PerFedAvg(Sgd):
    alpha: float
    variant: str
    delta: float
    adaptation_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("alpha", self.alpha, ge=0)
        check.choice("variant", self.variant, ("first_order", "hessian_free"))
        check.number("delta", self.delta, gt=0)
        check.integer("adaptation_steps", self.adaptation_steps, ge=0)

    @property
    def personal(self) -> bool:
        return True

    @property
    def extra_batches(self) -> int:
        return 1 if self.variant == "first_order" else 2

    def gradient(self, task: Task, params: Tree, buffers: Tree, batch: Batch, context: Context) -> tuple[Tree, Tensor]:
        def at(w: Tree, drawn: Batch) -> Tree:
            return task.gradient(w, {n: b.clone() for n, b in buffers.items()}, drawn)[0]

        inner = at(params, next(context.data.extra))
        adapted = {n: w - self.alpha * inner[n] for n, w in params.items()}
        g, loss = task.gradient(adapted, buffers, batch)
        if self.variant == "first_order":
            return g, loss
        again = next(context.data.extra)
        up = at({n: w + self.delta * g[n] for n, w in params.items()}, again)
        down = at({n: w - self.delta * g[n] for n, w in params.items()}, again)
        return {n: t - self.alpha * (up[n] - down[n]) / (2 * self.delta) for n, t in g.items()}, loss

    def adaptation(self, optimizer: ClientOptimizer, lr: float) -> Adaptation:
        """The step(s) of rate alpha that the method trains for."""
        plain = Sgd(max(self.adaptation_steps, 1), self.batch_size)  # an epoch has at least one step
        if not self.alpha:
            return Adaptation(plain, optimizer, lr, steps=0)
        descent = PlainSgd(lr=self.alpha, weight_decay=0.0, persist_state=False, momentum=0.0, nesterov=False)
        return Adaptation(plain, descent, self.alpha, self.adaptation_steps)
