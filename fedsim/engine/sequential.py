"""One client after another: the reference that every other engine is measured against."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedsim import check
from fedsim.cohort import Cohort, CohortSum
from fedsim.local import train
from fedsim.types import Work


@dataclass(frozen=True)
class Sequential:
    threads: int

    def __post_init__(self) -> None:
        check.integer("threads", self.threads, ge=1, le=1024)

    def __call__(self, work: Work, clients: Sequence[int], weights: Sequence[float]) -> Cohort:
        torch.set_num_threads(self.threads)
        total = CohortSum(work, len(clients))
        for client, weight in zip(clients, weights, strict=True):
            total.add(client, weight, train(work, client))
        return total.result()
