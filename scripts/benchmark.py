"""How fast a round is: fedsim's engines and plain hand-written PyTorch loops on identical work, interleaved in one run.

    python scripts/benchmark.py [W1 W3 ...] [--repeats 5] [--seconds 4] [--json FILE]        (also: make bench)

A plain loop trains one client after another on tensors in memory, resets the model in place and uses no DataLoader:
in this process with as many threads as cores, and in as many processes as cores with one thread each. Numbers are
medians of the repeats in rounds a second, and ratios to the better plain loop; machines are noisy, ratios less so.
Where a dataset's files are not at $FEDSIM_DATA, tensors of its shape stand in, and the table says so.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fedsim import build
from fedsim.check import InputError
from fedsim.cli import register_resolvers
from fedsim.data import PAD
from fedsim.overrides import CONF
from fedsim.runner import Experiment, RunState, initial_state, play

COMMON = "aggregator=fedavg partition.sensitivity_fraction=0 schedule=constant client.epochs=1 eval.every=1000000"
WORKLOADS = {
    "W1": (
        "MNIST, logistic 784-10, 1,000 x 60, 10 a round, batch 10",
        "dataset=mnist model=logistic partition=iid partition.num_clients=1000 participation.clients_per_round=10 "
        "client.batch_size=10 client_optimizer.lr=0.03",
    ),
    "W2": (
        "CIFAR-10 IID, pfl's CNN, 1,000 x 50, 50 a round, batch 10",
        "dataset=cifar10 model=cnn_pfl partition=iid partition.num_clients=1000 participation.clients_per_round=50 "
        "client.batch_size=10 client_optimizer.lr=0.1",
    ),
    "W3": (
        "CIFAR-10, ResNet-20 with batch norm, 1,000 x 50, 10 a round, batch 10",
        "dataset=cifar10 model=resnet20 partition=iid partition.num_clients=1000 participation.clients_per_round=10 "
        "client.batch_size=10 client_optimizer.lr=0.05",
    ),
    "W4": (
        "Fashion-MNIST, MLP 784-128-10, 10 x 6,000, batch 32",
        "dataset=fashion_mnist model=mlp partition=iid partition.num_clients=10 participation.clients_per_round=10 "
        "client.batch_size=32 client_optimizer.lr=0.01 client_optimizer.persist_state=false",
    ),
    "W5": (
        "MNIST, FedNNNN's CNN, 100 x 600, all take part, batch 50",
        "dataset=mnist model=cnn_mnist partition=iid partition.num_clients=100 participation.clients_per_round=100 "
        "client.batch_size=50 client_optimizer.lr=0.05",
    ),
    "W6": (
        "Shakespeare, LSTM, 10 roles a round, batch 10",
        "dataset=shakespeare participation.clients_per_round=10 client.batch_size=10 client_optimizer.lr=0.5",
    ),
}
SHAPES = {
    "mnist": ((1, 28, 28), 10, 60_000),
    "fashion_mnist": ((1, 28, 28), 10, 60_000),
    "cifar10": ((3, 32, 32), 10, 50_000),
    "shakespeare": ((80,), 82, 44_090),
}
Round = Callable[[int], None]
"""Plays the round of this number."""


def made(name: str) -> dict[str, np.ndarray]:
    """Tensors of a dataset's shape: `dataset=custom dataset.load=benchmark.made`."""
    (shape, classes, count), r = SHAPES[name], np.random.default_rng(0)
    if name == "shakespeare":
        x = r.integers(1, classes, (count, *shape), dtype=np.uint8)
        sizes = r.geometric(1 / 38, 1145)
        owner = np.repeat(np.arange(1145), sizes)[:count]
        x = x[: len(owner)]
        y = np.roll(x, -1, 1).astype(np.int64)
        return {"train_x": x, "train_y": y, "test_x": x[:100], "test_y": y[:100], "train_client_id": owner}
    x = r.integers(0, 256, (count, *shape), dtype=np.uint8)
    y = np.arange(count) % classes
    return {"train_x": x, "train_y": y, "test_x": x[:1000], "test_y": y[:1000]}


def experiment(overrides: list[str], engine: str) -> tuple[Experiment, bool]:
    """What fedsim would run, and whether on the real data."""
    register_resolvers([])

    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", [*overrides, f"engine={engine}", *COMMON.split()])
    config = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(config, dict)
    device = build.device("auto")
    try:
        return build.experiment(config, device), True
    except InputError as error:
        if "not found" not in str(error):
            raise
    config["dataset"] = {"_target_": "benchmark.stand_in", "name": overrides[0].removeprefix("dataset=")}
    return build.experiment(config, device), False


def fedsim_rounds(exp: Experiment) -> Round:
    state: list[RunState] = [initial_state(exp)]

    def one(number: int) -> None:
        state[0], _, _ = play(exp, state[0])

    return one


