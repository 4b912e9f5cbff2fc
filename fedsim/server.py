"""The server's half of a round: what the aggregator makes of the cohort, the server optimizer's step, and what all of
them remember. Where the clients are one compiled program this is one too: it is a model's worth of small operations,
each of which would be a call (or, on a GPU, a kernel) of its own."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedsim import growth, kernels
from fedsim.cohort import Cohort, Untrained
from fedsim.layers import Layers
from fedsim.program import Compiled
from fedsim.types import Aggregator, Client, Direction, Model, Optimizer, State, Tree


@dataclass(frozen=True)
class Learned:
    """After the round."""

    model: Model
    aggregator: State
    server: State
    rule: State
    direction: Direction
    moved: Tensor
    """||theta_{t+1} - theta_t|| by layer and part."""


class Server:
    def __init__(
        self,
        aggregator: Aggregator,
        optimizer: Optimizer,
        client: Client,
        layers: Layers,
        num_clients: int,
        compile: bool,
    ) -> None:
        self._aggregator, self._optimizer, self._client = aggregator, optimizer, client
        self._layers, self._num_clients = layers, num_clients
        device = layers.members.device
        self._compiled = Compiled(self._on_trees, kernels.forms(True, device)) if compile else None
        self._cohort: Cohort | Untrained

    @property
    def compiles(self) -> bool:
        return self._compiled is not None

    def __call__(
        self, model: Model, aggregator: State, server: State, rule: State, cohort: Cohort | Untrained
    ) -> tuple[Cohort, Learned]:
        """The cohort, trained by now, and what was learned from it, given what was known before."""
        if self._compiled is None:
            assert isinstance(cohort, Cohort)
            return cohort, self._learned(model, aggregator, server, rule, cohort)
        self._cohort = cohort
        # What is no tensor is part of the program: another number of clients, another program.
        names = [type(cohort).__name__, str(cohort.count)]
        given = cohort.given if isinstance(cohort, Untrained) else sums(cohort)
        found = self._compiled((model.params, model.buffers), (aggregator, server, rule), given, names=names)
        (params, buffers), (aggregator, server, rule), (metrics, layers), moved, summed = found
        said = Direction({}, metrics=metrics, layers=layers)  # the step is taken
        if isinstance(cohort, Untrained):
            cohort = Cohort(server=model, count=cohort.count, **summed)
        return cohort, Learned(Model(params, buffers), aggregator, server, rule, said, moved)

    def _on_trees(self, model: Any, memories: Any, given: Any) -> Any:
        before, (aggregator, server, rule), cohort = Model(*model), memories, self._cohort
        if isinstance(cohort, Untrained):
            trained = cohort.train(before, rule, given)
        else:
            trained = replace(cohort, server=before, **given)
        after = self._learned(before, aggregator, server, rule, trained)
        said = after.direction
        return (
            (after.model.params, after.model.buffers),
            (after.aggregator, after.server, after.rule),
            (said.metrics, said.layers),
            after.moved,
            sums(trained) | {"measured": None} if isinstance(cohort, Untrained) else {},  # what is still wanted
        )

    def _learned(self, model: Model, aggregator: State, server: State, rule: State, cohort: Cohort) -> Learned:
        direction = self._aggregator.direction(cohort, aggregator)
        origin = direction.origin or model.params
        if direction.origin is not None:  # the model may have grown: what is remembered of it grows too
            server = growth.overlaid(server, self._optimizer.init(origin))
            rule = growth.overlaid(rule, self._client.init(origin))
            cohort = replace(cohort, sent=cohort.sent and growth.padded(cohort.sent, origin))
        params, server = self._optimizer.step(origin, direction.tree, server, self._optimizer.lr)
        return Learned(
            Model(params, direction.buffers or cohort.buffers),
            direction.state,
            server,
            self._client.merge(rule, cohort, self._num_clients),
            direction,
            self._layers.norms(way(model.params, params)),
        )


def sums(cohort: Cohort) -> dict[str, Any]:
    """What of a cohort is tensors."""
    names = ("delta", "buffers", "measured", "N", "E", "loss", "length", "sent")
    return {name: getattr(cohort, name) for name in names} | {"reports": list(cohort.reports)}


def way(before: Tree, after: Tree) -> Tree:
    """How far a model has come, also one that has grown."""
    before = growth.padded(before, after)
    return {n: p - before[n] for n, p in after.items()}
