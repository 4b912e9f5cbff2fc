"""The server's half of a round: what the aggregator makes of the cohort, the server optimizer's step, and what all of
them remember. Where the clients are one compiled program this is one too: it is a model's worth of small operations,
each of which would be a call (or, on a GPU, a kernel) of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsim import growth, kernels
from fedsim.cohort import Cohort, Deferred
from fedsim.layers import Layers
from fedsim.program import Compiled
from fedsim.trees import difference, packed, packed_alike
from fedsim.types import Aggregator, Client, Model, Optimizer, State, Tree


@dataclass(frozen=True)
class Said:
    """What a round tells beside its model, as numbers one after another: one transfer from the device."""

    numbers: Tensor
    scalars: Sequence[str]
    """Names of the first of them."""
    vectors: Mapping[str, int]
    """Names of what comes behind, and how many numbers each has."""

    @staticmethod
    def of(scalars: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> "Said":
        pieces = [t.reshape(-1).float() for t in (*scalars.values(), *vectors.values())]
        return Said(torch.cat(pieces), list(scalars), {name: len(t) for name, t in vectors.items()})


@dataclass(frozen=True)
class Learned:
    """After the round."""

    model: Model
    aggregator: State
    server: State
    rule: State
    delta: Tree
    """theta - this is the average of the clients' models, with these buffers."""
    buffers: Tree
    said: Said


class Server:
    def __init__(
        self,
        aggregator: Aggregator,
        optimizer: Optimizer,
        client: Client,
        layers: Layers,
        num_clients: int,
        compile: bool,
        pack: bool,
    ) -> None:
        """`pack`: models are laid out as a single client's program wants them."""
        self._aggregator, self._optimizer, self._client = aggregator, optimizer, client
        self._layers, self._num_clients = layers, num_clients
        device = layers.members.device
        self._compiled = Compiled(self._on_trees, kernels.forms(True, device)) if compile else None
        self._pack = pack
        self._cohort: Deferred
        self._names: tuple[Sequence[str], Mapping[str, int]]

    @property
    def compiles(self) -> bool:
        return self._compiled is not None

    def __call__(
        self, model: Model, aggregator: State, server: State, rule: State, cohort: Cohort | Deferred
    ) -> Learned:
        """From a cohort, which may have yet to train, given what was known before."""
        if isinstance(cohort, Cohort):
            return self._learned(model, aggregator, server, rule, cohort)
        assert self._compiled is not None
        self._cohort = cohort
        # What is no tensor is part of the program: another number of clients, another program.
        names = [cohort.make.__qualname__, str(cohort.count)]
        found = self._compiled((model.params, model.buffers), (aggregator, server, rule), cohort.given, names=names)
        after, (aggregator, server, rule), (delta, buffers), numbers = found
        return Learned(Model(*after), aggregator, server, rule, delta, buffers, Said(numbers, *self._names))

    def laid_out(self, model: Model) -> Model:
        """As the clients' program wants it."""
        if not self._pack:
            return model
        return Model(packed(model.params, self._layers.filters), packed(model.buffers))

    def _on_trees(self, model: Any, memories: Any, given: Any) -> Any:
        before, (aggregator, server, rule) = Model(*model), memories
        after = self._learned(before, aggregator, server, rule, self._cohort.make(before, rule, given))
        self._names = after.said.scalars, after.said.vectors  # always the same
        return (
            (after.model.params, after.model.buffers),
            (after.aggregator, after.server, after.rule),
            (after.delta, after.buffers),
            after.said.numbers,
        )

    def _learned(self, model: Model, aggregator: State, server: State, rule: State, cohort: Cohort) -> Learned:
        before, direction = model.params, self._aggregator.direction(cohort, aggregator)
        origin = direction.origin or before
        if direction.origin is not None:  # the model may have grown: what is remembered of it grows too
            server = growth.overlaid(server, self._optimizer.init(origin))
            rule = growth.overlaid(rule, self._client.init(origin))
            cohort = replace(cohort, sent=cohort.sent and growth.padded(cohort.sent, origin))
        params, server = self._optimizer.step(origin, direction.tree, server, self._optimizer.lr)
        after = self.laid_out(Model(params, direction.buffers or cohort.buffers))
        moved = self._layers.norms(way(before, after.params))
        return Learned(
            after,
            direction.state,
            server,
            self._client.merge(rule, cohort, self._num_clients),
            cohort.delta,
            cohort.buffers,
            Said.of(
                {"client/loss": cohort.loss} | cohort.metrics | direction.metrics,
                {"N": cohort.N, "E": cohort.E, "N_server": moved} | direction.layers,
            ),
        )


def way(before: Tree, after: Tree) -> Tree:
    """How far a model has come, also one that has grown."""
    return difference(after, before if packed_alike(before, after) else growth.padded(before, after))
