"""How fast a round of a rival simulator is, on work identical to fedsim's: `scripts/benchmark.py` starts this, one
process for each measurement.

    python scripts/peers.py {pfl,flower,fluke} {W1..W6} [--rounds N]          (pip install "fedsim-lab[bench]")

A peer is given what fedsim would train, as tensors in memory: the same network, clients, cohorts (those of fedsim's
rounds 1 ... N; 0 warms up), batch size, rate, one epoch of plain SGD in a fresh random order, averages weighted by
samples; no evaluation in the timed rounds. The seconds are those between the ends of rounds, as the peer itself tells
them, so that nothing of its start is counted. Each is configured for a CPU as its documentation has it fastest.

The last line of the output is one JSON object, {"peer", "missing"} where the peer is not installed.
"""

import argparse
import copy
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import import_module, metadata
from typing import Any

import torch
from benchmark import ON_CPU, WORKLOADS, cohort, experiment, peak_mb, with_torch_dropout
from torch import Tensor, nn

from fedsim.data import PAD

WARM_UP = 1
CORES = os.cpu_count() or 1


class Work:
    """A workload, taken out of the experiment that fedsim would run."""

    def __init__(self, workload: str) -> None:
        self.exp, _ = experiment(WORKLOADS[workload][1].split(), "sequential")
        self.net = with_torch_dropout(copy.deepcopy(self.exp.task.module)).train()
        self.lr, self.batch = self.exp.client_optimizer.lr, self.exp.client.batch_size or 1
        self.positions = [self.exp.data.split.training(k) for k in range(self.exp.data.split.num_clients)]
        self.nothing = PAD if self.exp.data.dataset.sequence else -100

    @cached_property
    def samples(self) -> list[tuple[Tensor, Tensor]]:
        """Every client's (x, y), standardised once and kept as floats."""
        data = self.exp.data.dataset
        return [(data.inputs(data.train_x[own]), data.train_y[own]) for own in self.positions]

    def shuffled(self, client: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[client]
        order = torch.randperm(len(y))
        return x[order], y[order]

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=self.nothing)

    def cohort(self, number: int) -> list[int]:
        """Who takes part in this round."""
        return cohort(self.exp, number)

    @property
    def clients_per_round(self) -> int:
        return len(self.cohort(0))

    @property
    def share(self) -> float:
        """Clients a round as a fraction of all, for peers that round its product with their number down."""
        return min(1.0, (self.clients_per_round + 0.5) / len(self.positions))


work = cache(Work)
"""One for each process: Flower's clients come and go."""


class Clock:
    """Told by a peer whenever a round has ended."""

    def __init__(self, rounds: int, root: int) -> None:
        self.rounds, self.root, self.ends, self.peak_mb = rounds, root, list[float](), 0

    def __call__(self) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == WARM_UP + self.rounds:
            self.peak_mb = peak_mb(self.root)

    @property
    def rounds_s(self) -> list[float]:
        """Of each timed round."""
        assert len(self.ends) == WARM_UP + self.rounds, f"{len(self.ends)} rounds were played"
        return [end - begin for begin, end in itertools.pairwise(self.ends[WARM_UP - 1 :])]


def pfl(workload: str, rounds: int, clock: Clock) -> str:
    """Runs in each of torchrun's processes, every one with its share of a cohort; sums are all-reduced."""
    torch.set_num_threads(1)
    model = import_module("pfl.model.pytorch")  # joins the process group
    algorithm, average = import_module("pfl.algorithm.base"), import_module("pfl.algorithm.federated_averaging")
    backend, weighting = import_module("pfl.aggregate.simulate"), import_module("pfl.aggregate.weighting")
    data, tensors = import_module("pfl.data.federated_dataset"), import_module("pfl.data.pytorch")
    hyper, metrics, np = import_module("pfl.hyperparam"), import_module("pfl.metrics"), import_module("numpy")
    base: Any = import_module("pfl.callback.base").TrainingProcessCallback
    task = work(workload)

    class Net(nn.Module):
        """pfl wants loss and metrics to be the network's."""

        def __init__(self) -> None:
            super().__init__()
            self.net = task.net

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return task.loss(self.net(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:  # it does evaluate in round 0, which warms up
            return {"loss": metrics.Weighted(float(self.loss(x, y)) * len(y), len(y))}

    class Bell(base):  # type: ignore[misc]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            clock()
            return False, metrics.Metrics()

    def dataset(client: int) -> Any:
        return tensors.PyTorchTensorDataset(task.shuffled(client), user_id=str(client))

    def forever() -> Iterator[int]:
        for number in itertools.count():
            yield from task.cohort(number)

    sizes = {k: len(own) for k, own in enumerate(task.positions)}
    even = len(set(sizes.values())) == 1 and task.clients_per_round % int(os.environ["WORLD_SIZE"]) == 0
    _ = task.samples
    np.random.seed(0)  # pfl asks for one seed in all processes
    users = data.FederatedDataset(dataset, forever().__next__, None if even else sizes)
    net = Net()
    average.FederatedAveraging().run(
        algorithm.NNAlgorithmParams(
            central_num_iterations=WARM_UP + rounds,
            evaluation_frequency=WARM_UP + rounds,
            train_cohort_size=task.clients_per_round,
            val_cohort_size=None,
        ),
        backend.SimulatedBackend(users, users, [weighting.WeightByDatapoints()]),
        model.PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0)),
        hyper.NNTrainHyperParams(local_num_epochs=1, local_learning_rate=task.lr, local_batch_size=task.batch),
        callbacks=[Bell()],
        send_metrics_to_platform=False,
    )
    return (
        f"torchrun, {os.environ['WORLD_SIZE']} processes of 1 thread, users' tensors in memory, "
        f"{'as many users each' if even else 'users balanced by samples'}; batch-norm statistics are not averaged"
    )


