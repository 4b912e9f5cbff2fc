"""How good a model is on the test set, or on what the clients train on: batch by batch, so that engines may share them
out. The sums are taken in the order of the batches, whoever did them."""

from collections.abc import Iterable

from torch import Tensor

from fedsim.task import Evaluation
from fedsim.types import Work

TEST, TRAIN = "test", "train"


def count(work: Work, part: str) -> int:
    """How many samples there are."""
    return len(work.data.dataset.test_y if part == TEST else work.data.training_set)


def rows(work: Work, part: str, start: int, stop: int) -> Evaluation:
    """Of work.model on some of them."""
    data = work.data.dataset
    index: Tensor | None = None
    if part == TEST:
        x, y = data.test_x[start:stop], data.test_y[start:stop]
    else:
        x, y, index = data.train_x, data.train_y, work.data.training_set[start:stop]
    return work.task.evaluate(work.model, data, x, y, stop - start, index)


def total(parts: Iterable[Evaluation]) -> Evaluation:
    first, *others = parts
    loss, correct, seen = first.loss_sum, first.correct, first.count
    for part in others:
        loss, seen = loss + part.loss_sum, seen + part.count
        correct = None if correct is None or part.correct is None else correct + part.correct
    return Evaluation(loss, correct, seen)


def alone(work: Work, part: str, batch_size: int) -> Evaluation:
    """All of them, in this process."""
    return total(rows(work, part, *cut) for cut in batches(work, part, batch_size))


def batches(work: Work, part: str, batch_size: int) -> list[tuple[int, int]]:
    whole = count(work, part)
    return [(start, min(start + batch_size, whole)) for start in range(0, whole, batch_size)]
