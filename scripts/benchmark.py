"""How fast a round is: fedsim's engines, plain hand-written PyTorch loops and rival simulators on identical work.

    python scripts/benchmark.py [W1 W3 ...] [--repeats 5] [--seconds 4] [--json FILE]        (also: make bench)
    python scripts/benchmark.py --growth FOLDER                                             (time and memory, pictures)
    python scripts/benchmark.py [W1 ...] --profile | --overhead | --elastic          (where a round's time goes instead)

A plain loop trains one client after another on tensors in memory, resets the model in place and uses no DataLoader:
in this process with as many threads as cores, and in as many processes as cores with one thread each. Peers are those
that are installed (`pip install "fedsim-lab[bench]"`), see peers.py. Every variant is a process of its own (a peer a
new one in each repeat), and all take turns on the same rounds; numbers are medians of the repeats in rounds a second,
and ratios to the better plain loop and to the best peer; machines are noisy, ratios less so. What is compiled or
started before the first round is reported apart. Where a dataset's files are not at $FEDSIM_DATA, tensors of its shape
stand in, and the table says so.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

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
from fedsim.cohort import Deferred
from fedsim.data import PAD
from fedsim.folder import RunFolder
from fedsim.model.dropout import Dropout
from fedsim.overrides import CONF
from fedsim.program import Loop
from fedsim.runner import Experiment, RunState, initial_state, play
from fedsim.server import Server
from fedsim.session import Request, Session

COMMON = (
    "aggregator=fedavg partition.sensitivity_fraction=0 schedule=constant client.epochs=1 eval.every=1000000 "
    "rounds=1000000"  # a long run, as engine=auto sees it
)
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


def experiment(overrides: list[str], engine: str, more: Sequence[str] = ()) -> tuple[Experiment, bool]:
    """What fedsim would run, and whether on the real data."""
    register_resolvers([])

    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", [*overrides, f"engine={engine}", *COMMON.split(), *more])
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


CYCLE = 5
"""Rounds repeat after so many: cohorts may differ in size, and everyone is to train the same ones."""


def fedsim_rounds(exp: Experiment) -> Round:
    state: list[RunState] = [initial_state(exp)]
    on = alike(exp)

    def one(number: int) -> None:
        now = state[0] if on else replace(state[0], round=number % CYCLE)
        state[0], _, _ = play(exp, now)

    return one


def alike(exp: Experiment) -> bool:
    """Whether all cohorts have the same work."""
    return len(set(exp.data.sizes.tolist())) == 1


def cohort(exp: Experiment, number: int) -> list[int]:
    """Who takes part in this round."""
    return list(exp.participation(exp.seed, number % CYCLE, exp.steps, {"now": 0.0}).clients)


def with_torch_dropout(net: nn.Module) -> nn.Module:
    """fedsim's own is keyed by round, client and step, which only fedsim would tell it."""
    for parent in net.modules():
        for name, child in parent.named_children():
            if isinstance(child, Dropout):
                setattr(parent, name, nn.Dropout(child.p))
    return net


class Plain:
    """The loop one would write by hand: reset, train, add."""

    def __init__(self, exp: Experiment, threads: int) -> None:
        self.exp, self.threads = exp, threads
        self.module = with_torch_dropout(exp.task.module).train()
        data = exp.data.dataset
        self.x = data.train_x if data.tokens else data.inputs(data.train_x)  # standardised once, kept as floats
        self.y, self.lr, self.batch = data.train_y, exp.client_optimizer.lr, exp.client.batch_size or 1
        self.nothing = PAD if data.sequence else -100
        self.tensors = [*self.module.parameters(), *(b for b in self.module.buffers() if b.is_floating_point())]
        self.sent = [t.detach().clone() for t in self.tensors]

    def cohort(self, number: int) -> list[int]:
        return cohort(self.exp, number)

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
            own = torch.from_numpy(self.exp.data.split.training(client)).to(self.y.device)
            with torch.no_grad():
                for t, sent in zip(self.tensors, self.sent, strict=True):
                    t.copy_(sent)
            order = own[torch.randperm(len(own), device=own.device)]
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

    def shares(self, clients: list[int]) -> list[list[int]]:
        """Of the processes: the longest first, to whoever has least."""
        steps, shares = self.exp.steps, [list[int]() for _ in self.ends]
        for client in sorted(clients, key=lambda k: -steps[k]):
            min(shares, key=lambda own: sum(steps[k] for k in own)).append(client)
        return shares

    def __call__(self, number: int) -> None:
        clients = self.cohort(number)
        samples = sum(len(self.exp.data.split.training(k)) for k in clients)
        for own, end in zip(self.shares(clients), self.ends, strict=True):
            end.send((own, samples))
        for end in self.ends:
            end.recv()
        for i, sent in enumerate(self.sent):
            sent.copy_(torch.stack([total[i] for total in self.totals]).sum(0))


