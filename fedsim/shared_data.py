"""Shared data: a small global set G, a portion of which every client trains on beside its own. Zhao et al. 2018; the
FedAvg slides.

    beta = |G| / |D| ,   G with equal numbers of every class,   every client adds a random portion alpha of G,
    and training starts from a model warmed up on G.

G is taken out of the training data before it is partitioned, so that the clients' data D is what is left. A client's
earth mover's distance is  EMD_k = sum_c |p_k(c) - p(c)| , over what it trains on against the whole population.
"""

from dataclasses import dataclass

import numpy as np

from fedsim import check, local, rng
from fedsim.client.sgd import Sgd
from fedsim.data import FederatedData, Split
from fedsim.task import Task
from fedsim.types import ClientOptimizer, Model, Work


@dataclass(frozen=True)
class SharedData:
    beta: float
    alpha: float
    warmup_epochs: int

    def __post_init__(self) -> None:
        check.number("beta", self.beta, ge=0, le=1)
        check.number("alpha", self.alpha, ge=0, le=1)
        check.integer("warmup_epochs", self.warmup_epochs, ge=0)

    def draw(self, labels: np.ndarray, seed: int) -> np.ndarray:
        """Positions of G."""
        if not self.beta:
            return np.empty(0, np.int64)
        if labels.ndim > 1:
            raise check.BadValue("beta", self.beta, "must be 0: sequences have no label that G could be balanced by")
        size = round(self.beta / (1 + self.beta) * len(labels))
        classes = np.unique(labels)
        if size < len(classes):
            raise check.BadValue("beta", self.beta, f"leaves less than one sample for each of {len(classes)} classes")
        generator, drawn = rng.generator(seed, "global set"), []
        for place, label in enumerate(classes):
            members = np.flatnonzero(labels == label)
            wanted = size // len(classes) + (place < size % len(classes))
            if wanted > len(members):
                raise check.BadValue("beta", self.beta, f"class {label} has only {len(members)} samples")
            drawn.append(generator.permutation(members)[:wanted])
        return np.sort(np.concatenate(drawn))


def earth_movers_distance(counts: np.ndarray, population: np.ndarray) -> np.ndarray:
    """Of every row (how often a client has each label) from the population's; between 0 and 2."""
    own = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return np.asarray(np.abs(own - population / population.sum()).sum(1))


def warm_up(
    task: Task, data: FederatedData, optimizer: ClientOptimizer, model: Model, epochs: int, batch_size: int | None
) -> Model:
    """The model trained on G, as one client that holds all of it would."""
    everything = Split(data.global_set, np.array([0, len(data.global_set)]), np.zeros(1, np.int64))
    work = Work(
        task=task,
        data=FederatedData(data.dataset, everything, data.seed),
        client=Sgd(epochs, batch_size),
        optimizer=optimizer,
        probe=None,
        model=model,
        server=model,
        shared={},
        lr=optimizer.lr,
        seed=data.seed,
        round=0,
        states={},
    )
    return local.descend(work, 0, "warm-up")[0].model
