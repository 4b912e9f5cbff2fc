"""Evaluation by a process beside the one that trains: the next round need not wait for the accuracy of the last."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fedsim import evaluation
from fedsim.engine.pool import Job, Pool
from fedsim.evaluation import Judge
from fedsim.task import Evaluation
from fedsim.types import Work


class Pending:
    """An evaluation that goes on. They are answered in the order in which they were asked for, and so must be read."""

    def __init__(self, results: Iterator[Evaluation]) -> None:
        self._results, self._found = results, list[Evaluation]()

    def result(self) -> Evaluation:
        """Which may have to be waited for."""
        if not self._found:
            self._found.append(next(self._results))
        return self._found[0]


@dataclass
class Evaluating:
    """What the process does: all batches of a part, one after another."""

    judge: Judge

    def __call__(self, work: Work, job: Job) -> Evaluation:
        assert job.rows is not None
        return evaluation.whole(work, job.rows[0], job.at_once, self.judge)


class Beside:
    def __init__(self, work: Work, judge: Judge) -> None:
        self._pool = Pool(1, 1, work, Evaluating(judge))
        self._asked = deque[Pending]()

    def __call__(self, work: Work, part: str, batch_size: int) -> Pending:
        if len(self._asked) == 2:  # as many models as there is memory for
            self._asked.popleft().result()
        job = Job(rows=(part, 0, evaluation.count(work, part)), at_once=batch_size)
        only = replace(work, server=work.model, shared={}, states={}, effort={}, sampled=())  # the model
        self._asked.append(Pending(self._pool.run(only, [job])))
        return self._asked[-1]
