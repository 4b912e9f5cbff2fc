"""The only loop over rounds."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedsim import check, personal, shared_data
from fedsim.cohort import Cohort, Deferred
from fedsim.data import FederatedData
from fedsim.engine.auto import Extent
from fedsim.engine.beside import Pending
from fedsim.evaluation import TEST, TRAIN
from fedsim.metrics import FINITE, NORMS
from fedsim.participation.asynchronous import Asynchronous
from fedsim.privacy.channel import Privacy
from fedsim.server import Learned, Said, Server
from fedsim.task import Evaluation, Task
from fedsim.trees import difference, leaves
from fedsim.types import (
    Aggregator,
    Client,
    ClientOptimizer,
    Clock,
    Engine,
    Model,
    Optimizer,
    Participation,
    Schedule,
    State,
    Turn,
    Work,
)


@dataclass(frozen=True)
class Evaluate:
    """When and on what the model is evaluated."""

    every: int
    train: bool
    batch_size: int
    personal: bool | None
    """Also each client's own model; None: where the client rule is about it."""
    personal_clients: int | float

    def __post_init__(self) -> None:
        check.integer("every", self.every, ge=1)
        check.boolean("train", self.train)
        check.integer("batch_size", self.batch_size, ge=1)
        if self.personal is not None:
            check.boolean("personal", self.personal)
        if isinstance(self.personal_clients, float):
            check.number("personal_clients", self.personal_clients, gt=0, le=1)
        else:
            check.integer("personal_clients", self.personal_clients, ge=1)


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
    privacy: Privacy
    warmup_epochs: int
    """Epochs on the global set G before the first round (shared_data)."""
    engine_choice: Mapping[str, object] = field(default_factory=dict)
    """Which engine it came to be, and how (engine=auto)."""

    @cached_property
    def steps(self) -> Sequence[int]:
        """Local steps that every client would take in a round."""
        sizes = self.data.sizes
        batches = -(-sizes // (self.client.batch_size or sizes))
        steps: list[int] = (self.client.epochs * batches).tolist()
        return steps

    @cached_property
    def server(self) -> Server:
        """Its half of a round; compiled where all clients are one program, and where all rounds have as many."""
        stacked, compiled = self.engine_choice.get("name") == "vmap", self.engine_choice.get("compile") is True
        alike = self.foreseen(0) is not None and not (self.aggregator.individual or self.privacy.active)
        return Server(
            self.aggregator,
            self.server_optimizer,
            self.client,
            self.task.layers,
            self.data.num_clients,
            compile=stacked and compiled and alike,
            pack=compiled and not stacked,
        )

    def foreseen(self, round: int) -> Sequence[int] | None:
        """Who will train in a round, where that is known before it comes."""
        return self.participation.foreseen(self.seed, round, self.data.num_clients) if round < self.rounds else None


@dataclass(frozen=True)
class Broadcast:
    """What clients are sent at the start of a round."""

    model: Model
    shared: State
    """The client rule's part of it (SCAFFOLD: c)."""


@dataclass(frozen=True)
class RunState:
    """The whole truth between two rounds: what a checkpoint holds."""

    round: int
    """Rounds completed."""
    model: Model
    aggregator: State
    server: State
    rule: State
    """What the server remembers for the client rule."""
    clients: Mapping[int, State]
    """What each client keeps: only those that ever took part, and only where there is something to keep."""
    norm_integrated: float
    clock: Clock
    underway: Mapping[int, Broadcast]
    """What clients that are still training were sent, by the round it was sent in (asynchronous training)."""


Row = dict[str, float]
LayerRows = dict[str, Sequence[float]]
"""One value for each layer, by column of layers.csv."""


def initial_state(exp: Experiment) -> RunState:
    model = exp.task.initial_model()
    if exp.warmup_epochs and len(exp.data.global_set):
        model = shared_data.warm_up(
            exp.task, exp.data, exp.client_optimizer, model, exp.warmup_epochs, exp.client.batch_size
        )
    return RunState(
        round=0,
        model=model,
        aggregator=exp.aggregator.init(model.params),
        server=exp.server_optimizer.init(model.params),
        rule=exp.client.init(model.params),
        clients={},
        norm_integrated=0.0,
        clock={"now": 0.0},
        underway={},
    )


@dataclass(frozen=True)
class Played:
    """A round's end."""

    state: RunState
    row: Row
    layers: LayerRows
    pending: Mapping[str, Pending]
    """Evaluations that go on beside the next round."""

    def whole_row(self) -> Row:
        """With what they find, and the time that had to be waited for it."""
        begun = time.perf_counter()
        found, _ = fetch({}, {name: e.result() for name, e in self.pending.items()})
        waited = time.perf_counter() - begun if self.pending else 0.0
        return self.row | found | {"time/round_s": self.row["time/round_s"] + waited}


def run(exp: Experiment, state: RunState, after_round: Callable[[RunState, Row, LayerRows], None]) -> RunState:
    """Play the rounds that are left, handing each one's end to `after_round`. Stops early where a loss diverges."""
    behind = deque[Played]()
    while state.round < exp.rounds or behind:
        if state.round < exp.rounds:
            behind.append(begin(exp, state))
            state = behind[-1].state
        # One may still be evaluated while the next is trained, if there is to be a next.
        last = state.round == exp.rounds or diverged(behind[-1].row)
        while behind and (not behind[0].pending or len(behind) == 2 or last):
            played = behind.popleft()
            row = played.whole_row()
            after_round(played.state, row, played.layers)
            if diverged(row):
                return played.state
    return state


def diverged(row: Row) -> bool:
    return any(not math.isfinite(row[name]) for name in FINITE if name in row)


def play(exp: Experiment, state: RunState) -> tuple[RunState, Row, LayerRows]:
    """One round, to its end."""
    played = begin(exp, state)
    return played.state, played.whole_row(), played.layers


def begin(exp: Experiment, state: RunState) -> Played:
    """One round: sample, train, aggregate, step, measure."""
    started = time.perf_counter()
    state = replace(state, model=exp.server.laid_out(state.model))  # as after any other round
    turn = exp.participation(exp.seed, state.round, exp.steps, state.clock)
    # A round that too few clients answer for the masks to be lifted is void, as one that nobody answers.
    clients = turn.clients if len(turn.clients) >= exp.privacy.least(len(turn.sampled)) else []
    work = assign(exp, state, turn)
    trained = exp.engine(work, clients, weights(exp, clients))
    after, learned = learn(exp, state, trained)
    row, layer_rows, pending = measure(exp, state, work, learned, after)
    row |= account(exp, state, turn, after.model)
    row["clients/arrived"], row["client_lr"] = len(clients), work.lr
    row["time/round_s"] = time.perf_counter() - started
    after = replace(
        after,
        round=state.round + 1,
        norm_integrated=row["norm/N_integrated"],
        clock=turn.clock,
        underway=underway(state, turn, Broadcast(after.model, after.rule)),
    )
    return Played(after, row, layer_rows, pending)


def learn(exp: Experiment, state: RunState, cohort: Cohort | Deferred) -> tuple[RunState, Learned | None]:
    """Aggregate, take the server's step, and remember what aggregator, server optimizer, rule and clients want kept.
    From nobody nothing is learned."""
    if not cohort.count:
        return state, None
    learned = exp.server(state.model, state.aggregator, state.server, state.rule, cohort)
    kept = cohort.states
    after = replace(
        state,
        model=learned.model,
        aggregator=learned.aggregator,
        server=learned.server,
        rule=learned.rule,
        clients={**state.clients, **kept} if kept else state.clients,
    )
    return after, learned


def account(exp: Experiment, state: RunState, turn: Turn, model: Model) -> Row:
    """What the round cost: bytes, virtual time, privacy."""
    size = sum(t.nbytes for t in leaves((model.params, model.buffers)))
    down, up = exp.client.traffic
    answers = len(turn.clients) + turn.discarded
    row: Row = {
        "comm/down_bytes": size * down * turn.sent,
        "comm/up_bytes": size * (up + exp.aggregator.extra_uploads if up else 0) * answers,
        "time/virtual_s": turn.clock["now"],  # type: ignore[dict-item]
    }
    if "running" in turn.clock:
        row |= {"async/staleness": state.round - turn.version, "async/discarded": turn.discarded}
    if exp.privacy.noise_multiplier:
        row["privacy/epsilon"] = exp.privacy.epsilon(state.round + 1, exp.data.num_clients, len(turn.sampled))
    return row


def assign(exp: Experiment, state: RunState, turn: Turn) -> Work:
    """What the round's clients are given: the present model, or the one they were sent when they started."""
    sent = state.underway.get(turn.version) or Broadcast(state.model, state.rule)
    return Work(
        task=exp.task,
        data=exp.data,
        client=exp.client,
        optimizer=exp.client_optimizer,
        probe=exp.aggregator.probe,
        model=sent.model,
        server=state.model,
        shared=sent.shared,
        lr=exp.schedule(exp.client_optimizer.lr, turn.version),
        seed=exp.seed,
        round=turn.version,
        states=state.clients,
        effort=turn.effort,
        individual=exp.aggregator.individual,
        lengths=exp.aggregator.lengths,
        privacy=exp.privacy,
        sampled=turn.sampled,
        staleness=state.round - turn.version,
        foreseen=exp.foreseen,
        whole=exp.server.compiles,
    )


def first_work(exp: Experiment) -> Work:
    """What the first round's clients would be given, were the model not warmed up."""
    model = exp.task.initial_model()
    rule = exp.client.init(model.params)
    state = RunState(0, model, {}, {}, rule, {}, norm_integrated=0.0, clock={}, underway={})
    return assign(exp, state, Turn((), (), {}, 0, {}, 0))


def extent(exp: Experiment) -> Extent:
    """How much training there is, all in all."""
    alone = isinstance(exp.participation, Asynchronous)  # its updates come one by one
    clients = 1 if alone else exp.participation.count(exp.data.num_clients)
    once = len(exp.data.dataset.test_y) * (2 if exp.aggregator.evaluate == "averaged" else 1)
    once += int(exp.data.sizes.sum()) if exp.eval.train else 0
    evaluated = once * -(-exp.rounds // exp.eval.every)
    return Extent(exp.rounds, clients, sum(exp.steps) / len(exp.steps), evaluated, exp.eval.batch_size)


def underway(state: RunState, turn: Turn, new: Broadcast) -> Mapping[int, Broadcast]:
    """What must be kept for the clients that are still training."""
    running = turn.clock.get("running")
    if not isinstance(running, list):
        return {}
    sent = {0: Broadcast(state.model, state.rule)} if state.round == 0 else dict(state.underway)
    sent[state.round + 1] = new
    wanted = {int(version) for _, _, version, _ in running}
    return {version: broadcast for version, broadcast in sent.items() if version in wanted}


def measure(
    exp: Experiment, state: RunState, work: Work, learned: Learned | None, after: RunState
) -> tuple[Row, LayerRows, Mapping[str, Pending]]:
    """What a round is worth knowing for: norms, the aggregator's own metrics and, where it is due, accuracy."""
    layers = exp.task.layers
    said = learned.said if learned else Said.of({}, {name: layers.no_norms() for name in NORMS})
    values: dict[str, Tensor] = {}
    evaluations: dict[str, Evaluation | Pending] = {}
    if (state.round + 1) % exp.eval.every == 0 or state.round + 1 == exp.rounds:
        evaluations = evaluate(exp, work, after.model, average(state.model, learned))
        if exp.client.personal if exp.eval.personal is None else exp.eval.personal:
            later = replace(after, round=state.round + 1, underway={})
            again = assign(exp, later, Turn((), (), {}, later.round, {}, 0))
            # At the rate of the round that ends here: a schedule's next one may be 0.
            again = replace(again, lr=exp.schedule(exp.client_optimizer.lr, state.round))
            values = personal.accuracy(again, exp.eval.personal_clients, exp.eval.batch_size)

    pending = {name: e for name, e in evaluations.items() if isinstance(e, Pending)}
    done = {name: e for name, e in evaluations.items() if isinstance(e, Evaluation)}
    row, columns = fetch(values, done, said)
    for name in NORMS:
        for part, norm in zip(layers.parts, columns[name][len(layers.names) :], strict=True):
            row[f"norm/{name}" + ("" if part == "all" else f"_{part}")] = norm
    layer_rows = {name: column[: len(layers.names)] for name, column in columns.items()}
    row["round"] = state.round + 1
    if row["norm/E"] > 0:
        row["norm/N_over_E"] = row["norm/N"] / row["norm/E"]
    row["norm/N_integrated"] = state.norm_integrated + row["norm/N_server"]
    return row, layer_rows, pending


def weights(exp: Experiment, clients: Sequence[int]) -> list[float]:
    """w_k = |D_k| / sum |D_k| over the sampled clients, or 1/m where the server does not know the sizes."""
    if exp.aggregator.weighting == "uniform":
        return [1 / len(clients) for _ in clients]
    sizes = exp.data.sizes[list(clients)]
    shares: list[float] = (sizes / sizes.sum()).tolist()
    return shares


def average(model: Model, learned: Learned | None) -> Model:
    """Of the clients' models, which began at this one."""
    if learned is None:
        return model
    return Model(difference(model.params, learned.delta), learned.buffers)


def evaluate(exp: Experiment, work: Work, sent: Model, averaged: Model) -> dict[str, Evaluation | Pending]:
    """The model the aggregator says is judged, and the one that is sent out beside it where that is another."""
    judged = averaged if exp.aggregator.evaluate == "averaged" else sent

    def on(part: str, model: Model) -> Evaluation | Pending:
        return exp.engine.evaluate(replace(work, model=model), part, exp.eval.batch_size)

    result = {"test": on(TEST, judged)}
    if judged is not sent:
        result["sent"] = on(TEST, sent)
    if exp.eval.train:
        result["train"] = on(TRAIN, judged)
    return result


def fetch(
    values: Mapping[str, Tensor], evaluations: Mapping[str, Evaluation], said: Said | None = None
) -> tuple[Row, LayerRows]:
    """Everything measured in a round, as numbers: one transfer from the device."""
    scalars = dict(values)
    for name, e in evaluations.items():
        scalars[f"{name}/loss"] = e.loss_sum / e.count
        if e.correct is not None:
            # Whole numbers are divided as such; a count that lies on the device is not waited for.
            scalars[f"{name}/accuracy"] = e.correct if isinstance(e.count, int) else e.correct / e.count
    pieces = [t.reshape(-1).float() for t in scalars.values()] + ([said.numbers] if said else [])
    numbers: list[float] = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).tolist() if pieces else []
    row: Row = dict(zip([*scalars, *(said.scalars if said else ())], numbers, strict=False))
    for name, e in evaluations.items():
        if e.correct is not None and isinstance(e.count, int):
            row[f"{name}/accuracy"] /= e.count
    columns: LayerRows = {}
    place = len(row)
    for name, length in said.vectors.items() if said else ():
        columns[name] = numbers[place : place + length]
        place += length
    return row, columns
