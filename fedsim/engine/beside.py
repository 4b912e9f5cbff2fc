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
    """What has yet to come."""

    def __init__(self, results: Iterator[Evaluation]) -> None:
        self._results, self._found = results, list[Evaluation]()

    def result(self) -> Evaluation:
        if not self._found:
            self._found.append(next(self._results))
        return self._found[0]


@dataclass
class Whole:
    """What the process does: all batches of a part, one after another."""

    judge: Judge
    batch_size: int

    def __call__(self, work: Work, job: Job) -> Evaluation:
        assert job.rows is not None
        return evaluation.whole(work, job.rows[0], self.batch_size, self.judge)


class Beside:
    def __init__(self, work: Work, judge: Judge, batch_size: int) -> None:
        self._pool = Pool(1, 1, work, Whole(judge, batch_size))
        self._asked = deque[Pending]()

    def __call__(self, work: Work, part: str) -> Pending:
        if len(self._asked) == 2:  # as many models as there is memory for
            self._asked.popleft().result()
        job = Job(rows=(part, 0, evaluation.count(work, part)))
        self._asked.append(Pending(self._pool.run(replace(work, states={}), [job])))
        return self._asked[-1]
