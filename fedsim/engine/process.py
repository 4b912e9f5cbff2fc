"""One client after another in each of several worker processes: for models whose arithmetic is the work, such as
convolutions on a CPU. Clients are added up in order, so that the sums have the sequential engine's bits."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from fedsim import check, evaluation
from fedsim.cohort import Cohort, CohortSum, Deferred, Partial, Upload, measurements, upload
from fedsim.data import ClientData
from fedsim.engine.allocator import keep_freed_memory
from fedsim.engine.pool import Job, Pool
from fedsim.evaluation import Judge
from fedsim.local import train
from fedsim.program import Program
from fedsim.task import Evaluation
from fedsim.trees import mapped
from fedsim.types import Work


@dataclass(frozen=True)
class Process:
    workers: int | None
    threads: int
    compile: bool | str
    short: Sequence[int] = ()
    """Sizes of a last batch that are compiled for too, once that is settled."""
    evaluation: int | None = None
    """Size of the batches that an evaluation is compiled for, if it is."""
    _pools: list[Pool] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check.resources(self.workers, self.threads, self.compile)

    def __call__(self, work: Work, clients: Sequence[int], weights: Sequence[float]) -> Cohort | Deferred:
        keep_freed_memory()
        torch.set_num_threads(self.threads)  # before the workers are made, which inherit what threads have begun
        if not self._pools:
            do = OneClient(self.compile is True, self.short, Judge(self.evaluation))
            self._pools.append(Pool(self.workers or os.cpu_count() or 1, self.threads, work, do))
        total = CohortSum(work, len(clients))
        jobs = jobs_of(work, clients, weights, self.compile is True)
        # An aggregator that is `individual` keeps whole uploads until the round's end.
        results = self._pools[0].run(work, jobs, lend=not work.individual)
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Upload):  # what outlives this client's turn
                own = {name: mapped(torch.clone, getattr(result, name)) for name in ("state", "report")}
                result = replace(result, **own)
            total.take(job.clients, job.weights, result)
        return total.result()

    def evaluate(self, work: Work, part: str, batch_size: int) -> Evaluation:
        """Its batches are jobs as clients are: a network's pass over the test set takes longer than many a round."""
        if not self._pools:
            return evaluation.whole(work, part, batch_size, Judge())
        jobs = [Job(rows=(part, *cut)) for cut in evaluation.batches(work, part, batch_size)]
        return evaluation.total(self._pools[0].run(replace(work, states={}), jobs))


TOGETHER = 5
"""Clients that measure for the aggregator one after another: a program that is still in the cache takes a fifth less
time. Whoever does it, so that the sums do not depend on how many workers there are."""


def jobs_of(work: Work, clients: Sequence[int], weights: Sequence[float], compile: bool) -> list[Job]:
    """Everyone's training and, if that is apart, what they measure: in short jobs that come last, when some worker may
    have to wait for the others."""
    each = list(zip(clients, weights, strict=True))
    jobs = [Job([client], [weight]) for client, weight in each]
    if compile and work.measures_together:
        some = [each[start : start + TOGETHER] for start in range(0, len(each), TOGETHER)]
        jobs += [Job([k for k, _ in group], [w for _, w in group], measure=True) for group in some]
    return jobs


@dataclass
class OneClient:
    """What a worker does with a job: one client, what some of them measure, or a batch to be evaluated."""

    compile: bool
    short: Sequence[int]
    judge: Judge
    program: Program | None = None
    begun: tuple[int, dict[int, ClientData]] = field(default_factory=lambda: (-1, {}))
    """A round, and data of its clients that come next."""

    def __call__(self, work: Work, job: Job) -> Upload | Partial | Evaluation:
        return self.done(work, job) if job.rows is None else self.judge(work, *job.rows)

    def done(self, work: Work, job: Job, coming: Sequence[int] = ()) -> Upload | Partial:
        """`coming`: who will be next, where that is known."""
        if self.compile and self.program is None:
            self.program = Program(work, stacked=False, compile=True, short=self.short)
        if job.measure:
            assert self.program is not None
            return measurements(work, job.clients, job.weights, self.program)
        client = job.clients[0]
        if self.begun[0] != work.round or client not in self.begun[1]:
            data = work.data.begun([client, *coming], work.round, work.client.batch_size)
            self.begun = work.round, data
        return upload(work, train(work, client, self.program, self.begun[1].pop(client)), self.program)
