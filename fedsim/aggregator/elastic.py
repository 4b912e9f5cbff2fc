"""Elastic aggregation: damp the updates of sensitive parameters, boost the others.

Chen et al., "Elastic Aggregation for Federated Optimization". On the client, at the broadcast theta and without labels,
for each batch x of B_k (Eq. 5, Algorithm 1):

    g = grad ||F(theta; x)||_2^2 ,   Omega_k <- mu Omega_k + (1 - mu) |g|        Omega_k starts at 0 in every round

(`average`, supplement Eq. 1: Omega_k = mean over the batches of |g|). On the server (Eq. 6, 7):

    Omega = sum_k w_k Omega_k ,   zeta = 1 + tau - Omega / max_layer(Omega) ,   direction = zeta * sum_k w_k delta_k
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fedsim import check
from fedsim.aggregator.fedavg import FedAvg
from fedsim.cohort import Cohort
from fedsim.task import Mode, Task
from fedsim.trees import combined, leaves, length, mapped, rows, spread
from fedsim.types import Direction, Model, Probe, State, Tree


@dataclass(frozen=True)
class Elastic(FedAvg):
    tau: float
    mu: float
    sensitivity: str
    layer: str
    batch_norm: str
    batch_size: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("tau", self.tau, ge=0, le=1)
        check.number("mu", self.mu, ge=0, lt=1)
        check.choice("sensitivity", self.sensitivity, ("momentum", "average"))
        check.choice("layer", self.layer, ("tensor", "module"))
        check.choice("batch_norm", self.batch_norm, ("running", "batch"))
        if self.batch_size is not None:
            check.integer("batch_size", self.batch_size, ge=1)

    @property
    def extra_uploads(self) -> int:
        return 1  # the sensitivities

    @property
    def probe(self) -> Probe:
        end = None if self.sensitivity == "momentum" else self.average
        return Probe(self.measure, end, self.batch_size, self.batch_norm == "batch")

    def measure(self, task: Task, model: Model, omega: Tree, x: Tensor, there: Tensor | None = None) -> Tree:
        """Omega_k after one more batch, one value for each scalar parameter."""
        mode: Mode = "eval" if self.batch_norm == "running" else "batch_statistics"
        g = task.output_norm_gradient(model, x, mode, there)
        if self.sensitivity == "momentum":
            return {n: self.mu * o + (1 - self.mu) * g[n].abs() for n, o in omega.items()}
        return {n: o + g[n].abs() for n, o in omega.items()}

    def average(self, omega: Tree, batches: int | Tensor) -> Tree:
        return {n: o / batches for n, o in omega.items()}

    def direction(self, cohort: Cohort, state: State) -> Direction:
        return self.scaled(cohort.delta, self.zeta(cast(Tree, cohort.measured)))

    def scaled(self, delta: Tree, zeta: Tree) -> Direction:
        """zeta * delta, how much of it is boosted, and how much longer it is than delta."""
        sizes = [z.numel() for z in rows(zeta).values()]
        boosted = torch.stack([b.sum() for b in rows(mapped(lambda z: z > 1, zeta)).values()])
        shares = boosted / boosted.new_tensor(sizes)
        direction = combined(torch._foreach_mul, zeta, delta)
        before, after = length(delta), length(direction)
        return Direction(
            direction,
            metrics={
                "elastic/boosted_fraction": boosted.sum() / sum(sizes),
                "elastic/boosted_by_layer": shares.mean(),
                "elastic/mean_zeta": torch.stack([z.sum() for z in leaves(zeta)]).sum() / sum(sizes),
                "elastic/step": torch.where(before > 0, after / before, torch.ones_like(before)),
            },
            layers={"boosted_fraction": shares},
        )

    def zeta(self, omega: Tree) -> Tree:
        """Eq. 7, layer by layer. A layer with no sensitive parameter at all (maximum 0) has ratio 0: zeta = 1 + tau."""
        omega = mapped(lambda o: o.clamp_min(0), omega)  # it is never negative but by privacy's noise
        largest: dict[str, Tensor] = {}
        for name, o in rows(omega).items():
            layer = self._layer_of(name)
            largest[layer] = torch.maximum(largest[layer], o.max()) if layer in largest else o.max()
        maximum, tiny = spread([largest[self._layer_of(n)] for n in omega], omega), torch.finfo(torch.float32).tiny

        def zeta(omega: list[Tensor], maximum: list[Tensor]) -> list[Tensor]:
            return [1 + self.tau - o / m.clamp_min(tiny) for o, m in zip(omega, maximum, strict=True)]

        return combined(zeta, omega, maximum)

    def _layer_of(self, name: str) -> str:
        return name if self.layer == "tensor" else name.rpartition(".")[0]
