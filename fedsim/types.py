"""The values that cross module boundaries. All are frozen; nothing here computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from fedsim.cohort import Cohort
    from fedsim.data import FederatedData
    from fedsim.task import Task

Tree = dict[str, Tensor]
"""A model's tensors by name (as `named_parameters` gives them): the only form in which a model crosses a boundary."""

State = dict[str, Tree]
"""What an optimizer or aggregator remembers from one step to the next, e.g. {"m": Tree, "v": Tree}."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """What is sent to a client: trained parameters, and buffers (batch-norm statistics) that travel beside them."""

    params: Tree
    buffers: Tree


class Optimizer(Protocol):
    """A rule that descends a gradient (client) or a pseudo-gradient (server). Pure: state goes in and comes out."""

    @property
    def lr(self) -> float: ...
    def init(self, params: Tree) -> State: ...
    def step(self, params: Tree, grads: Tree, state: State, lr: float) -> tuple[Tree, State]: ...


class ClientOptimizer(Optimizer, Protocol):
    @property
    def persist_state(self) -> bool:
        """Whether a client keeps its optimizer's state from one round to the next."""
        ...


class Schedule(Protocol):
    def __call__(self, lr: float, round: int) -> float:
        """The client learning rate in a round (counted from 0), from the initial one."""
        ...


@dataclass(frozen=True)
class Context:
    """What a client rule may look at beside its own parameters and batch."""

    anchor: Tree
    """The broadcast model's parameters."""


class Client(Protocol):
    """The local algorithm: a gradient oracle. The loop over batches is written once, in `local.py`.

    Its arithmetic is elementwise on trees, so that the same lines serve one client or a stack of clients.
    """

    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int | None: ...
    def gradient(
        self, task: "Task", params: Tree, buffers: Tree, batch: Batch, context: Context
    ) -> tuple[Tree, Tensor]:
        """(direction to descend, loss) at `params`."""
        ...


@dataclass(frozen=True)
class Probe:
    """What an aggregator has every client measure at the broadcast model, on its unlabelled subset B_k."""

    measure: Callable[["Task", Model, Iterator[Tensor]], Tree]
    batch_size: int | None
    """None: the batch size the client trains with."""


@dataclass(frozen=True)
class Direction:
    """What the server optimizer descends, and what the aggregator wants remembered and logged."""

    tree: Tree
    state: State = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Values under names of the metrics table; they stay on the device until the round's one fetch."""
    layers: dict[str, Tensor] = field(default_factory=dict)
    """One value for each parameter tensor ([L]), by column of layers.csv."""


class Aggregator(Protocol):
    """Cohort -> direction. The server optimizer takes the step."""

    @property
    def weighting(self) -> str: ...
    @property
    def evaluate(self) -> str: ...
    @property
    def uploads(self) -> int:
        """How many models' worth of numbers a client sends up (elastic: its model and its sensitivities)."""
        ...

    @property
    def probe(self) -> Probe | None: ...
    def init(self, params: Tree) -> State: ...
    def direction(self, cohort: "Cohort", state: State) -> Direction: ...


class Participation(Protocol):
    def __call__(self, seed: int, round: int, num_clients: int) -> Sequence[int]:
        """The clients that train in a round."""
        ...

    def count(self, num_clients: int) -> int:
        """How many train in a round."""
        ...


@dataclass(frozen=True)
class Work:
    """Everything a client needs in one round; the same for all of them."""

    task: "Task"
    data: "FederatedData"
    client: Client
    optimizer: ClientOptimizer
    probe: Probe | None
    model: Model
    lr: float
    seed: int
    round: int
    states: Mapping[int, State]
    """What each client kept from its last round, for those that kept anything."""


class Engine(Protocol):
    """Trains the cohort and reduces it. Neither algorithms nor aggregators can see which engine runs them."""

    def __call__(self, work: Work, clients: Sequence[int], weights: Sequence[float]) -> "Cohort": ...
