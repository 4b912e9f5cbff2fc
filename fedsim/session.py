"""A run from the first look at its folder to the last picture in it: resume, interruption, divergence, summary."""

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pandas as pd
import torch

from fedsim import check, checkpoint
from fedsim.data import PAD, FederatedData
from fedsim.engine.pool import WorkerDied
from fedsim.folder import RunFolder, accuracies, round_times, time_to_accuracy, versions
from fedsim.logger.base import Logger, RunInfo
from fedsim.logger.console import Console
from fedsim.logger.csv import Csv
from fedsim.partition.statistics import statistics
from fedsim.runner import Experiment, LayerRows, Row, RunState, diverged, initial_state, run
from fedsim.shared_data import earth_movers_distance

Summary = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    overrides: Sequence[str]
    device: torch.device
    place: Mapping[str, str] = field(default_factory=dict)
    """In a paper's table: experiment, row, column, scale."""


def execute(request: Request, build: Callable[[Mapping[str, Any]], Experiment], loggers: Sequence[Logger]) -> Summary:
    """Start, continue or only report a run. Its summary's `status` says how it ended."""
    with RunFolder(request.folder) as folder:
        folder.claim(request.config, request.config["overwrite"])
        before = folder.summary()
        status, rounds = before.get("status"), before.get("rounds", 0)
        if status == "diverged" or (status == "finished" and rounds >= request.config["rounds"]):
            note = f"{status} earlier, after {rounds} rounds (data not looked at again); overwrite=true runs it again"
            return before | {"note": note}
        with torch.random.fork_rng([request.device] if request.device.type == "cuda" else []), terminable() as signals:
            engine = before.get("engine") if (request.folder / "checkpoint.pt").exists() else None
            exp = build(engine if isinstance(engine, dict) else {})
            same_data(request.folder, before, exp.data)
            return Session(request, folder, exp, loggers, signals).play()


def preview(request: Request, build: Callable[[], FederatedData]) -> Summary:
    """Who would hold what, without training. What a run has already written there stays as it is."""
    with RunFolder(request.folder) as folder:
        folder.claim(request.config, overwrite=False)
        before, data = folder.summary(), build()
        same_data(request.folder, before, data)
        numbers = describe_partition(folder, data)
        draw_partition(folder, data, request.choices["partition"])
        summary = {
            "status": "preview",
            "rounds": 0,
            "name": request.name,
            "seed": data.seed,
            "choices": dict(request.choices),
            "overrides": list(request.overrides),
            "partition": numbers,
            "versions": versions(),
        }
        if not before or before.get("status") == "preview":
            folder.write_summary(summary)
        return summary


def same_data(folder: Path, before: Summary, data: FederatedData) -> None:
    """A run goes on with the data it began with, whatever the files at data_dir are by now."""
    old, new = before.get("partition", {}), provenance(data)
    changed = [key for key in ("data", "fingerprint") if key in old and old[key] != new[key]]
    if changed and (folder / "checkpoint.pt").exists():
        raise check.InputError(
            f"{folder} was begun with other data: {', '.join(f'{k} {old[k]} there, {new[k]} here' for k in changed)}; "
            "give the old data_dir, or overwrite=true"
        )


def provenance(data: FederatedData) -> dict[str, str]:
    """Which data, split by which law, with which result: two runs with the same three have the same clients."""
    return {
        "data": data.dataset.fingerprint,
        "key": data.partition_key,
        "fingerprint": data.split.fingerprint(),
    }


def label_mixes(data: FederatedData) -> tuple[np.ndarray, np.ndarray]:
    """Each client's samples of each class, and its earth mover's distance from the population."""
    table, dataset = data.label_counts(), data.dataset
    labels = dataset.train_y.cpu().numpy()
    population = np.bincount(labels[labels != PAD] if dataset.sequence else labels, minlength=dataset.num_classes)
    return table, earth_movers_distance(table, population)


def describe_partition(folder: RunFolder, data: FederatedData) -> dict[str, Any]:
    """Who holds what, as a table and in numbers."""
    table, distances = label_mixes(data)
    clients: dict[str, Any] = {"client": np.arange(data.num_clients)}
    if data.split.codes is not None:
        clients["name"] = np.array(data.dataset.client_names)[data.split.codes]
    clients |= {
        "samples": data.split.sizes,
        "sensitivity_samples": data.split.held,
        "shared_samples": data.portion,
        "classes": (table > 0).sum(1),
        "emd": distances.round(6),
    }
    pd.DataFrame(clients).to_csv(folder / "clients.csv", index=False)
    return provenance(data) | statistics(table, data.sizes, distances)


def draw_partition(folder: RunFolder, data: FederatedData, law: str) -> None:
    from fedsim import plots  # matplotlib takes as long to import as many a round

    title = f"{law}, {data.num_clients:,} clients ({data.split.fingerprint()})"
    path, (table, distances) = folder / "partition.tmp.png", label_mixes(data)
    plots.partition(path, table, data.sizes, distances, title, data.dataset.class_names)
    path.replace(folder / "partition.png")  # whole or not at all: a run that goes on does not draw it again


