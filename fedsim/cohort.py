"""What the server learns from a round: weighted sums over the sampled clients, never their models one by one.

Clients are added one after another (or, by later engines, chunk after chunk), so memory does not grow with the cohort.
An aggregator that truly needs every model (PFNM) says so; it alone is given them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedsim.layers import Layers
from fedsim.local import LocalResult, measured_by
from fedsim.privacy.channel import Part, Summation
from fedsim.program import Program
from fedsim.trees import combined, difference
from fedsim.types import Model, State, Tree, Work


@dataclass(frozen=True)
class Member:
    """One client's upload, for an aggregator that needs them all."""

    weight: float
    params: Tree
    measured: Tree | None


@dataclass(frozen=True)
class Cohort:
    """A round's clients, reduced. Weights w_k sum to one; delta_k = theta - theta_k."""

    server: Model
    """theta, as it is now."""
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
    states: dict[int, State] = field(default_factory=dict)
    """What clients keep for their next round."""
    length: Tensor = field(default_factory=lambda: torch.zeros(()))
    """sum_k w_k ||delta_k|| of the whole model, as the server knows it: E, or what privacy leaves of it."""
    count: int = 0
    """How many clients."""
    staleness: int = 0
    """Updates the server has made since the clients were sent their model (asynchronous training)."""
    sent: Tree | None = None
    """Plain mean of what the client rule sends beside the model (SCAFFOLD: control variates' changes)."""
    reports: Sequence[Tensor] = ()
    """What each client reports (LoAdaBoost: its loss)."""
    members: Sequence[Member] = ()
    """Each client's upload, for an aggregator that is `individual`."""
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Deferred:
    """A cohort that has yet to be made, of sums, or even to train: that is the first half of the server's program."""

    make: Callable[[Model, State, Any], Cohort]
    """A pure function of the model, of what the client rule sends beside it, and of `given`."""
    given: Any
    """A tree of tensors."""
    count: int
    """How many clients."""
    states: dict[int, State] = field(default_factory=dict)
    """What they keep for their next round."""


@dataclass(frozen=True)
class Upload:
    """What the server gets from a client."""

    delta: Tree
    norms: Tensor
    """||delta_k|| by layer and part."""
    buffers: Tree
    measured: Tree | None
    loss: Tensor
    state: State | None
    sent: Tree | None
    report: Tensor | None
    params: Tree | None
    """For an aggregator that is `individual`."""


def upload(work: Work, result: LocalResult, program: Program | None = None) -> Upload:
    """The client's last arithmetic: theta - theta_k and its norms."""
    if program is None:
        delta = difference(work.server.params, result.params)
        norms = work.task.layers.norms(delta)
    else:
        delta, norms = program.uploaded(work, result.params)
    return Upload(
        delta,
        norms,
        result.buffers,
        result.measured,
        result.loss,
        result.state,
        result.sent,
        result.report,
        result.params if work.individual else None,
    )


@dataclass(frozen=True)
class Partial:
    """Some of a round's clients, summed up with their weights."""

    sums: dict[str, Tree]
    E: Tensor
    loss: Tensor
    states: dict[int, State]
    reports: list[Tensor]


def measurements(work: Work, clients: Sequence[int], weights: Sequence[float], program: Program) -> Partial:
    """What the aggregator has some clients measure, and nothing else."""
    total, layers = Summation(), work.task.layers
    for client, weight, measured in zip(clients, weights, measured_by(work, clients, program), strict=True):
        total.add(client, {"measured": Part(weight, measured)})
    return Partial(total.total(), layers.no_norms(), layers.members.new_zeros(()), {}, [])


class CohortSum:
    """Adds clients up as they finish."""

    def __init__(self, work: Work, count: int) -> None:
        self._work, self._layers, self._count = work, work.task.layers, count
        server, layers = work.server, work.task.layers
        self._sum = work.privacy.open(work) if work.privacy else Summation()
        self._sum.expect("delta", server.params)
        # A counter among the buffers (batch norm's num_batches_tracked) is averaged as a float and rounded back.
        self._sum.expect("buffers", server.buffers)
        self._E = layers.no_norms()
        self._loss = torch.zeros((), device=layers.members.device)
        self._states: dict[int, State] = {}
        self._reports: list[Tensor] = []
        self._members: list[Member] = []

    def add(self, client: int, weight: float, upload: Upload) -> None:
        parts = {"delta": Part(weight, upload.delta), "buffers": Part(weight, upload.buffers)}
        if upload.measured is not None:
            parts["measured"] = Part(weight, upload.measured)
        if upload.sent is not None:
            parts["sent"] = Part(1 / self._count, upload.sent)
        if self._work.lengths and self._work.privacy and self._work.privacy.active:
            parts["length"] = Part(weight, {"": upload.norms[-1:]})
        self._sum.add(client, parts)
        self._E.add_(upload.norms, alpha=weight)
        self._loss.add_(upload.loss, alpha=weight)
        if upload.state is not None:
            self._states[client] = upload.state
        if upload.report is not None:
            self._reports.append(upload.report)
        if upload.params is not None:
            self._members.append(Member(weight, upload.params, upload.measured))

    def take(self, clients: Sequence[int], weights: Sequence[float], result: Upload | Partial) -> None:
        """A client's upload, or several clients' part of the sums."""
        if isinstance(result, Partial):
            self.merge(result)
        else:
            self.add(clients[0], weights[0], result)

    def merge(self, part: Partial) -> None:
        """Clients that are summed up already; only where nobody has to see them one by one."""
        self._sum.add(-1, {name: Part(1, tree) for name, tree in part.sums.items()})
        self._E.add_(part.E)
        self._loss.add_(part.loss)
        self._states |= part.states
        self._reports += part.reports

    def result(self) -> Cohort | Deferred:
        given = {"total": self._sum.total(), "E": self._E, "loss": self._loss, "reports": self._reports}
        if self._work.whole:
            return Deferred(self._cohort, given, self._count, self._states)
        return replace(
            self._cohort(self._work.server, {}, given),
            states=self._states,
            staleness=self._work.staleness,
            members=self._members,
            metrics=self._sum.metrics(),
        )

    def _cohort(self, server: Model, shared: State, given: Any) -> Cohort:
        cohort = reduced(self._layers, server, given["total"], given["E"], given["loss"], self._count)
        return replace(cohort, reports=given["reports"])


def reduced(layers: Layers, server: Model, total: State, E: Tensor, loss: Tensor, count: int) -> Cohort:
    """So many clients, from their sums."""
    buffers = combined(_as, total["buffers"], server.buffers)
    return Cohort(
        server=server,
        delta=total["delta"],
        buffers=buffers if count else server.buffers,
        measured=total.get("measured"),
        N=layers.norms(total["delta"]),
        E=E,
        loss=loss,
        length=total["length"][""][0] if "length" in total else E[-1],
        count=count,
        sent=total.get("sent"),
    )


def _as(total: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    return [t if t.dtype == o.dtype else t.round().to(o.dtype) for t, o in zip(total, like, strict=True)]