def fluke(workload: str, rounds: int, clock: Clock) -> str:
    """In this process, one client after another: it parallelises over GPUs only."""
    env, config = import_module("fluke").FlukeENV(), import_module("fluke.config")
    algorithms, clients = import_module("fluke.algorithms"), import_module("fluke.client")
    data = import_module("fluke.data")
    observer: Any = import_module("fluke.utils").FederationObserver
    server: Any = import_module("fluke.server").Server
    task = work(workload)
    threads = 1 if workload in ("W1", "W4") else CORES  # several do not pay for small matrices
    torch.set_num_threads(threads)

    class Bell(observer):  # type: ignore[misc]
        def end_round(self, round: int) -> None:
            clock()

    class Server(server):  # type: ignore[misc]
        def get_eligible_clients(self, eligible_perc: float) -> list[Any]:
            return [self.clients[k] for k in task.cohort(len(clock.ends))]

    env.set_eval_cfg(server=False)
    optimizer = config.OptimizerConfigurator({"name": "SGD", "lr": task.lr})
    own = [
        clients.Client(
            index=k,
            train_set=data.FastDataLoader(
                x, y, num_labels=0, batch_size=task.batch, shuffle=True, skip_singleton=False
            ),
            test_set=None,
            optimizer_cfg=optimizer,
            loss_fn=task.loss,
            local_epochs=1,
        )
        for k, (x, y) in enumerate(task.samples)
    ]
    federation = algorithms.CentralizedFL(len(own), None, {}, own, Server(task.net, None, own, weighted=True))
    federation.set_callbacks(Bell())
    federation.run(WARM_UP + rounds, task.share)
    return f"in process, {threads} {'thread' if threads == 1 else 'threads'}, FastDataLoader over tensors in memory"


def flower(workload: str, rounds: int, clock: Clock) -> str:
    """The simulation runtime that `flwr run` starts: Ray actors, as many as cores, to which models are sent."""
    app, run = import_module("flwr.app"), import_module("flwr.simulation").run_simulation
    fedavg: Any = import_module("flwr.serverapp.strategy").FedAvg
    task = work(workload)

    class Strategy(fedavg):  # type: ignore[misc]
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterator[Any]:
            """Flower's sample of nodes; whose data each of them has is fedsim's cohort."""
            sampled = super().configure_train(server_round, arrays, config, grid)
            for message, client in zip(sampled, task.cohort(server_round - 1), strict=True):
                own = app.ConfigRecord({"workload": workload, "client": client})
                message.content = app.RecordDict({"arrays": arrays, "config": own})
                yield message

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            aggregated = super().aggregate_train(server_round, replies)
            clock()
            return aggregated

    strategy = Strategy(
        fraction_train=task.share,
        fraction_evaluate=0.0,
        min_train_nodes=task.clients_per_round,  # it takes the share of nodes before it waits for them
        min_available_nodes=len(task.positions),
    )
    server = import_module("flwr.serverapp").ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        strategy.start(grid, app.ArrayRecord(task.net.state_dict()), WARM_UP + rounds)

    client = import_module("flwr.clientapp").ClientApp()
    client.train()(import_module("peers").flower_client)  # not __main__'s, which actors do not have
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run(server, client, len(task.positions), backend_config={"client_resources": resources})
    return f"simulation runtime with Ray, {CORES} actors of 1 CPU and 1 thread, data and network kept in each actor"


def flower_client(message: Any, context: Any) -> Any:
    """One client's round, in an actor."""
    torch.set_num_threads(1)
    app = import_module("flwr.app")
    task, client = work(message.content["config"]["workload"]), message.content["config"]["client"]
    task.net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(task.net.parameters(), task.lr)
    x, y = task.shuffled(client)
    for start in range(0, len(y), task.batch):
        now = slice(start, start + task.batch)
        optimizer.zero_grad()
        task.loss(task.net(x[now]), y[now]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    count = app.MetricRecord({"num-examples": len(y)})
    content = app.RecordDict({"arrays": app.ArrayRecord(task.net.state_dict()), "metrics": count})
    return app.Message(content, reply_to=message)


PEERS: dict[str, tuple[str, tuple[str, ...], Callable[[str, int, Clock], str]]] = {
    "pfl": ("pfl", ("pfl",), pfl),
    "flower": ("flwr", ("flwr.simulation", "ray"), flower),
    "fluke": ("fluke-fl", ("fluke",), fluke),
}
"""Distribution, modules that must be there, and who plays the rounds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=1, help="to be timed")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds: must be at least 1")
    distribution, modules, play = PEERS[given.peer]
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # nobody is told of this
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        why = f'{" ".join(str(error).split())} (pip install "fedsim-lab[bench]")'
        print(json.dumps({"peer": given.peer, "missing": why}))
        return
    if not ON_CPU:
        print(json.dumps({"peer": given.peer, "missing": "is configured for a CPU only, as yet"}))
        return
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if given.peer == "pfl" and not launched:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CORES}"]
        os.execv(sys.executable, [*launcher, *sys.argv])
    clock = Clock(given.rounds, os.getppid() if launched else os.getpid())
    how = play(given.workload, given.rounds, clock)
    if launched:
        torch.distributed.destroy_process_group()
        if os.environ["RANK"] != "0":
            return
    result = {
        "peer": given.peer,
        "version": metadata.version(distribution),
        "workload": given.workload,
        "rounds": given.rounds,
        "round_s": clock.rounds_s,
        "peak_mb": clock.peak_mb,
        "how": how,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