class Session:
    """One process's part of a run."""

    def __init__(
        self,
        request: Request,
        folder: RunFolder,
        exp: Experiment,
        loggers: Sequence[Logger],
        signals: "Signals | None" = None,
    ) -> None:
        self.request, self.folder, self.exp, self.signals = request, folder, exp, signals or Signals()
        self.id = folder.summary().get("id") or uuid.uuid4().hex[:12]
        self.partition: dict[str, Any] = dict(provenance(exp.data))  # and its numbers, when they are known
        self.state, self.elapsed_before, self.started = initial_state(exp), 0.0, time.perf_counter()
        self.pencil, self.drawing = ThreadPoolExecutor(1), cast("Future[None] | None", None)
        self.checkpoint = folder / "checkpoint.pt"
        if self.checkpoint.exists():
            self.state, self.elapsed_before = checkpoint.load(self.checkpoint, request.device)
        self.csv = Csv(exp.task.layers, exp.eval.every)
        self.loggers: list[Logger] = [
            *loggers,
            self.csv,
            Console(),
        ]  # W&B may refuse: first, before anything is written

    def play(self) -> Summary:
        with ExitStack() as stack:
            for logger in self.loggers:
                stack.callback(logger.close)
                logger.open(self._info())
            return self._play()

    def _play(self) -> Summary:
        """From here on the folder is this run's, and whatever happens it is left complete."""
        status = "failed"
        try:
            self.partition = describe_partition(self.folder, self.exp.data)
            self._write_summary("running")
            run(self.exp, self.state, self._after_round)
            status = "finished" if self._complete() else "diverged"
        except KeyboardInterrupt as interrupt:
            status = "finished" if self._complete() else "interrupted"
            if status == "interrupted":
                with ignoring_signals():
                    self._keep()
                    return self._finish(status) | {"signal": str(interrupt) or "SIGINT"}
        except (WorkerDied, MemoryError, torch.OutOfMemoryError):  # of which the rounds before know nothing
            with ignoring_signals():
                self._keep()
            raise
        finally:
            if status == "failed":
                self._finish(status)
        return self._finish(status)

    def _keep(self) -> None:
        """The last whole round."""
        self.csv.rewind(self.state.round)
        checkpoint.save(self.checkpoint, self.state, self._elapsed())

    def _complete(self) -> bool:
        return self.state.round >= self.exp.rounds

    def _after_round(self, state: RunState, row: Row, layers: LayerRows) -> None:
        with self.signals.waiting():  # else a round that is half told would be lost
            for logger in self.loggers:
                logger.log(row, layers)
            if diverged(row):
                return  # the row is kept; the state stays at the last good round
            if state.round % self.request.config["checkpoint"]["every"] == 0 or state.round == self.exp.rounds:
                self.csv.sync()
                checkpoint.save(self.checkpoint, state, self._elapsed())
            self.state = state
        self._picture_partition()
        if self.signals.came:  # just now; or before, in a place where Python only reports exceptions (a finalizer)
            raise KeyboardInterrupt(self.signals.came[0])

    def _info(self) -> RunInfo:
        request = self.request
        return RunInfo(request.folder, request.name, self.id, request.config, self.exp.rounds, self.state.round)

    def _picture_partition(self) -> None:
        """After the first round, beside the next ones: none of them need wait for it."""
        if self.drawing is None and not (self.folder / "partition.png").exists():
            self.drawing = self.pencil.submit(
                draw_partition, self.folder, self.exp.data, self.request.choices["partition"]
            )

    def _finish(self, status: str) -> Summary:
        from fedsim import plots

        with ignoring_signals():
            self._picture_partition()
            plots.curves(self.folder / "curves.png", self.folder.metrics(), self.request.name)
            summary = self._write_summary(status)
            if self.drawing is not None:
                self.drawing.result()  # raises what it met, when all else is written
            return summary

    def _write_summary(self, status: str) -> Summary:
        exp, request, metrics = self.exp, self.request, self.folder.metrics()
        summary = {
            "status": status,
            **accuracies(metrics),
            "virtual_s_to_accuracy": time_to_accuracy(metrics),
            "rounds": len(metrics),
            "seed": exp.seed,
            "name": request.name,
            "id": self.id,
            "choices": dict(request.choices),
            "overrides": list(request.overrides),
            **({"table": dict(request.place)} if request.place else {}),
            "partition_fingerprint": self.partition["fingerprint"],
            "partition": self.partition,
            "parameters": sum(p.numel() for p in self.state.model.params.values()),
            "comm_bytes": int(metrics[["comm/down_bytes", "comm/up_bytes"]].to_numpy().sum()),
            "device": str(request.device),
            "engine": dict(exp.engine_choice),
            "round_s": round_times(metrics),
            "wall_time_s": round(self._elapsed(), 3),
            "versions": versions(),
        }
        self.folder.write_summary(summary)
        return summary

    def _elapsed(self) -> float:
        return self.elapsed_before + time.perf_counter() - self.started


@dataclass
class Signals:
    """To end."""

    came: list[str] = field(default_factory=list)
    """Their names."""
    _waits: bool = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        self.came.append(signal.Signals(number).name)
        if not self._waits or len(self.came) > 1:  # whoever asks twice means at once
            raise KeyboardInterrupt(self.came[-1])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """One that comes meanwhile is only noted."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False


@contextmanager
def terminable() -> Iterator[Signals]:
    """SIGTERM (a cluster taking its machine back) ends a run as Ctrl-C does: with a complete folder."""
    signals = Signals()
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # in the background: as it was
    with _handling({signal.SIGTERM: signals.interrupt} | ({} if ignored else {signal.SIGINT: signals.interrupt})):
        yield signals


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """While the last files are written a second Ctrl-C must not leave half of them."""
    with _handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
