"""Worker processes, each with threads of its own.

Workers are started once, with the data they can all see (a fork shares the parent's pages). A round's model goes out
through shared memory, what comes of a client (or a stack of clients) comes back in the same way; nothing else but a few
numbers is sent. A free worker is handed the longest of the next jobs, so that none is left with a long one at the end;
the results are given in order.
"""

import pickle
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing

from fedsim import check, native
from fedsim.engine.parcel import Inbox, Outbox, Parcel
from fedsim.types import Work, nobody_knows

AHEAD = 8
STATIC = ("task", "data", "client", "optimizer", "probe", "privacy", "foreseen")
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
    at_once: int = 0
    """So many of them, where not all."""
    measure: bool = False
    """What the aggregator has the clients measure, and nothing else."""

    def length(self, work: Work) -> int:
        """Samples of its clients."""
        return int((work.data.split.held if self.measure else work.data.sizes)[list(self.clients)].sum())


@dataclass(eq=False)
class Worker:
    """What the parent knows of one."""

    process: Any
    end: Connection
    states: Outbox = field(default_factory=Outbox)
    results: Inbox = field(default_factory=Inbox)


class Pool:
    """The workers, and who is busy with what. `do` is what they do with a round's work and a job."""

    def __init__(self, workers: int, threads: int, work: Work, do: Callable[[Work, Job], Any]) -> None:
        on_cuda = work.data.dataset.train_x.is_cuda  # which no fork survives
        context: Any = torch.multiprocessing.get_context("spawn" if on_cuda else "fork")
        work = replace(work, foreseen=nobody_knows)  # it holds the whole experiment, which no worker needs
        self._workers: list[Worker] = []
        self._busy = torch.zeros((), dtype=torch.int32).share_memory_()  # type: ignore[no-untyped-call]
        self._model = Outbox()  # one for all: everyone is sent every round's
        for _ in range(workers):
            near, far = context.Pipe()
            # A fork has the others' ends too, and would keep them open.
            others = [] if on_cuda else [*(worker.end for worker in self._workers), near]
            process = context.Process(
                target=serve, args=(far, others, threads, self._busy, workers, work, do), daemon=True
            )
            process.start()
            far.close()
            self._workers.append(Worker(process, near))
        weakref.finalize(self, stop, self._workers)

    def run(self, work: Work, jobs: Sequence[Job], lend: bool = False) -> Iterator[Any]:
        """Begin with the jobs; their results, in order. `lend`: one may lie in memory that is used again when the next
        is asked for."""
        changing = {f.name: getattr(work, f.name) for f in fields(work) if f.name not in STATIC}
        states = changing.pop("states")
        waiting, done = list(range(len(jobs))), dict[int, Any]()
        length = [job.length(work) for job in jobs]
        given = {worker.end: (worker, deque[int]()) for worker in self._workers}
        model = self._model.pack(changing)
        for worker in self._workers:
            self._send(worker, model)

        def note() -> None:
            """For those who still have something to do."""
            self._busy.fill_(sum(bool(own) for _, own in given.values()))

        def hand_out() -> None:
            """A job to everyone who has none and, where it will not be waited for, one more that lies ready."""
            for least in (0, 1):
                for worker, own in given.values():
                    if len(own) != least or not waiting:
                        continue
                    # Of the next few only: results wait for those before them, each as large as a model.
                    number = max(waiting[: AHEAD * len(self._workers)], key=lambda n: length[n])
                    left = sum(length[n] for n in (*waiting, *(n for _, have in given.values() for n in have)))
                    if least and length[own[0]] + length[number] > left / len(self._workers):
                        continue  # another worker may be free before this one is
                    waiting.remove(number)
                    own.append(number)
                    note()
                    kept = {k: states[k] for k in jobs[number].clients if k in states}
                    self._send(worker, (jobs[number], worker.states.pack(kept) if kept else None))

        def results() -> Iterator[Any]:
            for place in range(len(jobs)):
                while place not in done:
                    for ready in wait([end for end, (_, own) in given.items() if own]):
                        assert isinstance(ready, Connection)
                        worker, own = given[ready]
                        # A worker has two pieces of memory for its results and at most two jobs: the piece that is lent
                        # is not written to before a job is handed out after it.
                        done[own[0]] = self._result(worker, copy=not lend or own[0] != place)
                        own.popleft()
                        note()
                        if place not in done:
                            hand_out()
                yield done.pop(place)
                hand_out()

        hand_out()
        return results()

    def _send(self, worker: Worker, message: object) -> None:
        try:
            worker.end.send(message)
        except BrokenPipeError as error:
            raise WorkerDied(obituary(worker)) from error

    def _result(self, worker: Worker, copy: bool) -> Any:
        try:
            answer = worker.end.recv()
        except (EOFError, ConnectionResetError) as error:
            raise WorkerDied(obituary(worker)) from error
        if isinstance(answer, Exception):
            raise answer
        return worker.results.unpack(answer, copy)


def obituary(worker: Worker) -> str:
    worker.process.join(1)
    return (
        f"engine: a worker process ended with {worker.process.exitcode} (-9 is often too little memory; fewer "
        "engine.workers, where there are several, need less); the same command goes on from the last checkpoint"
    )


def serve(
    own: Connection,
    others: Sequence[Connection],
    threads: int,
    busy: torch.Tensor,
    workers: int,
    work: Work,
    do: Callable[[Work, Job], Any],
) -> None:
    """A worker's life: a round's work, then jobs, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for end in others:
        end.close()
    torch.set_num_threads(threads)
    native.party.members, native.party.busy = workers, busy
    models, kept, results = Inbox(), Inbox(), Outbox()
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        while True:
            message = own.recv()
            if isinstance(message, Parcel):
                work = replace(work, **models.unpack(message, copy=False), states={})
                continue
            job, states = message
            try:
                mine = {} if states is None else kept.unpack(states, copy=False)
                own.send(results.pack(do(replace(work, states=mine), job)))
            except Exception as error:
                own.send(portable(error))


def portable(error: Exception) -> Exception:
    """As it can be sent, with what its traceback was here."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # anyone's class, whatever its constructor wants
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    error.add_note("In a worker process:\n" + "".join(traceback.format_tb(error.__traceback__)))
    return error


def stop(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.end.close()
    for worker in workers:
        worker.process.join(1)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