class Plain:
    """The loop one would write by hand: reset, train, add."""

    def __init__(self, exp: Experiment, threads: int) -> None:
        self.exp, self.threads = exp, threads
        self.module = exp.task.module.train()
        data = exp.data.dataset
        self.x = data.train_x if data.tokens else data.inputs(data.train_x)  # standardised once, kept as floats
        self.y, self.lr, self.batch = data.train_y, exp.client_optimizer.lr, exp.client.batch_size or 1
        self.nothing = PAD if data.sequence else -100
        self.tensors = [*self.module.parameters(), *(b for b in self.module.buffers() if b.is_floating_point())]
        self.sent = [t.detach().clone() for t in self.tensors]

    def cohort(self, number: int) -> list[int]:
        return list(self.exp.participation(self.exp.seed, number, self.exp.steps, {"now": 0.0}).clients)

    def __call__(self, number: int) -> None:
        torch.set_num_threads(self.threads)
        clients = self.cohort(number)
        total = [torch.zeros_like(t) for t in self.sent]
        self.train(clients, total, sum(len(self.exp.data.split.training(k)) for k in clients))
        for sent, t in zip(self.sent, total, strict=True):
            sent.copy_(t)

    def train(self, clients: list[int], total: list[Tensor], samples: int) -> None:
        """Add up w_k theta_k of some clients."""
        parameters = list(self.module.parameters())
        for client in clients:
            own = torch.from_numpy(self.exp.data.split.training(client))
            with torch.no_grad():
                for t, sent in zip(self.tensors, self.sent, strict=True):
                    t.copy_(sent)
            order = own[torch.randperm(len(own))]
            for start in range(0, len(own), self.batch):
                index = order[start : start + self.batch]
                x = self.x[index]
                logits = self.module(x.long() if self.exp.data.dataset.tokens else x)
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, -2), self.y[index].flatten(), ignore_index=self.nothing
                )
                grads = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, grads, alpha=-self.lr)
            with torch.no_grad():
                torch._foreach_add_(total, self.tensors, alpha=len(own) / samples)


class PlainProcesses(Plain):
    """The same in several processes of one thread, each with its share of the clients; sums in shared memory."""

    def __init__(self, exp: Experiment, workers: int) -> None:
        super().__init__(exp, 1)
        torch.set_num_threads(1)
        self.sent = [t.share_memory_() for t in self.sent]  # type: ignore[no-untyped-call]
        self.totals = [[torch.zeros_like(t).share_memory_() for t in self.sent] for _ in range(workers)]
        context: Any = mp.get_context("fork")
        self.ends = []
        for place in range(workers):
            near, far = context.Pipe()
            context.Process(target=self.serve, args=(far, place), daemon=True).start()
            far.close()
            self.ends.append(near)

    def serve(self, end: Any, place: int) -> None:
        torch.set_num_threads(1)
        while True:
            try:
                clients, samples = end.recv()
            except EOFError:
                return
            for t in self.totals[place]:
                t.zero_()
            self.train(clients, self.totals[place], samples)
            end.send(True)

    def __call__(self, number: int) -> None:
        clients = self.cohort(number)
        samples = sum(len(self.exp.data.split.training(k)) for k in clients)
        for place, end in enumerate(self.ends):
            end.send((clients[place :: len(self.ends)], samples))
        for end in self.ends:
            end.recv()
        for i, sent in enumerate(self.sent):
            sent.copy_(torch.stack([total[i] for total in self.totals]).sum(0))


def stand_in(name: str) -> Any:
    """A loader for tensors of a dataset's shape."""
    from fedsim.dataset import own

    return own.custom("benchmark.made", {"name": name}, 0.1, False, 0)


def measure(variants: dict[str, Round], repeats: int, seconds: float) -> dict[str, float]:
    """Rounds a second of each: medians over repeats in which all take turns."""
    number = dict.fromkeys(variants, 0)
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):  # the first warms up
        for name, one in variants.items():
            begun, played = time.perf_counter(), 0
            while played == 0 or time.perf_counter() - begun < (seconds if repeat else 0.5):
                one(number[name])
                number[name], played = number[name] + 1, played + 1
            if repeat:
                rates[name].append(played / (time.perf_counter() - begun))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="W", help=f"of {', '.join(WORKLOADS)}; all, if none is given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of each variant in each repeat")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    given = parser.parse_args()
    if unknown := set(given.workloads) - set(WORKLOADS):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(WORKLOADS)}")
    cores = os.cpu_count() or 1
    table = Table(
        "", "variant", "rounds/s", "to the better plain loop", title=f"{cores} cores, torch {torch.__version__}"
    )
    results: dict[str, Any] = {"date": str(date.today()), "machine": platform.processor(), "cores": cores}
    for name in given.workloads or WORKLOADS:
        title, overrides = WORKLOADS[name]
        variants: dict[str, Round] = {}
        for engine in sorted(path.stem for path in (CONF / "engine").glob("*.yaml")):
            exp, real = experiment(overrides.split(), engine)
            variants[f"fedsim {engine}"] = fedsim_rounds(exp)
        plain, _ = experiment(overrides.split(), "sequential")
        variants[f"plain, {cores} threads"] = Plain(plain, cores)
        other, _ = experiment(overrides.split(), "sequential")
        variants[f"plain, {cores} processes"] = PlainProcesses(other, cores)
        rates = measure(variants, given.repeats, given.seconds)
        best = max(rate for variant, rate in rates.items() if variant.startswith("plain"))
        for variant, rate in rates.items():
            table.add_row(name, variant, f"{rate:.3g}", f"{rate / best:.2f}")
        table.add_row(name, title + ("" if real else " (made-up data)"), "", "", end_section=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        results[name] = {"title": title, "real_data": real, "rounds_per_s": rates, "peak_mb_so_far": peak}
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
