"""The values that cross module boundaries. All are frozen; nothing here computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from fedsim.cohort import Cohort, Deferred
    from fedsim.data import ClientData, FederatedData
    from fedsim.engine.beside import Pending
    from fedsim.privacy.channel import Privacy
    from fedsim.task import Evaluation, Task

Tree = Mapping[str, Tensor]
"""A model's tensors by name (as `named_parameters` gives them): the only form in which a model crosses a boundary."""

State = dict[str, Tree]
"""What an optimizer, an aggregator or a client remembers, e.g. {"m": Tree, "v": Tree}."""

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

    task: "Task"
    model: Model
    """As it was broadcast."""
    shared: State
    """What the rule's server side sends out beside the model (SCAFFOLD: c)."""
    own: State
    """What this client kept from its last round (SCAFFOLD: c_i); empty the first time."""
    data: "ClientData"
    """The client's samples."""
    lr: float

    @property
    def anchor(self) -> Tree:
        """The broadcast model's parameters."""
        return self.model.params


@dataclass(frozen=True)
class Finished:
    """How a client rule ends its round."""

    model: Model
    """What the server gets to see."""
    kept: State = field(default_factory=dict)
    """What the client keeps for its next round."""
    sent: Tree | None = None
    """What it sends beside its model; the server sees the plain mean of it over the cohort (SCAFFOLD: c_i's change)."""
    report: Tensor | None = None
    """One number that the server sees from each client (LoAdaBoost: its final loss)."""


@dataclass(frozen=True)
class Adaptation:
    """How a client makes the global model its own: a rule and an optimizer for the local loop."""

    client: "Client"
    optimizer: ClientOptimizer
    lr: float
    steps: int | None = None
    """At most so many; None = what the rule says."""


class Client(Protocol):
    """The local algorithm: a gradient oracle, and what goes on around the local loop (written once, in `local.py`).

    Its arithmetic is elementwise on trees, so that the same lines serve one client or a stack of clients.
    `client/sgd.py` has the plain answer to everything but `gradient`.
    """

    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def traffic(self) -> tuple[int, int]:
        """Models' worth of numbers down and up for each client (SCAFFOLD: 2 and 2)."""
        ...

    @property
    def personal(self) -> bool:
        """Whether the method is about each client's own model, which is then evaluated too."""
        ...

    @property
    def extra_batches(self) -> int:
        """How many batches of `data.extra` a step takes beside its own (Per-FedAvg)."""
        ...

    @property
    def looks_back(self) -> bool:
        """Whether `finish` goes over the client's data again."""
        ...

    def check(self, optimizer: ClientOptimizer) -> None:
        """Refuse a client optimizer that the rule's derivation excludes."""
        ...

    def init(self, params: Tree) -> State:
        """What the server remembers for the rule and sends out with the model."""
        ...

    def start(self, context: Context) -> Model:
        """Where local training begins."""
        ...

    def plan(self, context: Context, loss: Callable[[], float]) -> Iterator[int]:
        """Epochs to train, block after block; `loss` is that of the present parameters over the client's data."""
        ...

    def gradient(
        self, task: "Task", params: Tree, buffers: Tree, batch: Batch, context: Context
    ) -> tuple[Tree, Tensor]:
        """(direction to descend, loss) at `params`."""
        ...

    def finish(self, model: Model, steps: int, context: Context) -> Finished:
        """After the last of `steps` steps."""
        ...

    def merge(self, state: State, cohort: "Cohort", num_clients: int) -> State:
        """The server's memory for the rule, after a round."""
        ...

    def adaptation(self, optimizer: ClientOptimizer, lr: float) -> Adaptation:
        """How a client's personal model comes out of the global one."""
        ...


@dataclass(frozen=True)
class Probe:
    """What an aggregator has every client measure at the broadcast model, on its unlabelled subset B_k."""

    step: Callable[["Task", Model, Tree, Tensor, "Tensor | None"], Tree]
    """What is known after a batch, from what was known before it (zeros at first). The last argument says which rows
    of the batch are samples, where not all are."""
    end: Callable[[Tree, "int | Tensor"], Tree] | None
    """What is sent, after so many batches (1 at least); None: what was known last."""
    batch_size: int | None
    """None: the batch size the client trains with."""
    mixes: bool
    """Whether it reads batch norm with the batch's own statistics."""


