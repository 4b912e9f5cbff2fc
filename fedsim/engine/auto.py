"""Which engine, in how many processes, compiled or not: one written rule, from what is to be trained and on what, so
that the same command always trains in the same way. The choice is recorded in summary.json, and a run that is continued
keeps it.

    one client a round                             sequential
    on a GPU                                       vmap
    on a CPU, convolutions or recurrent layers     process
    on a CPU, any other model                      vmap where its step is compiled or the model is SMALL,
                                                   else process where a round is long, else sequential

    a round is long                                parameters x samples of a round >= LONG_ROUND
    workers                                        one for each core for process (at most SHARE_A_GPU on a GPU), and for
                                                   vmap on a CPU where a round is long and has more than one stack; else
                                                   this one trains alone
    a step is compiled (compile=auto)              where the run has at least CALLS of them in every process (with
                                                   convolutions or recurrent layers FEWER_CALLS, as each of them gains
                                                   more), a compiler is there, batches have a size, and the model has
                                                   no loop over time that would be unrolled: a stack's would, a single
                                                   client's, but for that of our own LSTM on one thread of an x86; for
                                                   a single client's last batch, which may be short, where its size
                                                   comes as often
    evaluation goes on beside the next round       where this process alone trains, on a CPU with a core to spare, and
                                                   parameters x samples evaluated in the run >= BESIDE
    evaluation is compiled                         where steps are, without loops over time, and every process evaluates
                                                   EVALUATED samples or more in the run

Where vmap is meant but the model cannot be stacked, process takes its place.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.func import vmap

from fedsim import check, native
from fedsim.engine.process import Process
from fedsim.engine.sequential import Sequential
from fedsim.engine.vmap import Vmap, stack_size
from fedsim.model.lstm import Lstm
from fedsim.program import SMALL
from fedsim.types import Engine, Tree, Work

LONG_ROUND = 10**8
CALLS, FEWER_CALLS = 4_000, 1_500
EVALUATED = 100_000
BESIDE = 10**10
SHARE_A_GPU = 4  # each has some hundred MB of a context there


@dataclass(frozen=True)
class Auto:
    """What may be asked of whichever engine it will be."""

    memory: float | None
    workers: int | None
    threads: int
    compile: bool | str

    def __post_init__(self) -> None:
        Vmap(self.memory, self.workers, self.threads, self.compile)  # checks them

    def __call__(self, *_: object) -> Any:
        raise TypeError("an engine that has yet to be settled trains nobody")

    evaluate = __call__


@dataclass(frozen=True)
class Extent:
    """How much there is to do."""

    rounds: int
    clients: int
    """A round."""
    steps: float
    """Of a client in a round, on average."""
    evaluated: float
    """Samples in the whole run."""
    evaluated_at_once: int
    """Samples in a batch of those."""


def settle(engine: Engine, work: Work, extent: Extent, before: Mapping[str, Any]) -> tuple[Engine, dict[str, Any]]:
    """The engine with everything decided, and that decision in words; `before` is the one that a run began with."""
    name = type(engine).__name__.lower()
    if isinstance(engine, Auto):
        name = before.get("name") or chosen(engine, work, extent)
        if name == "vmap":
            engine = Vmap(engine.memory, engine.workers, engine.threads, engine.compile)
        elif name == "process":
            engine = Process(engine.workers, engine.threads, engine.compile)
        else:
            engine = Sequential(engine.threads, engine.compile)
    if isinstance(engine, Vmap):
        if reason := cannot_stack(work):
            raise check.InputError(f"engine=vmap cannot train this model: {reason}; use engine=process")
        size, workers, calls = plan_of_stacks(engine, work, extent)
        compiles = settled_compile(engine.compile, work, calls, before, unrolled=loops(work))
        decided: dict[str, Any] = {"stack": size, "workers": workers, "compile": compiles}
        decided |= other_batches(work, extent, 1, before, short=False) if compiles else {}
        beside = evaluates_beside(work, extent, workers * engine.threads)
        return replace(engine, **decided, beside=beside), {"name": name, **decided}
    assert isinstance(engine, Sequential | Process)
    workers = 1
    if isinstance(engine, Process):
        cores = os.cpu_count() or 1
        workers = engine.workers or (cores if on_cpu(work) else min(cores, SHARE_A_GPU))
        engine = replace(engine, workers=workers)
    else:
        engine = replace(engine, beside=evaluates_beside(work, extent, engine.threads))
    calls = extent.rounds * extent.steps * extent.clients / workers
    unrolled = loops(work) and (engine.threads > 1 or not has_kernel(work))
    compiles = settled_compile(engine.compile, work, calls, before, unrolled)
    sizes = other_batches(work, extent, workers, before, short=True) if compiles else {}
    return replace(engine, compile=compiles, **sizes), {"name": name, "workers": workers, "compile": compiles, **sizes}


def other_batches(work: Work, extent: Extent, workers: int, before: Mapping[str, Any], short: bool) -> dict[str, Any]:
    """Sizes of batches that are compiled for beside the usual one: a client's last, which may be `short`, and those of
    an evaluation."""
    if "compile" in before:
        return {key: before[key] for key in ("short", "evaluation") if key in before}
    often = not loops(work) and extent.evaluated >= EVALUATED * workers
    sizes = {
        "short": short and short_batches(work, extent.rounds * extent.clients / workers),
        "evaluation": often and extent.evaluated_at_once,
    }
    return {key: value for key, value in sizes.items() if value}


def short_batches(work: Work, turns: float) -> list[int]:
    """Sizes of a client's last batch that come often enough in a process to be compiled for: `turns` is how often a
    process trains a client in the whole run."""
    sizes, counts = np.unique(work.data.sizes % (work.client.batch_size or 1), return_counts=True)
    often = turns * work.client.epochs * counts / counts.sum() >= enough(work)
    return [int(size) for size in sizes[often] if size]


def evaluates_beside(work: Work, extent: Extent, processors: int) -> bool:
    """Whether a process of its own evaluates, where training takes one processor: what it finds does not depend on
    it."""
    free = not torch.multiprocessing.current_process().daemon  # which may have no children
    alone = processors == 1 and on_cpu(work) and (os.cpu_count() or 1) > 1
    return free and alone and parameters(work) * extent.evaluated >= BESIDE


def enough(work: Work) -> int:
    """Calls of a program that are worth making it."""
    return FEWER_CALLS if convolves(work) or loops(work) else CALLS


def convolves(work: Work) -> bool:
    return any(isinstance(m, nn.modules.conv._ConvNd) for m in work.task.module.modules())


def loops(work: Work) -> bool:
    """Over time."""
    return any(isinstance(m, nn.RNNBase | Lstm) for m in work.task.module.modules())


def has_kernel(work: Work) -> bool:
    """Whether every loop over time is a call of its own in a single client's program."""
    ours = not any(isinstance(m, nn.RNNBase) for m in work.task.module.modules())
    return ours and work.task.precision != "bf16" and all(map(native.serves, work.model.params.values()))


