"""The samples of rounds to come, brought together by a process beside the one that trains.

Who takes part in a round, and in which order a client goes through its samples, is known long before it comes
(`rng.py`). For a small model, drawing and gathering them takes as long as half of its arithmetic. What the process
makes lies in shared memory, a few rounds deep; a round that is not there yet is made where it is needed, so that a busy
machine only loses what there was to gain.
"""

import os
import signal
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from fedsim.client.sgd import Sgd
from fedsim.program import Moments, Program
from fedsim.stack import Ready, Stack, cut, probe_moments
from fedsim.trees import leaves, mapped
from fedsim.types import Work

SLOTS, LARGEST = 4, 2**22
"""Rounds that lie ready, and bytes of one at most."""
PAUSE = 0.0005
"""Seconds between two looks whether there is room again."""


@dataclass(frozen=True)
class Slot:
    """One round's samples, and what they are."""

    who: Tensor
    """The round, its steps, those of its sensitivity pass, and its clients in the order of the stack."""
    sizes: Tensor
    moments: Moments
    probe: Moments | None


def worth_it(work: Work, program: Program, clients: int, size: int) -> bool:
    """Only where drawing and gathering are a large part of a round, and all there is to do before it."""
    rule, data = work.client, work.data.dataset
    plain = type(rule).plan is Sgd.plan and not rule.extra_batches and not work.task.drops and not data.augment
    small = program.training.unroll > 1 and data.train_x.device.type == "cpu" and (os.cpu_count() or 1) > 1
    if not (plain and small and clients == size and work.foreseen(work.round + 1)):
        return False
    longest = rule.epochs * (int(work.data.sizes.max()) + (rule.batch_size or 0))
    return size * longest * data.train_x[0].numel() * data.train_x.element_size() <= LARGEST


class Ahead:
    """The parent's side."""

    def __init__(self, work: Work, program: Program, size: int) -> None:
        split, most = work.data.split, [int(work.data.sizes.argmax())] * size  # as long as they come
        longest = made(work, program, size, most)
        probe = probe_moments(work, [int(split.held.argmax())] * size, program, size) if work.probe else None
        who, sizes = torch.zeros(3 + size, dtype=torch.int64), torch.from_numpy(longest.sizes)
        slots = [Slot(*mapped(shared, (who, sizes, longest.moments, probe))) for _ in range(SLOTS)]
        context: Any = torch.multiprocessing.get_context("fork")
        self._slots, self._first = slots, work.round + 1
        # Their locks also see to it that what was written before a number is there when the number is.
        self._made, self._wanted = context.Value("q", 0), context.Value("q", 0)
        arguments = (work, program, size, slots, self._first, self._made, self._wanted)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self._end = weakref.finalize(self, end, self._process)

    def take(self, round: int, clients: Sequence[int]) -> Ready | None:
        """What was made for this round, until the next one is asked for; None, where nothing was."""
        number = round - self._first
        self._wanted.value = number  # nobody needs those before it any more
        if not self._end.alive or self._made.value <= number:
            return None
        slot = self._slots[number % SLOTS]
        found, steps, probed, *members = slot.who.tolist()
        if (found, members) != (round, list(clients)):  # nobody foresaw this
            self._end()
            return None
        return Ready(shortened(slot.moments, steps), slot.sizes.numpy()[:steps], shortened(slot.probe, probed))


def shortened(moments: Any, steps: int) -> Any:
    return mapped(lambda t: t if len(t) == steps else t[:steps], moments)


def shared(t: Tensor) -> Tensor:
    return torch.zeros_like(t).share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def made(work: Work, program: Program, size: int, clients: Sequence[int]) -> Ready:
    """A round's samples as a stack of these clients takes them."""
    stack = Stack(work, clients, program, size)
    block = stack.block([work.client.epochs] * len(clients), ()).padded(program.training.unroll)
    moments = block.moments(work.data.dataset, stack.key, False, slice(None))
    return Ready(moments, block.sizes, probe_moments(work, clients, program, size) if work.probe else None)


def serve(work: Work, program: Program, size: int, slots: Sequence[Slot], first: int, done: Any, wanted: Any) -> None:
    """Round after round, until there are no more or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    parent = os.getppid()
    while os.getppid() == parent:
        oldest = wanted.value
        number = max(done.value, oldest)
        if number - oldest >= SLOTS:
            time.sleep(PAUSE)
            continue
        round = first + number
        clients = work.foreseen(round)
        if clients is None:
            return
        now, slot = replace(work, round=round), slots[number % SLOTS]
        (members,) = cut(now, clients, size)
        ready = made(now, program, size, members)
        steps, probed = len(ready.sizes), len(ready.probe["size"]) if ready.probe else 0
        slot.sizes[:steps] = torch.from_numpy(ready.sizes)
        made_now = leaves((ready.moments, ready.probe))
        for place, t in zip(leaves((slot.moments, slot.probe)), made_now, strict=True):
            place[: len(t)] = t
        slot.who[:] = torch.tensor([round, steps, probed, *members])
        done.value = number + 1


def end(process: Any) -> None:
    process.kill()
    process.join()