@dataclass(frozen=True)
class Direction:
    """What the server optimizer descends, and what the aggregator wants remembered and logged."""

    tree: Tree
    state: State = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Values under names of the metrics table; they stay on the device until the round's one fetch."""
    layers: dict[str, Tensor] = field(default_factory=dict)
    """One value for each parameter tensor ([L]), by column of layers.csv."""
    origin: Tree | None = None
    """Where the step starts, if not at the model as it was: the same function in a wider network (PFNM)."""
    buffers: Tree | None = None
    """The next model's buffers, if not the cohort's average (FedAsync)."""


class Aggregator(Protocol):
    """Cohort -> direction. The server optimizer takes the step."""

    @property
    def weighting(self) -> str: ...
    @property
    def evaluate(self) -> str: ...
    @property
    def extra_uploads(self) -> int:
        """Models' worth of numbers a client sends up for the aggregator beside its model (elastic: sensitivities)."""
        ...

    @property
    def individual(self) -> bool:
        """Whether it needs each client's model, not only their sums (PFNM)."""
        ...

    @property
    def lengths(self) -> bool:
        """Whether it needs the clients' mean length, ||delta_k|| (FedNNNN's E), as the server may know it."""
        ...

    @property
    def probe(self) -> Probe | None: ...
    def init(self, params: Tree) -> State: ...
    def direction(self, cohort: "Cohort", state: State) -> Direction: ...


Clock = dict[str, float | list[list[float]]]
"""The virtual clock's state in plain numbers: {"now": seconds}, and for asynchronous training who is on the way."""


@dataclass(frozen=True)
class Turn:
    """Who trains in a round, and on what."""

    sampled: Sequence[int]
    """Those the model was sent to."""
    clients: Sequence[int]
    """Those whose update arrives, in ascending order."""
    effort: Mapping[int, float]
    """Share of its steps that a client manages, where that is not all of them."""
    version: int
    """The round whose model they were sent: an earlier one in asynchronous training."""
    clock: Clock
    """After the round."""
    sent: int
    """How many times the model was sent out."""
    discarded: int = 0
    """Updates that came too late to be used."""


class Participation(Protocol):
    def __call__(self, seed: int, round: int, steps: Sequence[int], clock: Clock) -> Turn:
        """`steps` are those every client would take in a round; there are as many entries as clients."""
        ...

    def count(self, num_clients: int) -> int:
        """How many train at the same time."""
        ...

    def foreseen(self, seed: int, round: int, num_clients: int) -> Sequence[int] | None:
        """Who will train in a round, each taking all of its steps; None: that is not known before."""
        ...


def nobody_knows(round: int) -> None:
    """Who will train in a round that is yet to come."""


@dataclass(frozen=True)
class Work:
    """Everything a client needs in one round; the same for all of them."""

    task: "Task"
    data: "FederatedData"
    client: Client
    optimizer: ClientOptimizer
    probe: Probe | None
    model: Model
    """As it was broadcast."""
    server: Model
    """As it is now, which updates are measured against; another one only in asynchronous training."""
    shared: State
    lr: float
    seed: int
    round: int
    states: Mapping[int, State]
    """What each client kept from its last round, for those that kept anything."""
    effort: Mapping[int, float] = field(default_factory=dict)
    individual: bool = False
    lengths: bool = False
    privacy: "Privacy | None" = None
    sampled: Sequence[int] = ()
    staleness: int = 0
    """Updates the server has made since the clients were sent their model."""
    foreseen: Callable[[int], Sequence[int] | None] = nobody_knows
    """Who will train in a round that is yet to come, where that is known."""
    whole: bool = False
    """Whether the server's half of the round is a program that may begin with the clients' (`Deferred`)."""

    @property
    def measures_together(self) -> bool:
        """Whether a program measures for several clients at a time, and gives their sum: nobody has to see them one by
        one."""
        apart = self.individual or (self.privacy is not None and self.privacy.active)
        return self.probe is not None and not apart


class Engine(Protocol):
    """Trains the cohort and reduces it. Neither algorithms nor aggregators can see which engine runs them."""

    def __call__(self, work: Work, clients: Sequence[int], weights: Sequence[float]) -> "Cohort | Deferred": ...
    def evaluate(self, work: Work, part: str, batch_size: int) -> "Evaluation | Pending":
        """Of work.model, on the `test` set or on what the clients `train` on; now, or beside the rounds to come."""
        ...