def stand_in(name: str) -> Any:
    """A loader for tensors of a dataset's shape."""
    from fedsim.dataset import own

    return own.custom("benchmark.made", {"name": name}, 0.1, False, 0)


CORES = os.cpu_count() or 1
ON_CPU = build.device("auto").type == "cpu"
PLAIN: dict[str, tuple[type[Plain], int]] = {f"plain, {CORES} threads": (Plain, CORES)}
if ON_CPU:  # a GPU's context survives no fork
    PLAIN[f"plain, {CORES} processes"] = PlainProcesses, CORES
ENGINES = ("auto", "sequential", "vmap", "process")
PEERS = ("pfl", "flower", "fluke")
PEER_ROUNDS = {"W1": 40, "W2": 1, "W3": 1, "W4": CYCLE, "W5": 1, "W6": CYCLE}
"""In a repeat."""


class Child:
    """A variant in a process of its own, that plays when it is told to."""

    def __init__(self, workload: str, variant: str) -> None:
        command = [sys.executable, __file__, workload, "--serve", variant]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()
        self.rates: list[float] = []

    def play(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.about |= answer
        self.rates.append(answer["rounds"] / answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a variant ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self.process.communicate()


def serve(workload: str, variant: str) -> None:
    """A child's life: build and warm up, then play for as many seconds as each line of the input says."""
    overrides = WORKLOADS[workload][1].split()
    exp, real = experiment(overrides, "sequential" if variant in PLAIN else variant.removeprefix("fedsim "))
    begun = time.perf_counter()
    if variant in PLAIN:
        kind, number = PLAIN[variant]
        one: Round = kind(exp, number)
    else:
        one = fedsim_rounds(exp)
    one(0)
    warm_up = time.perf_counter() - begun
    one(1)
    print(json.dumps({"real_data": real, "first_round_s": warm_up, "engine": exp.engine_choice}), flush=True)
    whole = 1 if alike(exp) else CYCLE
    for line in sys.stdin:
        begun, played = time.perf_counter(), 0
        while played % whole or played == 0 or time.perf_counter() - begun < float(line):
            one(played)
            played += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif not ON_CPU:
            torch.mps.synchronize()
        seconds = time.perf_counter() - begun
        memory = {"peak_mb": peak_mb(os.getpid())}
        if torch.cuda.is_available():
            memory["gpu_peak_mb"] = torch.cuda.max_memory_allocated() // 2**20
        print(json.dumps({"rounds": played, "seconds": seconds, **memory}), flush=True)


def peak_mb(root: int) -> int:
    """The peaks of a process and of all that descend from it, added up; pages that they share count in each."""
    parent, peak = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        except OSError:  # it has just ended
            continue
        pid = int(lines["Pid"])
        parent[pid], peak[pid] = int(lines["PPid"]), int(lines.get("VmHWM", "0 kB").split()[0])

    def descends(pid: int) -> bool:
        return pid == root or (pid in parent and descends(parent[pid]))

    if not peak:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return sum(kb for pid, kb in peak.items() if descends(pid)) // 1024


def peer(name: str, workload: str) -> dict[str, Any]:
    """What peers.py measures of one."""
    rounds = PEER_ROUNDS[workload]
    command = [sys.executable, str(Path(__file__).parent / "peers.py"), name, workload, "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        said = done.stderr.strip().splitlines()[-1:] or [""]
        return {"missing": f"ended with {done.returncode}: {said[0]}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def measure(
    workload: str, repeats: int, seconds: float, engines: Sequence[str], peers: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Every variant's numbers: all take turns."""
    children = {v: Child(workload, v) for v in (*(f"fedsim {e}" for e in engines), *PLAIN)}
    found: dict[str, dict[str, Any]] = {name: {} for name in peers}
    rates: dict[str, list[float]] = {name: [] for name in peers} | {name: c.rates for name, c in children.items()}
    for _ in range(repeats):
        for child in children.values():
            child.play(seconds)
        for name in peers:
            if "missing" not in found[name]:
                found[name] = peer(name, workload)
                times = found[name].pop("round_s", [])
                rates[name] += [len(times) / sum(times)] if times else []
    for name, child in children.items():
        child.end()
        found[name] = child.about
    for name, about in found.items():
        if "missing" not in about:
            about |= {"rounds_per_s": statistics.median(rates[name]), "rates": rates[name]}
    return found


def gemm_rate() -> float:
    """GFLOP/s of one core on a large product."""
    torch.set_num_threads(1)
    a, times = torch.randn(1024, 1024), []
    for _ in range(10):
        begun = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begun)
    return 2 * 1024**3 / statistics.median(times) / 1e9


KINDS = {
    "convolution": ("conv", "winograd"),
    "recurrent layer": ("lstm", "mkldnn_rnn"),
    "matrix product": ("mm", "addmm", "bmm", "baddbmm", "linear"),
    "fused elementwise": ("cpp_fused",),
}


def recurrent(x: Any, of_inputs: Any, of_hidden: Any, *rest: Any, **named: Any) -> int:
    """Operations of torch's recurrent kernel, which its counter does not know, from sizes: [T, B, ...], two weights."""
    return int(2 * x[0] * x[1] * (of_inputs[0] * of_inputs[1] + of_hidden[0] * of_hidden[1]))


def in_one_process(workload: str) -> Experiment:
    """What engine=auto would run, or one of its workers."""
    overrides = WORKLOADS[workload][1].split()
    exp, _ = experiment([*overrides, "engine.workers=1"], "auto")
    if exp.engine_choice["name"] == "process":
        compiled = str(exp.engine_choice["compile"]).lower()
        exp, _ = experiment([*overrides, f"engine.compile={compiled}"], "sequential")
    return exp


def profile(workload: str) -> dict[str, Any]:
    """Where a round's time goes, in one process, and how far the arithmetic is from the GEMM rate."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record
    from torch.utils.flop_counter import FlopCounterMode

    torch._inductor.config.cpp.enable_kernel_profile = True
    exp = in_one_process(workload)
    plain, _ = experiment(WORKLOADS[workload][1].split(), "sequential")
    rnn, rnn_backward = torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten.mkldnn_rnn_layer_backward
    known = {rnn: recurrent, rnn_backward: lambda *sizes, **named: 2 * recurrent(*sizes)}
    counter = FlopCounterMode(display=False, custom_mapping=known)
    with counter:
        play(plain, replace(initial_state(plain), round=2))  # the one that is timed below
    state = initial_state(exp)
    for _ in range(2):  # what is compiled for it is compiled
        play(exp, replace(state, round=2))
    state = replace(state, round=2)
    count = 200 if workload == "W1" else 1  # rounds of a millisecond, of which one says little
    begun = time.perf_counter()
    for _ in range(count):
        state, _, _ = play(exp, state)
    seconds = (time.perf_counter() - begun) / count
    with record(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(count):
            state, _, _ = play(exp, state)
    shares = dict.fromkeys((*KINDS, "other operations"), 0.0)
    for event in trace.key_averages():
        name = event.key.removeprefix("aten::")
        kind = next((k for k, words in KINDS.items() if any(w in name.split("_") or w in name for w in words)), None)
        if kind is None and not event.key.startswith(("aten::", "autograd::")):
            continue  # Python's own, which is what is left at the end
        shares[kind or "other operations"] += event.self_cpu_time_total / 1e6 / count
    busy = sum(shares.values())
    total = max(seconds, busy)
    flops = counter.get_total_flops()
    return {
        "round_s": seconds,
        "shares": {k: v / total for k, v in shares.items()} | {"Python and the rest": 1 - busy / total},
        "gflop": flops / 1e9,
        "gflop_per_s": flops / seconds / 1e9,
        "gemm_gflop_per_s": gemm_rate(),
    }


ROUNDS = {"W1": 3000, "W2": 9, "W3": 60, "W4": 15, "W5": 6, "W6": 15}
"""That overheads are means over."""


def overhead(workload: str) -> dict[str, float]:
    """What a round takes beside the clients' arithmetic, in one process, as a run plays it: who trains, on what,
    aggregation, metrics, CSV files. Arithmetic is the time inside the steps, but for drawing and gathering samples; of
    a round that is one program, the time inside that."""
    rounds = ROUNDS[workload]
    exp = replace(in_one_process(workload), rounds=rounds)
    inside, ends = [0.0], list[tuple[float, float]]()

    def drawn(pieces: Iterable[Any]) -> Iterator[Any]:
        begun = time.perf_counter()
        for piece in pieces:
            inside[0] -= time.perf_counter() - begun
            yield piece
            begun = time.perf_counter()
        inside[0] -= time.perf_counter() - begun

    def timed(function: Callable[..., Any], *given: Any, **more: Any) -> Any:
        begun = time.perf_counter()
        result = function(*given, **more)
        inside[0] += time.perf_counter() - begun
        return result

    step, learn = Loop.__call__, Server.__call__

    def stepped(loop: Loop, carry: Any, constant: Any, pieces: Iterable[Any], *more: Any, **named: Any) -> Any:
        return timed(step, loop, carry, constant, drawn(pieces), *more, **named)

    def learned(server: Server, *given: Any) -> Any:
        whole = isinstance(given[-1], Deferred) and "steps" in given[-1].given  # it trains
        return timed(learn, server, *given) if whole else learn(server, *given)

    with (
        TemporaryDirectory() as folder,
        RunFolder(Path(folder)) as run_folder,
        patch.object(Loop, "__call__", stepped),
        patch.object(Server, "__call__", learned),
    ):
        choices, config = {"partition": "iid"}, {"checkpoint": {"every": 10**9}}
        session = Session(Request(Path(folder), "", config, choices, [], build.device("auto")), run_folder, exp, [])
        log = session.csv.log

        def logged(row: Any, layers: Any) -> None:
            log(row, layers)
            ends.append((time.perf_counter(), inside[0]))

        with patch.object(session.csv, "log", logged):
            session.play()
    (begun, before), (ended, after) = ends[rounds // 3], ends[-2]  # the picture of the partition is done by then
    count = len(ends) - 2 - rounds // 3
    whole, arithmetic = (ended - begun) / count, (after - before) / count
    return {"round_ms": 1e3 * whole, "overhead_ms": 1e3 * (whole - arithmetic), "share": 1 - arithmetic / whole}


FIRST = 10
"""Rounds that do not count: what is compiled, and what another process has made ready by then."""
GROWTH = "dataset=synthetic model=logistic partition=iid client.batch_size=5"


def grown(clients: int, total: int, engine: str) -> dict[str, float]:
    """Seconds a round, and what the rounds need beyond the data, in a process of its own: logistic regression, ten
    samples a client."""
    command = [sys.executable, __file__, "--grown", str(clients), str(total), engine]
    answer: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return answer


def memory_mb(root: int) -> int:
    """What a process and its children have now, a page that n of them share counted as a n-th in each; and of this one
    also what it has had beyond that."""
    kb = 0
    for child in [root, *map(int, Path(f"/proc/{root}/task/{root}/children").read_text().split())]:
        kb += fields(f"/proc/{child}/smaps_rollup")["Pss"]
    own = fields(f"/proc/{root}/status")
    return (kb + own["VmHWM"] - own["VmRSS"]) // 1024


def fields(path: str) -> dict[str, int]:
    """Lines of the form `Name: 12 kB`."""
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}


def play_grown(clients: int, total: int, engine: str) -> None:
    keys = f"{GROWTH} dataset.train_samples={10 * total} partition.num_clients={total}"
    exp, _ = experiment([*keys.split(), f"participation.clients_per_round={clients}"], engine)
    state, times = initial_state(exp), []
    Path("/proc/self/clear_refs").write_text("5")  # building had peaks of its own
    before = memory_mb(os.getpid())
    for _ in range(FIRST + max(10, min(200, 2000 // clients))):
        begun = time.perf_counter()
        state, _, _ = play(exp, state)
        times.append(time.perf_counter() - begun)
    print(json.dumps({"round_s": statistics.median(times[FIRST:]), "added_mb": memory_mb(os.getpid()) - before}))


def growth(folder: Path) -> None:
    """Two pictures and their numbers: against clients a round, and against all clients."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    sweeps: dict[str, list[tuple[int, int]]] = {
        "clients a round": [(n, 2000) for n in (10, 20, 50, 100, 200, 500, 1000, 2000)],
        "clients in all": [(10, 10**n) for n in (3, 4, 5, 6)],
    }
    table: dict[str, Any] = {}
    for title, points in sweeps.items():
        figure, (times, memory) = plt.subplots(1, 2, figsize=(9, 3.4))
        for engine in ENGINES:
            rows = [grown(clients, total, engine) for clients, total in points]
            x = [clients if title == "clients a round" else total for clients, total in points]
            table[f"{title}, {engine}"] = dict(zip(map(str, x), rows, strict=True))
            times.loglog(x, [1e3 * row["round_s"] for row in rows], "o-", label=engine)
            memory.semilogx(x, [row["added_mb"] for row in rows], "o-", label=engine)
        for axes, label in ((times, "ms a round"), (memory, "peak above what the data take, MB")):
            axes.set_xlabel(title)
            axes.set_ylabel(label)
            axes.legend(frameon=False)
        memory.set_ylim(0, max(10.0, memory.get_ylim()[1]))
        figure.tight_layout()
        figure.savefig(folder / f"{title.replace(' ', '_')}.png", dpi=120)
    (folder / "growth.json").write_text(json.dumps(table, indent=2) + "\n")


ENOUGH = 0.5
"""Seconds of rounds that a ratio is taken of."""
FRACTION = 0.1
"""Of a client's samples that are B_k: the papers' own, and the default."""


def elastic(workload: str, repeats: int) -> dict[str, float]:
    """What a round of elastic aggregation costs beside one of the naive: that sets B_k aside too, as the paper compares
    them, or trains on all samples. Rounds take turns."""
    variants = {"elastic": ("elastic", FRACTION), "naive": ("fedavg", FRACTION), "naive on all": ("fedavg", 0)}
    rounds = {}
    for name, (aggregator, fraction) in variants.items():
        keys = [f"aggregator={aggregator}", f"partition.sensitivity_fraction={fraction}"]
        exp, _ = experiment(WORKLOADS[workload][1].split(), "auto", keys)
        rounds[name] = fedsim_rounds(exp)
        for number in range(2):
            rounds[name](number)
        if name == "elastic":
            measured = float(exp.data.split.held.sum() / exp.data.split.sizes.sum())
    ratios: dict[str, list[float]] = {"naive": [], "naive on all": []}
    for repeat in range(repeats):
        seconds = {}
        for name in sorted(rounds, reverse=repeat % 2 == 0):
            begun, played = time.perf_counter(), 0
            while played % CYCLE or played == 0 or time.perf_counter() - begun < ENOUGH:
                rounds[name](played)
                played += 1
            seconds[name] = (time.perf_counter() - begun) / played
        for name, found in ratios.items():
            found.append(seconds["elastic"] / seconds[name])
    return {
        **{f"to {name}": statistics.median(found) for name, found in ratios.items()},
        "bound": 1 + 1.1 * FRACTION,
        "samples measured on / trained on": measured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="W", help=f"of {', '.join(WORKLOADS)}; all, if none is given")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of each variant in each repeat")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES[:2], help="of fedsim")
    parser.add_argument("--peers", nargs="*", metavar="PEER", default=PEERS, help=f"of {', '.join(PEERS)}")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--growth", type=Path, metavar="FOLDER", help="draw time and memory against clients instead")
    parser.add_argument("--profile", action="store_true", help="say where a round's time goes instead")
    parser.add_argument("--elastic", action="store_true", help="compare elastic's round with the naive one instead")
    parser.add_argument("--overhead", action="store_true", help="say what a round takes beside arithmetic instead")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--grown", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.workloads) - set(WORKLOADS):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(WORKLOADS)}")
    if unknown := set(given.peers) - set(PEERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))}: must be of {', '.join(PEERS)}, or none")
    if given.repeats < 1:
        parser.error(f"--repeats: {given.repeats}: must be at least 1")
    if given.seconds <= 0:
        parser.error(f"--seconds: {given.seconds}: must be more than 0")
    for path in filter(None, (given.json, given.growth and given.growth / "growth.json")):
        try:  # now, not when all is measured
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            parser.error(f"{path}: cannot be written ({error.strerror})")
    if not ON_CPU and (given.profile or given.overhead):
        parser.error("--profile and --overhead look at what a CPU does")
    if given.serve:
        serve(given.workloads[0], given.serve)
    elif given.grown:
        play_grown(int(given.grown[0]), int(given.grown[1]), given.grown[2])
    elif given.growth:
        growth(given.growth)
    else:
        tell(given)


