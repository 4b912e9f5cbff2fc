"""One client's round: the loop over local batches, as every engine but the stacked one runs it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from fedsim import growth, rng
from fedsim.data import ClientData
from fedsim.model.dropout import KEY
from fedsim.participation.base import steps_taken
from fedsim.program import Carry, Moments, Program
from fedsim.task import Task
from fedsim.types import Batch, Context, Finished, Model, Probe, State, Tree, Work

OPTIMIZER = "optimizer/"
"""Where a client's kept state has its optimizer's part."""


@dataclass(frozen=True)
class LocalResult:
    """What a client ends a round with."""

    params: Tree
    buffers: Tree
    measured: Tree | None
    """What the aggregator's probe measured at the broadcast model (elastic: Omega_k)."""
    loss: Tensor
    """Mean training loss over the samples it trained on, each at the moment it was used."""
    state: State | None
    """What outlives the round on the client."""
    sent: Tree | None = None
    report: Tensor | None = None


def train(work: Work, client: int, program: Program | None = None, data: ClientData | None = None) -> LocalResult:
    """Probe the broadcast model, then train it on the client's own data; with a compiled `program`, if one is given."""
    measured = None
    if program is not None:
        if work.probe is not None and not work.measures_together:
            (measured,) = measured_by(work, [client], program)
    elif work.probe is not None:
        batches = work.data.sensitivity_batches([client], work.probe.batch_size or work.client.batch_size)
        measured = measure(work.probe, work.task, work.model, map(work.data.dataset.inputs, next(batches)))
    finished, loss, optimizer_state = descend(work, client, "batches", program=program, data=data)
    kept = finished.kept | {OPTIMIZER + name: tree for name, tree in optimizer_state.items()}
    kept = {name: dict(tree) for name, tree in kept.items()}  # as others know it, not packed
    upload = finished.model
    return LocalResult(upload.params, upload.buffers, measured, loss, kept or None, finished.sent, finished.report)


def measure(probe: Probe, task: Task, model: Model, batches: Iterable[Tensor]) -> Tree:
    """What an aggregator has a client measure."""
    count = 0
    found: Tree = {n: torch.zeros_like(p) for n, p in model.params.items()}
    for x in batches:
        found, count = probe.step(task, model, found, x, None), count + 1
    return found if probe.end is None else probe.end(found, max(count, 1))


def measured_by(work: Work, clients: Sequence[int], program: Program) -> Iterator[Tree]:
    """The same of one client after another by a program, with batches filled up to one of few widths; where samples of
    a batch see each other (batch norm by the batch's own statistics), one of another width goes uncompiled."""
    assert work.probe is not None
    model, mixes = program.start(work).fixed.model, work.probe.mixes and work.task.mixes
    for batches in work.data.sensitivity_batches(clients, program.probe_size):
        count = 0
        found: Tree = {}  # zeros, which the program makes itself
        for x in batches:
            width = len(x) if mixes else next(w for w in program.probe_widths if w >= len(x))
            filled = torch.cat([x, x[:1].expand(width - len(x), *x.shape[1:])]) if width > len(x) else x
            found = program.measured(found, model, {"batches": [(filled,)], "there": program.there(len(x), width)})
            count += 1
        found = found or {n: torch.zeros_like(p) for n, p in model.params.items()}
        yield found if work.probe.end is None else work.probe.end(found, max(count, 1))


def personal(work: Work, client: int) -> Model:
    """The broadcast model made the client's own; nothing is kept or sent."""
    adaptation = work.client.adaptation(work.optimizer, work.lr)
    own = replace(work, client=adaptation.client, optimizer=adaptation.optimizer, lr=adaptation.lr)
    return descend(own, client, "adaptation", adaptation.steps)[0].model


def descend(
    work: Work,
    client: int,
    purpose: str,
    most: int | None = None,
    program: Program | None = None,
    data: ClientData | None = None,
) -> tuple[Finished, Tensor, State]:
    """The loop: (what the rule makes of its end, mean loss, optimizer state to keep)."""
    rule, optimizer = work.client, work.optimizer
    data = work.data.client(client, work.round, rule.batch_size, purpose) if data is None else data
    own = growth.padded_state(work.states.get(client, {}), work.model.params)
    context = Context(work.task, work.model, work.shared, own, data, work.lr)
    if client in work.effort:
        most = steps_taken(rule.epochs * data.steps, work.effort[client])

    model = rule.start(context)
    device = work.data.dataset.train_y.device
    # A model with randomness of its own draws from the device's generator: set here, a function of these four.
    rng.seed_torch(device, work.seed, "dropout", work.round, client)
    key = dropout_key(work, [client])[0] if work.task.drops else None
    seen, steps, kept = 0, 0, optimizer_part(own)
    if program is None:
        copies = {n: b.clone() for n, b in model.buffers.items()}  # which training changes in place
        no_loss = next(iter(model.params.values())).new_zeros(())
        carry = Carry(model.params, copies, kept or optimizer.init(model.params), no_loss)
    else:
        carry, fixed = program.carry(work, model, kept), program.fixed(work, rules_part(own))

    def present_loss() -> float:
        return work.task.mean_loss(Model(carry.params, carry.buffers), data).item()

    def batches(epochs: int) -> Iterator[Batch]:
        """As many as the client takes."""
        nonlocal seen, steps
        for stored in islice(data.stored(epochs), None if most is None else most - steps):
            yield stored
            seen, steps = seen + len(stored[1]), steps + 1

    def moments(epochs: int, program: Program) -> Iterator[Moments]:
        for stored in batches(epochs):
            taken = [stored, *(next(data.stored_extra) for _ in range(rule.extra_batches))]
            keys = {} if key is None else {"key": key + steps}
            yield {"batches": taken, "size": program.size(len(stored[1])), **keys}

    for epochs in rule.plan(context, present_loss):
        if program is not None:
            # All of them first: Python runs faster in one piece than between steps that take its place in the cache.
            carry = program(carry, fixed, list(moments(epochs, program)))
            continue
        for stored in batches(epochs):
            buffers = carry.buffers if key is None else {**carry.buffers, KEY: key + steps}
            grads, loss = rule.gradient(work.task, carry.params, buffers, data.input(stored), context)
            carry.params, carry.state = optimizer.step(carry.params, grads, carry.state, work.lr)
            carry.loss += loss * len(stored[1])
    finished = rule.finish(Model(carry.params, carry.buffers), steps, context)
    return finished, carry.loss / max(seen, 1), carry.state if optimizer.persist_state else {}


def optimizer_part(own: State) -> State:
    """The optimizer's part of what a client kept."""
    return {name.removeprefix(OPTIMIZER): tree for name, tree in own.items() if name.startswith(OPTIMIZER)}


def rules_part(own: State) -> State:
    """The rest: the client rule's."""
    return {name: tree for name, tree in own.items() if not name.startswith(OPTIMIZER)}


def dropout_key(work: Work, clients: list[int]) -> Tensor:
    """[K, 2]: where the masks of the clients' steps come from, step s adding s. Zeros where nothing is dropped."""
    device = work.data.dataset.train_y.device
    if not work.task.drops:
        return torch.zeros(len(clients), 2, dtype=torch.int32, device=device)
    words = [rng.words(work.seed, "dropout", work.round, client) for client in clients]
    return torch.tensor(words, dtype=torch.int32, device=device)
