"""One client's round: the only loop over local batches. Every engine runs this."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import rng
from fedsim.types import Context, State, Tree, Work


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
    """Its optimizer's state, if that outlives the round."""


def train(work: Work, client: int) -> LocalResult:
    """Probe the broadcast model, then train it on the client's own data."""
    rule, optimizer = work.client, work.optimizer
    measured = None
    if work.probe is not None:
        batches = work.data.sensitivity_batches(client, work.probe.batch_size or rule.batch_size)
        measured = work.probe.measure(work.task, work.model, batches)

    params, context = work.model.params, Context(anchor=work.model.params)
    buffers = {n: b.clone() for n, b in work.model.buffers.items()}
    state = work.states.get(client)
    if state is None:
        state = optimizer.init(params)
    device = next(iter(params.values())).device
    # Dropout draws from the device's own generator: set here, its draws are a function of (seed, round, client).
    rng.seed_torch(device, work.seed, "dropout", work.round, client)
    loss_sum, seen = torch.zeros((), device=device), 0
    for batch in work.data.batches(work.round, client, rule.epochs, rule.batch_size):
        grads, loss = rule.gradient(work.task, params, buffers, batch, context)
        params, state = optimizer.step(params, grads, state, work.lr)
        loss_sum += loss * len(batch[1])
        seen += len(batch[1])
    return LocalResult(params, buffers, measured, loss_sum / seen, state if optimizer.persist_state else None)
