"""One client's round: the only loop over local batches. Every engine runs this."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim import growth, rng
from fedsim.participation.base import steps_taken
from fedsim.types import Context, Finished, Model, State, Tree, Work

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


def train(work: Work, client: int) -> LocalResult:
    """Probe the broadcast model, then train it on the client's own data."""
    measured = None
    if work.probe is not None:
        batches = work.data.sensitivity_batches(client, work.probe.batch_size or work.client.batch_size)
        measured = work.probe.measure(work.task, work.model, batches)
    finished, loss, optimizer_state = descend(work, client, "batches")
    kept = finished.kept | {OPTIMIZER + name: tree for name, tree in optimizer_state.items()}
    upload = finished.model
    return LocalResult(upload.params, upload.buffers, measured, loss, kept or None, finished.sent, finished.report)


def personal(work: Work, client: int) -> Model:
    """The broadcast model made the client's own; nothing is kept or sent."""
    adaptation = work.client.adaptation(work.optimizer, work.lr)
    own = replace(work, client=adaptation.client, optimizer=adaptation.optimizer, lr=adaptation.lr)
    return descend(own, client, "adaptation", adaptation.steps)[0].model


def descend(work: Work, client: int, purpose: str, most: int | None = None) -> tuple[Finished, Tensor, State]:
    """The loop: (what the rule makes of its end, mean loss, optimizer state to keep)."""
    rule, optimizer = work.client, work.optimizer
    own = growth.padded_state(work.states.get(client, {}), work.model.params)
    data = work.data.client(client, work.round, rule.batch_size, purpose)
    context = Context(work.task, work.model, work.shared, own, data, work.lr)
    if client in work.effort:
        most = steps_taken(rule.epochs * data.steps, work.effort[client])

    model = rule.start(context)
    params, buffers = model.params, {n: b.clone() for n, b in model.buffers.items()}
    state = {name.removeprefix(OPTIMIZER): tree for name, tree in own.items() if name.startswith(OPTIMIZER)}
    state = state or optimizer.init(params)
    device = next(iter(params.values())).device
    # Dropout draws from the device's own generator: set here, its draws are a function of (seed, round, client).
    rng.seed_torch(device, work.seed, "dropout", work.round, client)
    loss_sum, seen, steps = torch.zeros((), device=device), 0, 0

    def present_loss() -> float:
        return work.task.mean_loss(Model(params, buffers), data).item()

    for epochs in rule.plan(context, present_loss):
        for batch in data.batches(epochs):
            if steps == most:
                break
            grads, loss = rule.gradient(work.task, params, buffers, batch, context)
            params, state = optimizer.step(params, grads, state, work.lr)
            loss_sum += loss * len(batch[1])
            seen, steps = seen + len(batch[1]), steps + 1
    finished = rule.finish(Model(params, buffers), steps, context)
    return finished, loss_sum / max(seen, 1), state if optimizer.persist_state else {}
