"""The only loop over rounds."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import check
from fedsim.cohort import Cohort
from fedsim.data import FederatedData
from fedsim.metrics import FINITE
from fedsim.task import Evaluation, Task
from fedsim.types import (
    Aggregator,
    Client,
    ClientOptimizer,
    Direction,
    Engine,
    Model,
    Optimizer,
    Participation,
    Schedule,
    State,
    Work,
)


@dataclass(frozen=True)
class Evaluate:
    """When and on what the model is evaluated."""

    every: int
    train: bool
    batch_size: int

    def __post_init__(self) -> None:
        check.integer("every", self.every, ge=1)
        check.boolean("train", self.train)
        check.integer("batch_size", self.batch_size, ge=1)


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's results."""

    seed: int
    rounds: int
    task: Task
    data: FederatedData
    client: Client
    client_optimizer: ClientOptimizer
    schedule: Schedule
    aggregator: Aggregator
    server_optimizer: Optimizer
    participation: Participation
    engine: Engine
    eval: Evaluate


@dataclass(frozen=True)
class RunState:
    """The whole truth between two rounds: what a checkpoint holds."""

    round: int
    """Rounds completed."""
    model: Model
    aggregator: State
    server: State
    clients: Mapping[int, State]
    norm_integrated: float


Row = dict[str, float]
LayerRows = dict[str, Sequence[float]]
"""One value for each layer, by column of layers.csv."""


def initial_state(exp: Experiment) -> RunState:
    model = exp.task.initial_model()
    return RunState(
        0,
        model,
        exp.aggregator.init(model.params),
        exp.server_optimizer.init(model.params),
        {},
        norm_integrated=0.0,
    )


def run(exp: Experiment, state: RunState, after_round: Callable[[RunState, Row, LayerRows], None]) -> RunState:
    """Play the rounds that are left, handing each one's end to `after_round`. Stops early where a loss diverges."""
    while state.round < exp.rounds:
        state, row, layers = play(exp, state)
        after_round(state, row, layers)
        if diverged(row):
            break
    return state


def diverged(row: Row) -> bool:
    return any(not math.isfinite(row[name]) for name in FINITE if name in row)


def play(exp: Experiment, state: RunState) -> tuple[RunState, Row, LayerRows]:
    """One round: sample, train, aggregate, step, measure."""
    started, round, old = time.perf_counter(), state.round, state.model
    clients = exp.participation(exp.seed, round, exp.data.split.num_clients)
    work = Work(
        task=exp.task,
        data=exp.data,
        client=exp.client,
        optimizer=exp.client_optimizer,
        probe=exp.aggregator.probe,
        model=old,
        lr=exp.schedule(exp.client_optimizer.lr, round),
        seed=exp.seed,
        round=round,
        states=state.clients,
    )
    cohort = exp.engine(work, clients, weights(exp, clients))
    direction = exp.aggregator.direction(cohort, state.aggregator)
    params, server = exp.server_optimizer.step(old.params, direction.tree, state.server, exp.server_optimizer.lr)
    model = Model(params, cohort.buffers)

    row, layer_rows = measure(exp, state, cohort, direction, model)
    size = sum(t.numel() * t.element_size() for t in (*params.values(), *cohort.buffers.values()))
    row["client_lr"] = work.lr
    row["comm/down_bytes"] = size * len(clients)
    row["comm/up_bytes"] = size * len(clients) * exp.aggregator.uploads
    row["time/round_s"] = time.perf_counter() - started
    kept = {**state.clients, **cohort.states} if cohort.states else state.clients
    return RunState(round + 1, model, direction.state, server, kept, row["norm/N_integrated"]), row, layer_rows


def measure(
    exp: Experiment, state: RunState, cohort: Cohort, direction: Direction, model: Model
) -> tuple[Row, LayerRows]:
    """What a round is worth knowing for: norms, the aggregator's own metrics and, where it is due, accuracy."""
    layers, old = exp.task.layers, state.model.params
    moved = layers.norms({n: p - old[n] for n, p in model.params.items()})
    norms = {"N": cohort.N, "E": cohort.E, "N_server": moved}
    values = {"client/loss": cohort.loss} | direction.metrics
    for i, part in enumerate(layers.parts, start=len(layers.names)):
        values |= {f"norm/{name}" + ("" if part == "all" else f"_{part}"): norm[i] for name, norm in norms.items()}
    table = {name: norm[: len(layers.names)] for name, norm in norms.items()} | direction.layers
    evaluations: dict[str, Evaluation] = {}
    if (state.round + 1) % exp.eval.every == 0 or state.round + 1 == exp.rounds:
        averaged = Model({n: p - cohort.delta[n] for n, p in old.items()}, cohort.buffers)
        evaluations = evaluate(exp, model, averaged)

    row, layer_rows = fetch(values, evaluations, table)
    row["round"] = state.round + 1
    if row["norm/E"] > 0:
        row["norm/N_over_E"] = row["norm/N"] / row["norm/E"]
    row["norm/N_integrated"] = state.norm_integrated + row["norm/N_server"]
    return row, layer_rows


def weights(exp: Experiment, clients: Sequence[int]) -> list[float]:
    """w_k = |D_k| / sum |D_k| over the sampled clients, or 1/m where the server does not know the sizes."""
    if exp.aggregator.weighting == "uniform":
        return [1 / len(clients)] * len(clients)
    sizes = exp.data.split.sizes[list(clients)]
    shares: list[float] = (sizes / sizes.sum()).tolist()
    return shares


def evaluate(exp: Experiment, sent: Model, averaged: Model) -> dict[str, Evaluation]:
    """The model the aggregator says is judged, and the one that is sent out beside it where that is another."""
    data, size = exp.data.dataset, exp.eval.batch_size
    judged = averaged if exp.aggregator.evaluate == "averaged" else sent
    result = {"test": exp.task.evaluate(judged, data, data.test_x, data.test_y, size)}
    if judged is not sent:
        result["sent"] = exp.task.evaluate(sent, data, data.test_x, data.test_y, size)
    if exp.eval.train:
        index = exp.data.training_set
        result["train"] = exp.task.evaluate(judged, data, data.train_x, data.train_y, size, index)
    return result


def fetch(
    values: Mapping[str, Tensor], evaluations: Mapping[str, Evaluation], table: Mapping[str, Tensor]
) -> tuple[Row, LayerRows]:
    """Everything measured in a round, as numbers: one transfer from the device."""
    tensors = dict(values)
    for name, e in evaluations.items():
        tensors[f"{name}/loss"] = e.loss_sum / e.count
        if e.correct is not None:
            tensors[f"{name}/accuracy"] = e.correct
    flat = torch.cat([t.reshape(-1).to(torch.float32) for t in (*tensors.values(), *table.values())]).tolist()
    row: Row = dict(zip(tensors, flat, strict=False))
    for name, e in evaluations.items():
        if e.correct is not None:
            row[f"{name}/accuracy"] /= e.count
    rest, count = flat[len(tensors) :], len(next(iter(table.values())))
    return row, {name: rest[i * count : (i + 1) * count] for i, name in enumerate(table)}