def chosen(engine: Auto, work: Work, extent: Extent) -> str:
    if extent.clients == 1:
        return "sequential"
    if not on_cpu(work):
        return "process" if cannot_stack(work) else "vmap"
    if convolves(work) or loops(work):
        return "process"
    _, _, calls = plan_of_stacks(engine, work, extent)
    pays = parameters(work) <= SMALL or settled_compile(engine.compile, work, calls, {}, unrolled=False)
    if pays and not cannot_stack(work):
        return "vmap"
    return "process" if long_round(work, extent) else "sequential"


def plan_of_stacks(engine: Auto | Vmap, work: Work, extent: Extent) -> tuple[int, int, float]:
    """(clients in a stack, workers, calls of a program in each worker). A GPU is kept busy by one process; on a CPU
    more of them pay where their round is longer than their messages."""
    size = stack_size(work, engine.memory, extent.clients)
    stacks = -(-extent.clients // size)
    many = on_cpu(work) and long_round(work, extent)
    workers = engine.workers or (min(stacks, os.cpu_count() or 1) if many else 1)
    return size, workers, extent.rounds * extent.steps * stacks / workers


def long_round(work: Work, extent: Extent) -> bool:
    samples = extent.clients * extent.steps * (work.client.batch_size or float(work.data.sizes.mean()))
    return parameters(work) * samples >= LONG_ROUND


def parameters(work: Work) -> int:
    return sum(p.numel() for p in work.model.params.values())


def on_cpu(work: Work) -> bool:
    return next(iter(work.model.params.values())).device.type == "cpu"


def settled_compile(asked: bool | str, work: Work, calls: float, before: Mapping[str, Any], unrolled: bool) -> bool:
    device = next(iter(work.model.params.values())).device
    missing = no_compiler(device)
    if asked is True and missing:
        raise check.BadValue("engine.compile", True, f"needs {missing}; use engine.compile=false")
    if isinstance(asked, bool):
        return asked
    if "compile" in before:
        return bool(before["compile"]) and not missing
    return calls >= enough(work) and not unrolled and not missing and work.client.batch_size is not None


def no_compiler(device: torch.device) -> str:
    """What torch.compile lacks, if anything."""
    if device.type == "cuda":
        return "" if torch.utils._triton.has_triton() else "Triton"
    if device.type == "mps":
        return "a device that it is known to serve (cpu, cuda)"
    own = os.environ.get("CXX")
    return "" if own or any(map(shutil.which, ("g++", "clang++", "c++"))) else "a C++ compiler (g++ or clang++)"


def cannot_stack(work: Work) -> str:
    """Why a model cannot be trained for several clients at once, or nothing. Tried on two samples."""
    task, data = work.task.for_stacks(), work.data.dataset
    index = work.data.on_device(work.data.training(0))[[0, -1]]
    x, y = data.inputs(data.train_x[index]), data.train_y[index]

    def gradient(params: Tree, buffers: Tree, x: Tensor) -> Tree:
        return task.gradient(params, {n: b.clone() for n, b in buffers.items()}, (x, y))[0]

    params, buffers = ({n: torch.stack([t, t]) for n, t in tree.items()} for tree in vars(work.model).values())
    try:
        vmap(gradient)(params, buffers, torch.stack([x, x]))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # anyone's model: whatever it raises is told in one line
        return f"{type(task.module).__name__} under torch.func.vmap: {str(error).strip().splitlines()[0][:200]}"
    return ""
