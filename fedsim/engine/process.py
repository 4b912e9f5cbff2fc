"""Worker processes, each with threads of its own: for models whose arithmetic is the work (convolutions on a CPU).

Workers are started once, with the data they can all see (a fork shares the parent's pages). A round's model goes out as
one tensor in shared memory, a client's result comes back as one; nothing else but a few numbers is sent. Clients are
handed out in order, each to the worker that is free, and added up in order: the sums have the sequential engine's bits.
"""

import os
import signal
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from fedsim import check
from fedsim.cohort import Cohort, CohortSum
from fedsim.local import LocalResult, train
from fedsim.types import Model, Work

ALIGNMENT = 16
STATIC = ("task", "data", "client", "optimizer", "probe", "privacy")
"""What of a round's work never changes: known to the workers from the start."""


class WorkerDied(check.InputError):
    """A worker is gone without a word."""


@dataclass(frozen=True)
class Process:
    workers: int | None
    threads: int
    _pools: list["Pool"] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.workers is not None:
            check.integer("workers", self.workers, ge=1, le=1024)
        check.integer("threads", self.threads, ge=1, le=1024)

    def __call__(self, work: Work, clients: Sequence[int], weights: Sequence[float]) -> Cohort:
        torch.set_num_threads(self.threads)  # before the workers are made, which inherit what threads have begun
        if not self._pools:
            self._pools.append(Pool(self.workers or os.cpu_count() or 1, self.threads, work))
        total = CohortSum(work, len(clients))
        for client, weight, result in zip(clients, weights, self._pools[0].train(work, clients), strict=True):
            total.add(client, weight, result)
        return total.result()


class Pool:
    """The workers, and who is busy with what."""

    def __init__(self, workers: int, threads: int, work: Work) -> None:
        on_cuda = work.data.dataset.train_x.is_cuda  # which no fork survives
        context: Any = torch.multiprocessing.get_context("spawn" if on_cuda else "fork")
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(workers):
            near, far = context.Pipe()
            others = [] if on_cuda else [*self._ends, near]  # a fork has them too, and would keep them open
            process = context.Process(target=serve, args=(far, others, threads, work), daemon=True)
            process.start()
            far.close()
            self._ends.append(near)
            self._processes.append(process)
        weakref.finalize(self, stop, self._ends, self._processes)

    def train(self, work: Work, clients: Sequence[int]) -> Iterator[LocalResult]:
        """The clients' results, in order."""
        changing = {f.name: getattr(work, f.name) for f in fields(work) if f.name not in STATIC}
        states = changing.pop("states")
        parcel = pack(changing)
        waiting, done = deque(clients), dict[int, LocalResult]()
        free, busy = list(self._ends), dict[Connection, int]()
        for end in self._ends:
            self._send(end, parcel)
        for client in clients:
            while client not in done:
                while free and waiting:
                    end, busy_with = free.pop(), waiting.popleft()
                    busy[end] = busy_with
                    self._send(end, (busy_with, pack(states[busy_with]) if busy_with in states else None))
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    done[busy.pop(ready)] = self._result(ready)
                    free.append(ready)
            yield done.pop(client)

    def _send(self, end: Connection, message: object) -> None:
        try:
            end.send(message)
        except BrokenPipeError as error:
            raise WorkerDied(self._obituary(end)) from error

    def _result(self, end: Connection) -> LocalResult:
        try:
            answer = end.recv()
        except (EOFError, ConnectionResetError) as error:
            raise WorkerDied(self._obituary(end)) from error
        if isinstance(answer, Exception):
            raise answer
        content = unpack(answer)
        if content["state"] is not None:  # kept beyond the round: out of shared memory, which has few handles
            content["state"] = {k: {n: t.clone() for n, t in tree.items()} for k, tree in content["state"].items()}
        return LocalResult(**content)

    def _obituary(self, end: Connection) -> str:
        process = self._processes[self._ends.index(end)]
        process.join(1)
        return (
            f"engine=process: a worker ended with {process.exitcode} (-9 is often too little memory, which fewer "
            "engine.workers need); the same command goes on from the last checkpoint"
        )


def serve(own: Connection, others: Sequence[Connection], threads: int, work: Work) -> None:
    """A worker's life: a round's work, then clients, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in others:
        end.close()
    torch.set_num_threads(threads)
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        while True:
            message = own.recv()
            if isinstance(message, Parcel):
                work = replace(work, **unpack(message), states={})
                continue
            client, state = message
            try:
                result = train(replace(work, states={} if state is None else {client: unpack(state)}), client)
                own.send(pack({f.name: getattr(result, f.name) for f in fields(result)}))
            except Exception as error:
                own.send(error)


def stop(ends: Sequence[Connection], processes: Sequence[Any]) -> None:
    for end in ends:
        end.close()
    for process in processes:
        process.join(1)
        if process.is_alive():
            process.kill()
            process.join()


@dataclass(frozen=True)
class Parcel:
    """Nested dicts of tensors and plain values, with all tensors in one piece of shared memory."""

    memory: Tensor
    """Bytes."""
    shapes: list[tuple[int, torch.dtype, torch.Size]]
    """Where each tensor begins, and what it is."""
    rest: Any
    """The structure, with a Place for each tensor."""


@dataclass(frozen=True)
class Place:
    number: int


def pack(content: Any) -> Parcel:
    tensors: list[Tensor] = []

    def walk(node: Any) -> Any:
        if isinstance(node, Tensor):
            tensors.append(node)
            return Place(len(tensors) - 1)
        if isinstance(node, Mapping):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, Model):
            return Model(walk(node.params), walk(node.buffers))
        return node

    rest = walk(content)
    shapes, size = [], 0
    for t in tensors:
        shapes.append((size, t.dtype, t.shape))
        size += -(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT
    device = tensors[0].device if tensors else torch.device("cpu")
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        memory.share_memory_()  # type: ignore[no-untyped-call]
    for t, place in zip(tensors, views(memory, shapes), strict=True):
        place.copy_(t)
    return Parcel(memory, shapes, rest)


def unpack(parcel: Parcel) -> Any:
    """The content, its tensors still in the shared memory."""
    tensors = list(views(parcel.memory, parcel.shapes))

    def walk(node: Any) -> Any:
        if isinstance(node, Place):
            return tensors[node.number]
        if isinstance(node, Mapping):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, Model):
            return Model(walk(node.params), walk(node.buffers))
        return node

    return walk(parcel.rest)


def views(memory: Tensor, shapes: Sequence[tuple[int, torch.dtype, torch.Size]]) -> Iterator[Tensor]:
    for start, dtype, shape in shapes:
        size = shape.numel() * dtype.itemsize
        yield memory[start : start + size].view(dtype).view(shape)
