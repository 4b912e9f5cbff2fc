"""The samples of rounds to come, brought together by a process beside the one that trains.

Who takes part in a round, and in which order a client goes through its samples, is known long before it comes
(`rng.py`). For a small model, drawing and gathering them takes as long as half of its arithmetic. What the process
makes lies in memory they share, a few rounds deep; a round that is not there yet is made where it is needed, so that a
busy machine only loses what there was to gain.

The two tell each other numbers of rounds through pipes: nobody holds a lock that could die with him, what was written
before a number is there when it is read, and whoever is left alone reads the end of the pipe.
"""

import mmap
import os
import select
import signal
import struct
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
"""Rounds that lie ready, and bytes of samples of one at most."""
NUMBER = struct.Struct("q")


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
    plain = type(rule).plan is Sgd.plan and not (rule.extra_batches or rule.looks_back)
    plain = plain and not (work.task.drops or data.augment)
    small = program.training.unroll > 1 and data.train_x.device.type == "cpu" and (os.cpu_count() or 1) > 1
    free = not torch.multiprocessing.current_process().daemon  # which may have no children
    if not (plain and small and free and clients == size and work.foreseen(work.round + 1)):
        return False
    batch = rule.batch_size or 0
    samples = rule.epochs * (int(work.data.sizes.max()) + batch)
    samples += int(work.data.split.held.max()) + batch if work.probe else 0
    bytes_of_one = sum(t[0].numel() * t.element_size() for t in (data.train_x, data.train_y))
    return size * samples * bytes_of_one <= LARGEST


class Ahead:
    """The parent's side."""

    def __init__(self, work: Work, program: Program, size: int) -> None:
        work = replace(work, states={})  # on which no sample depends
        longest = made(work, program, size, [int(work.data.sizes.argmax())] * size)
        probe = probe_moments(work, [int(work.data.split.held.argmax())] * size, program, size) if work.probe else None
        who, sizes = torch.zeros(3 + size, dtype=torch.int64), torch.from_numpy(longest.sizes)
        self._slots = [Slot(*mapped(shared, (who, sizes, longest.moments, probe))) for _ in range(SLOTS)]
        self._first, self._at, self._made = work.round + 1, -1, -1
        (self._told, told), (asked, self._ask) = os.pipe(), os.pipe()
        os.set_blocking(self._told, False)
        context: Any = torch.multiprocessing.get_context("fork")
        arguments = (work, program, size, self._slots, self._first, asked, told, (self._told, self._ask))
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        os.close(asked)
        os.close(told)
        self._end = weakref.finalize(self, end, self._process, (self._told, self._ask))

    def take(self, round: int, clients: Sequence[int]) -> Ready | None:
        """What was made for this round, until the next one is asked for; None, where nothing was."""
        number, before = round - self._first, self._at
        if number < 0 or not self._end.alive:  # the round it was begun in
            return None
        self._at = number
        if number <= before or not self._tell(number):  # a round again, or nobody there
            self._end()
            return None
        if self._made < number:
            return None
        slot = self._slots[number % SLOTS]
        found, steps, probed, *members = slot.who.tolist()
        if found != round:  # left out: it had been asked for already
            return None
        if members != list(clients):  # nobody foresaw this
            self._end()
            return None
        return Ready(shortened(slot.moments, steps), slot.sizes.numpy()[:steps], shortened(slot.probe, probed))

    def _tell(self, number: int) -> bool:
        """That nobody needs the rounds before it any more; and hear what has been made."""
        try:
            os.write(self._ask, NUMBER.pack(number))
            heard = os.read(self._told, 8 * NUMBER.size * SLOTS)
        except BlockingIOError:  # nothing new
            return True
        except BrokenPipeError:
            return False
        if heard:
            self._made = last(heard)
        return True


def last(heard: bytes) -> int:
    number: int = NUMBER.unpack(heard[-NUMBER.size :])[0]
    return number


def shortened(moments: Moments | None, steps: int) -> Any:
    if moments is None or len(moments["size"]) == steps:
        return moments
    return mapped(lambda t: t[:steps], moments)


def shared(t: Tensor) -> Tensor:
    """Memory without a name, which no limit on /dev/shm concerns."""
    return torch.frombuffer(mmap.mmap(-1, t.nbytes), dtype=t.dtype).view(t.shape)


def made(work: Work, program: Program, size: int, clients: Sequence[int]) -> Ready:
    """A round's samples as a stack of these clients takes them."""
    stack = Stack(work, clients, program, size)
    block = stack.block([work.client.epochs] * len(clients), ()).padded(program.training.unroll)
    moments = block.moments(work.data.dataset, stack.key, False, slice(None))
    return Ready(moments, block.sizes, probe_moments(work, clients, program, size) if work.probe else None)


def serve(
    work: Work,
    program: Program,
    size: int,
    slots: Sequence[Slot],
    first: int,
    asked: int,
    told: int,
    parents: Sequence[int],
) -> None:
    """Round after round, until there are no more or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for pipe in parents:  # its ends, which would keep the pipes open
        os.close(pipe)
    torch.set_num_threads(1)
    number = oldest = 0
    while True:
        while number - oldest >= SLOTS or select.select([asked], [], [], 0)[0]:
            heard = os.read(asked, 8 * NUMBER.size * SLOTS)
            if not heard:
                return
            oldest = last(heard)
            number = max(number, oldest + 1)  # what was not there is being made by the parent
        round = first + number
        clients = work.foreseen(round)
        if clients is None:
            return
        now, slot = replace(work, round=round), slots[number % SLOTS]
        (members,) = cut(now, clients, size)
        ready = made(now, program, size, members)
        steps, probed = len(ready.sizes), len(ready.probe["size"]) if ready.probe else 0
        slot.sizes[:steps] = torch.from_numpy(ready.sizes)
        for place, t in zip(leaves((slot.moments, slot.probe)), leaves((ready.moments, ready.probe)), strict=True):
            place[: len(t)] = t
        slot.who[:] = torch.tensor([round, steps, probed, *members])
        try:
            os.write(told, NUMBER.pack(number))
        except BrokenPipeError:
            return
        number += 1


def end(process: Any, pipes: Sequence[int]) -> None:
    for pipe in pipes:
        os.close(pipe)
    process.kill()
    process.join()
