"""Many clients as one tensor program: for models whose arithmetic is small beside the calls it takes, and for GPUs.

The cohort is cut into stacks of clients (`stack.py`), and each stack is added to the sums as it is done, so that memory
does not grow with the cohort. Where it is cut does not depend on how many workers there are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fedsim import check, evaluation, stack
from fedsim.cohort import Cohort, CohortSum, Deferred, Partial, Upload
from fedsim.engine.ahead import Ahead, made, worth_it
from fedsim.engine.allocator import keep_freed_memory
from fedsim.engine.beside import Beside, Pending
from fedsim.engine.pool import Job, Pool
from fedsim.evaluation import Judge
from fedsim.program import Program
from fedsim.task import Evaluation
from fedsim.types import Work
from fedsim.whole import Whole, possible

CACHE_MB, GPU_MB = 2, 512
"""Parameters stacked at a time: on a CPU what its cache holds beside gradients and samples."""


@dataclass(frozen=True)
class Vmap:
    memory: float | None
    workers: int | None
    threads: int
    compile: bool | str
    stack: int | None = None
    """Clients in a stack, once that is settled."""
    evaluation: int | None = None
    """Size of the batches that an evaluation is compiled for, if it is."""
    beside: bool = False
    """Whether a process of its own evaluates."""
    _pools: list[Pool] = field(default_factory=list, init=False, compare=False, repr=False)
    _do: list["OneStack"] = field(default_factory=list, init=False, compare=False, repr=False)
    _judge: list[Judge] = field(default_factory=list, init=False, compare=False, repr=False)
    _beside: list[Beside] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.memory is not None:
            check.number("memory", self.memory, gt=0)
        check.resources(self.workers, self.threads, self.compile)
        self._judge.append(Judge(self.evaluation))

    def __call__(self, work: Work, clients: Sequence[int], weights: Sequence[float]) -> Cohort | Deferred:
        keep_freed_memory()
        torch.set_num_threads(self.threads)
        if self.beside and not self._beside:  # in the first round, before there are threads that no fork survives
            self._beside.append(Beside(work, self._judge[0]))
        if not self._do:
            size = self.stack or stack_size(work, self.memory, len(clients))
            self._do.append(OneStack(size, self.compile is True))
        weight = dict(zip(clients, weights, strict=True))
        stacks = stack.cut(work, clients, self._do[0].size)
        jobs = [Job(members, [weight[k] for k in members], len(clients)) for members in stacks]
        if len(jobs) == 1 and (whole := self._do[0].untrained(work, jobs[0])):
            return whole
        total = CohortSum(work, len(clients))
        alone: dict[int, Upload] = {}
        for members, done in zip(stacks, self._done(work, jobs), strict=True):
            if isinstance(done, Partial):
                total.merge(done)
            else:
                alone |= zip(members, done, strict=True)
        for client in sorted(alone):
            total.add(client, weight[client], alone[client])
        return total.result()

    def evaluate(self, work: Work, part: str, batch_size: int) -> Evaluation | Pending:
        if self._beside:
            return self._beside[0](work, part, batch_size)
        return evaluation.whole(work, part, batch_size, self._judge[0])

    def _done(self, work: Work, jobs: Sequence[Job]) -> Iterator[Partial | list[Upload]]:
        workers = self.workers or 1
        if workers == 1:
            yield from (self._do[0](work, job) for job in jobs)
            return
        if not self._pools:
            self._pools.append(Pool(workers, self.threads, work, self._do[0]))
        yield from self._pools[0].run(work, jobs)


def stack_size(work: Work, memory: float | None, clients: int) -> int:
    """As many clients as have their parameters in so many MiB; a round's clients in equal stacks."""
    params = work.model.params.values()
    budget = memory or (CACHE_MB if next(iter(params)).device.type == "cpu" else GPU_MB)
    most = max(int(budget * 2**20 / sum(p.numel() * p.element_size() for p in params)), 1)
    return max(-(-clients // -(-clients // most)), 1) if clients else 1


@dataclass
class OneStack:
    """What is done with a job of several clients: their sums or, for those who must see them so, each one's upload."""

    size: int
    compile: bool
    program: Program | None = None
    sums: stack.Sums | None = None
    ahead: Ahead | None = None
    whole: Whole | None = None

    def __call__(self, work: Work, job: Job) -> Partial | list[Upload]:
        program, sums = self._prepared(work, job)
        done = stack.train(work, job.clients, program, self.size, self._ready(work, job))
        if work.individual or (work.privacy is not None and work.privacy.active):
            return stack.apart(work, done)
        return sums(work, job.weights, job.cohort, done)

    def untrained(self, work: Work, job: Job) -> Deferred | None:
        """A cohort of one stack, where the server's program can begin with it."""
        program, _ = self._prepared(work, job)
        if self.whole is None or len(job.clients) < self.size:
            return None
        return self.whole(work, job.weights, self._ready(work, job) or made(work, program, self.size, job.clients))

    def _prepared(self, work: Work, job: Job) -> tuple[Program, stack.Sums]:
        if self.program is None or self.sums is None:
            self.program = Program(work, stacked=True, compile=self.compile)
            self.sums = stack.Sums(work.task.layers, self.size, self.compile)
            if possible(work, self.program):
                self.whole = Whole(work, self.program, self.sums)
            if worth_it(work, self.program, job.cohort, self.size):
                self.ahead = Ahead(work, self.program, self.size)
        return self.program, self.sums

    def _ready(self, work: Work, job: Job) -> stack.Ready | None:
        return None if self.ahead is None else self.ahead.take(work.round, job.clients)
