"""Norm-Norm: give the averaged update the clients' average length. Nagura et al., FedNNNN, Eq. 8.

N = || mean_k d_k || ,   E = mean_k || d_k || ,   w <- w + beta (E/N) mean_k d_k          N ~ 0: keep w as it is
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import check
from fedsim.aggregator.fedavg import FedAvg
from fedsim.cohort import Cohort
from fedsim.types import Direction, State

NEGLIGIBLE = 1e-6  # of E: below this N is rounding error of float32, and E/N would blow that error up to full length


def amplification(cohort: Cohort) -> Tensor:
    """E/N, or 0 where the clients' updates cancel (the paper: "we do not normalize ... and return w_t as is")."""
    N, E = cohort.N[-1], cohort.length.clamp_min(0)
    return torch.where(N > NEGLIGIBLE * E, E / N, 0.0)


@dataclass(frozen=True)
class NormNorm(FedAvg):
    beta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.number("beta", self.beta, gt=0)

    @property
    def lengths(self) -> bool:
        return True

    def direction(self, cohort: Cohort, state: State) -> Direction:
        scale = self.beta * amplification(cohort)
        return Direction({n: scale * d for n, d in cohort.delta.items()}, metrics={"norm_norm/rate": scale})