def machine() -> str:
    """What is measured on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(names), platform.processor() or platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"


def tell(given: argparse.Namespace) -> None:
    """The tables, as text and JSON."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, Any] = {
        "date": str(date.today()),
        "machine": machine(),
        "cores": CORES,
        "torch": torch.__version__,
    }
    for name in given.workloads or WORKLOADS:
        title, _ = WORKLOADS[name]
        if given.profile or given.elastic or given.overhead:
            alone = profile(name) if given.profile else overhead(name) if given.overhead else None
            found = alone or elastic(name, given.repeats)
            results[name] = {"title": title, **found}
            console.print(name, results[name])
        else:
            found = measure(name, given.repeats, given.seconds, given.engines, given.peers)
            results[name] = {"title": title, "variants": found}
            console.print(as_table(f"{name}: {title}", found))
        if given.json:
            given.json.write_text(json.dumps(results, indent=2) + "\n")


def as_table(title: str, found: dict[str, dict[str, Any]]) -> Table:
    made_up = " (made-up data)" if any(about.get("real_data") is False for about in found.values()) else ""
    rates = {v: about["rounds_per_s"] for v, about in found.items() if "rounds_per_s" in about}
    plain = max(rate for v, rate in rates.items() if v in PLAIN)
    rival = max((rates[v] for v in rates if v not in PLAIN and not v.startswith("fedsim")), default=None)
    table = Table("variant", "rounds/s", "to plain", "to peer", "first round s", "peak MB", title=title + made_up)
    for variant, about in found.items():
        if variant not in rates:
            table.add_row(f"{variant}: {about['missing']}", *[""] * 5)
            continue
        rate, how = rates[variant], about.get("engine")
        label = (
            f"{variant} ({how['name']}{', compiled' if how['compile'] else ''})"
            if how and "fedsim" in variant
            else variant
        )
        to_peer = f"{rate / rival:.2f}" if rival else ""
        first = f"{about['first_round_s']:.1f}" if "first_round_s" in about else ""
        table.add_row(label, f"{rate:.3g}", f"{rate / plain:.2f}", to_peer, first, str(about["peak_mb"]))
    return table


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
