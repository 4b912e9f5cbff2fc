"""One client after another: the reference that every other engine is measured against."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fedsim import check, evaluation
from fedsim.cohort import Cohort, CohortSum, Deferred
from fedsim.engine.allocator import keep_freed_memory
from fedsim.engine.beside import Beside, Pending
from fedsim.engine.process import OneClient, jobs_of
from fedsim.evaluation import Judge
from fedsim.task import Evaluation
from fedsim.types import Work


@dataclass(frozen=True)
class Sequential:
    threads: int
    compile: bool | str
    short: Sequence[int] = ()
    """Sizes of a last batch that are compiled for too, once that is settled."""
    evaluation: int | None = None
    """Size of the batches that an evaluation is compiled for, if it is."""
    beside: bool = False
    """Whether a process of its own evaluates."""
    _do: list[OneClient] = field(default_factory=list, init=False, compare=False, repr=False)
    _beside: list[Beside] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check.resources(None, self.threads, self.compile)
        self._do.append(OneClient(self.compile is True, self.short, Judge(self.evaluation)))

    def __call__(self, work: Work, clients: Sequence[int], weights: Sequence[float]) -> Cohort | Deferred:
        keep_freed_memory()
        torch.set_num_threads(self.threads)
        if self.beside and not self._beside:  # in the first round, before there are threads that no fork survives
            self._beside.append(Beside(work, self._do[0].judge))
        total = CohortSum(work, len(clients))
        for place, job in enumerate(jobs_of(work, clients, weights, self.compile is True), start=1):
            total.take(job.clients, job.weights, self._do[0].done(work, job, coming=clients[place:]))
        return total.result()

    def evaluate(self, work: Work, part: str, batch_size: int) -> Evaluation | Pending:
        if self._beside:
            return self._beside[0](work, part, batch_size)
        return evaluation.whole(work, part, batch_size, self._do[0].judge)
