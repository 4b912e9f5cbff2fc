"""What the server learns from a round: weighted sums over the sampled clients, never their models one by one.

Clients are added one after another (or, by later engines, chunk after chunk), so memory does not grow with the cohort.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.layers import Layers
from fedsim.local import LocalResult
from fedsim.types import Model, State, Tree


@dataclass(frozen=True)
class Cohort:
    """A round's clients, reduced. Weights w_k sum to one; delta_k = theta - theta_k."""

    delta: Tree
    """sum_k w_k delta_k: the naive aggregate, a pseudo-gradient."""
    buffers: Tree
    """sum_k w_k b_k: batch-norm statistics are averaged, never scaled."""
    measured: Tree | None
    """sum_k w_k Omega_k, where the aggregator asked for it."""
    N: Tensor
    """||sum_k w_k delta_k|| by layer and part as in Layers.norms; N[-1] is the whole model's."""
    E: Tensor
    """sum_k w_k ||delta_k||, likewise. N <= E everywhere."""
    loss: Tensor
    """sum_k w_k (mean training loss of client k)."""
    states: dict[int, State]
    """What clients keep for their next round."""


class CohortSum:
    """Adds clients up as they finish."""

    def __init__(self, model: Model, layers: Layers) -> None:
        self._model, self._layers = model, layers
        self._delta = {n: torch.zeros_like(p) for n, p in model.params.items()}
        # A counter among the buffers (batch norm's num_batches_tracked) is averaged as a float and rounded back.
        self._buffers = {n: torch.zeros_like(b, dtype=_summable(b)) for n, b in model.buffers.items()}
        self._measured: Tree | None = None
        self._E = torch.zeros(len(layers.names) + len(layers.parts), device=layers.members.device)
        self._loss = torch.zeros((), device=layers.members.device)
        self._states: dict[int, State] = {}

    def add(self, client: int, weight: float, result: LocalResult) -> None:
        delta = {n: p - result.params[n] for n, p in self._model.params.items()}
        _add(self._delta, delta, weight)
        _add(self._buffers, result.buffers, weight)
        if result.measured is not None:
            if self._measured is None:
                self._measured = {n: torch.zeros_like(t) for n, t in result.measured.items()}
            _add(self._measured, result.measured, weight)
        self._E.add_(self._layers.norms(delta), alpha=weight)
        self._loss.add_(result.loss, alpha=weight)
        if result.state is not None:
            self._states[client] = result.state

    def result(self) -> Cohort:
        buffers = {n: _as(total, self._model.buffers[n].dtype) for n, total in self._buffers.items()}
        N = self._layers.norms(self._delta)
        return Cohort(self._delta, buffers, self._measured, N, self._E, self._loss, self._states)


def _summable(buffer: Tensor) -> torch.dtype:
    return buffer.dtype if buffer.is_floating_point() else torch.float32


def _as(total: Tensor, dtype: torch.dtype) -> Tensor:
    return total if total.dtype == dtype else total.round().to(dtype)


def _add(total: Tree, tree: Tree, weight: float) -> None:
    for name, t in total.items():
        t.add_(tree[name], alpha=weight)
