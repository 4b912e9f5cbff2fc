"""Worker processes, each with threads of its own.

Workers are started once, with the data they can all see (a fork shares the parent's pages). A round's model goes out as
one tensor in shared memory, what comes of a client (or a stack of clients) comes back as one; nothing else but a few
numbers is sent. A free worker is handed the longest of the next jobs, so that none is left with a long one at the end;
the results are given in order.
"""

import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from fedsim import check
from fedsim.types import Work

ALIGNMENT = 16
AHEAD = 8
STATIC = ("task", "data", "client", "optimizer", "probe", "privacy")
"""What of a round's work never changes: known to the workers from the start."""


class WorkerDied(check.InputError):
    """A worker is gone without a word."""


@dataclass(frozen=True)
class Job:
    """Some clients, and their weights in the sums; or some samples to be evaluated."""

    clients: Sequence[int] = ()
    weights: Sequence[float] = ()
    cohort: int = 1
    """How many clients the round has."""
    rows: tuple[str, int, int] | None = None
    """Part of the data, from, to."""


class Pool:
    """The workers, and who is busy with what. `do` is what they do with a round's work and a job."""

    def __init__(self, workers: int, threads: int, work: Work, do: Callable[[Work, Job], Any]) -> None:
        on_cuda = work.data.dataset.train_x.is_cuda  # which no fork survives
        context: Any = torch.multiprocessing.get_context("spawn" if on_cuda else "fork")
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(workers):
            near, far = context.Pipe()
            others = [] if on_cuda else [*self._ends, near]  # a fork has them too, and would keep them open
            process = context.Process(target=serve, args=(far, others, threads, work, do), daemon=True)
            process.start()
            far.close()
            self._ends.append(near)
            self._processes.append(process)
        weakref.finalize(self, stop, self._ends, self._processes)

    def run(self, work: Work, jobs: Sequence[Job]) -> Iterator[Any]:
        """The jobs' results, in order."""
        changing = {f.name: getattr(work, f.name) for f in fields(work) if f.name not in STATIC}
        states = changing.pop("states")
        parcel = pack(changing)
        waiting, done = list(range(len(jobs))), dict[int, Any]()
        sizes = work.data.sizes
        length = [sum(sizes[k] for k in job.clients) for job in jobs]
        free, busy = list(self._ends), dict[Connection, int]()
        for end in self._ends:
            self._send(end, parcel)
        for place in range(len(jobs)):
            while place not in done:
                while free and waiting:
                    # Of the next few only: results wait for those before them, each as large as a model.
                    number = max(waiting[: AHEAD * len(self._ends)], key=lambda n: length[n])
                    waiting.remove(number)
                    end = free.pop()
                    busy[end] = number
                    own = {k: states[k] for k in jobs[number].clients if k in states}
                    self._send(end, (jobs[number], pack(own) if own else None))
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    done[busy.pop(ready)] = self._result(ready)
                    free.append(ready)
            yield done.pop(place)

    def _send(self, end: Connection, message: object) -> None:
        try:
            end.send(message)
        except BrokenPipeError as error:
            raise WorkerDied(self._obituary(end)) from error

    def _result(self, end: Connection) -> Any:
        try:
            answer = end.recv()
        except (EOFError, ConnectionResetError) as error:
            raise WorkerDied(self._obituary(end)) from error
        if isinstance(answer, Exception):
            raise answer
        return unpack(answer)

    def _obituary(self, end: Connection) -> str:
        process = self._processes[self._ends.index(end)]
        process.join(1)
        return (
            f"engine: a worker process ended with {process.exitcode} (-9 is often too little memory, which fewer "
            "engine.workers need); the same command goes on from the last checkpoint"
        )


def serve(
    own: Connection, others: Sequence[Connection], threads: int, work: Work, do: Callable[[Work, Job], Any]
) -> None:
    """A worker's life: a round's work, then jobs, until nobody asks any more."""
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
            job, states = message
            try:
                own.send(pack(do(replace(work, states={} if states is None else unpack(states)), job)))
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
    """Nested dicts, lists and dataclasses of tensors and plain values; all tensors in one piece of shared memory."""

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

    def placed(tensor: Tensor) -> Place:
        tensors.append(tensor)
        return Place(len(tensors) - 1)

    rest = walked(content, lambda node: isinstance(node, Tensor), placed)
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
    return walked(parcel.rest, lambda node: isinstance(node, Place), lambda place: tensors[place.number])


def walked(node: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """A structure of the same form, with the wanted things in it changed."""
    if wanted(node):
        return change(node)
    if isinstance(node, Mapping):
        return {key: walked(value, wanted, change) for key, value in node.items()}
    if isinstance(node, list):
        return [walked(value, wanted, change) for value in node]
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{f.name: walked(getattr(node, f.name), wanted, change) for f in fields(node)})
    return node


def views(memory: Tensor, shapes: Sequence[tuple[int, torch.dtype, torch.Size]]) -> Iterator[Tensor]:
    for start, dtype, shape in shapes:
        size = shape.numel() * dtype.itemsize
        yield memory[start : start + size].view(dtype).view(shape)
