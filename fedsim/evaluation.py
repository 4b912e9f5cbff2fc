"""How good a model is on the test set, or on what the clients train on: batch by batch, so that engines may share them
out. The sums are taken in the order of the batches, whoever did them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import kernels
from fedsim.data import Dataset
from fedsim.data import rows as chosen
from fedsim.engine.allocator import keep_freed_memory
from fedsim.program import Compiled
from fedsim.task import Evaluation, Task
from fedsim.types import Model, Tree, Work

TEST, TRAIN = "test", "train"


def count(work: Work, part: str) -> int:
    """How many samples there are."""
    return len(work.data.dataset.test_y if part == TEST else work.data.training_set)


def rows(work: Work, part: str, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where some of them are: (x, y, positions in these or None)."""
    data = work.data.dataset
    if part == TEST:
        return data.test_x[start:stop], data.test_y[start:stop], None
    return data.train_x, data.train_y, work.data.training_set[start:stop]


@dataclass
class Judge:
    """Evaluates work.model on some rows; by a program that is made for batches of one size, if that is given."""

    size: int | None = None
    _program: Compiled | None = None

    def __call__(self, work: Work, part: str, start: int, stop: int) -> Evaluation:
        x, y, index = rows(work, part, start, stop)
        if self.size != stop - start:
            return work.task.evaluate(work.model, work.data.dataset, x, y, stop - start, index)
        if index is not None:
            x, y = chosen(x, index), chosen(y, index)
        if self._program is None:
            self._program = program(work.task, work.data.dataset)
        with torch.no_grad():
            loss, right = self._program((work.model.params, work.model.buffers), x, y)
        return Evaluation(loss, right.float() if work.task.classification else None, work.task.count(y))


def program(task: Task, dataset: Dataset) -> Compiled:
    """(sum of the losses, how many are right) of a batch of samples as they are stored."""

    def last(t: Tensor) -> Tensor:
        return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t

    def judged(model: tuple[Tree, Tree], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        params, buffers = model
        return task.judged(Model({n: last(p) for n, p in params.items()}, buffers), last(dataset.inputs(x)), y)

    return Compiled(judged, kernels.forms(False, dataset.train_y.device))


def total(parts: Iterable[Evaluation]) -> Evaluation:
    first, *others = parts
    loss, correct, seen = first.loss_sum, first.correct, first.count
    for part in others:
        loss, seen = loss + part.loss_sum, seen + part.count
        correct = None if correct is None or part.correct is None else correct + part.correct
    return Evaluation(loss, correct, seen)


def whole(work: Work, part: str, batch_size: int, judge: Judge) -> Evaluation:
    """All of them, in this process."""
    keep_freed_memory()
    return total(judge(work, part, *cut) for cut in batches(work, part, batch_size))


def batches(work: Work, part: str, batch_size: int) -> list[tuple[int, int]]:
    whole = count(work, part)
    return [(start, min(start + batch_size, whole)) for start in range(0, whole, batch_size)]
