"""Data on the device: whole datasets as tensors, indexed there client by client. No DataLoader in the round."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim import check, rng
from fedsim.types import Batch

GATHERED = 2**22
"""Bytes of a client's samples that are gathered at a time."""
PADDING = 4  # pixels around a training image before it is cropped back, as is customary for CIFAR
PAD = 0
"""The token that stands for nothing: in a sequence's inputs, and as the target of positions that have none."""


@dataclass(frozen=True)
class Dataset:
    """Samples as stored (images and characters as bytes) and how a batch of them becomes the model's input:
    x * scale + shift, or the tokens themselves."""

    train_x: Tensor
    train_y: Tensor
    """[N], or [N, T] for sequences with a target at every position."""
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    scale: Tensor
    shift: Tensor
    augment: bool = False
    """Random crop and horizontal flip of training images."""
    classification: bool = True
    """False: the model's output is itself the loss (the quadratic), labels only say whose sample it is."""
    tokens: bool = False
    """Samples are sequences of token numbers."""
    train_client: np.ndarray | None = None
    """Whose each training sample is, as a place in `client_names`; None where the data do not say."""
    test_client: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    coarse: np.ndarray | None = None
    """Coarse label of each class, where there is a hierarchy (CIFAR-100)."""
    fingerprint: str = ""
    """Equal for equal data, on any machine; empty: made from the tensors when needed."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train_x.shape[1:])

    @property
    def sequence(self) -> bool:
        """Whether every position of a sample has a target of its own."""
        return self.train_y.ndim > 1

    @property
    def sample_bytes(self) -> int:
        return self.train_x.nbytes // max(len(self.train_x), 1)

    def to(self, device: torch.device) -> "Dataset":
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def inputs(self, x: Tensor) -> Tensor:
        """Model inputs from stored samples: float32, standardised; or token numbers."""
        if self.tokens:
            return x.long()
        floats = x.to(self.scale.dtype)
        scaled = floats * self.scale if floats is x else floats.mul_(self.scale)  # what is stored stays as it is
        return scaled.add_(self.shift)

    def population(self, positions: np.ndarray) -> "Population":
        """The training samples at some positions, as a partition sees them."""
        owner = None if self.train_client is None else self.train_client[positions]
        return Population(self.train_y.cpu().numpy()[positions], owner, self.coarse)

    def identity(self) -> str:
        """The fingerprint, made from the samples where no file gave one."""
        if self.fingerprint:
            return self.fingerprint
        decides = ("train_x", "train_y", "test_x", "test_y", "train_client", "test_client", "coarse")
        samples = {k: v for k, v in vars(self).items() if k in decides and v is not None}
        return fingerprint({k: v.cpu().numpy() if isinstance(v, Tensor) else v for k, v in samples.items()})


@dataclass(frozen=True)
class Population:
    """What a partition may go by."""

    labels: np.ndarray
    clients: np.ndarray | None = None
    """Whose each sample is, where the data say so."""
    coarse: np.ndarray | None = None
    """Coarse label of each class, where there is a hierarchy."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def one_label(self) -> np.ndarray:
        """The label of each sample, for laws that go by labels."""
        if self.labels.ndim > 1:
            raise check.InputError(
                "partition: this dataset has a target at every position and no label a sample could be dealt by; "
                "use partition=natural or partition=iid"
            )
        return self.labels


def fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
    """Equal for equal content, whatever machine or file format it comes from."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        little = np.ascontiguousarray(arrays[name])
        little = little.astype(little.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name} {little.dtype.str} {little.shape};".encode())
        digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def standardization(mean: list[float], std: list[float], active: bool) -> tuple[Tensor, Tensor]:
    """(scale, shift) that take bytes to (x/255 - mean)/std for each channel, or only to [0, 1]."""
    m, s = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
    return (1 / (255 * s), -m / s) if active else (torch.full_like(s, 1 / 255), torch.zeros_like(m))


@dataclass(frozen=True)
class Split:
    """Which samples are whose. Client k holds indices[offsets[k]:offsets[k+1]], in random order; the first
    held[k] of them are its sensitivity subset B_k, the rest is D_k, on which it trains."""

    indices: np.ndarray
    offsets: np.ndarray
    held: np.ndarray
    codes: np.ndarray | None = None
    """Which of the dataset's own clients each one is, where they are the dataset's own."""

    @property
    def num_clients(self) -> int:
        return len(self.held)

    @cached_property
    def sizes(self) -> np.ndarray:
        """|D_k| of every client."""
        return np.asarray(np.diff(self.offsets) - self.held)

    def training(self, client: int) -> np.ndarray:
        """D_k, as positions in the dataset."""
        return self.indices[self.offsets[client] + self.held[client] : self.offsets[client + 1]]

    def sensitivity(self, client: int) -> np.ndarray:
        """B_k, as positions in the dataset."""
        return self.indices[self.offsets[client] : self.offsets[client] + self.held[client]]

    def fingerprint(self) -> str:
        """Equal for equal splits, on any machine."""
        digest = hashlib.sha256()
        for part in (self.offsets, self.held, self.indices):
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class FederatedData:
    """A dataset and who holds what of it."""

    dataset: Dataset
    split: Split
    seed: int
    global_set: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """G, positions of the samples that belong to no client (shared_data)."""
    portion: int = 0
    """How many samples of G each client adds to its own."""
    partition_key: str = ""
    """What the split was asked for: (data, law, parameters, seed)."""

    @property
    def num_clients(self) -> int:
        return self.split.num_clients

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many samples every client trains on: |D_k|, and its portion of G."""
        return self.split.sizes + self.portion

    def training(self, client: int) -> np.ndarray:
        """What a client trains on: D_k, and its own random portion of G."""
        own = self.split.training(client)
        if not self.portion:
            return own
        drawn = rng.sample(rng.generator(self.seed, "shared", client), len(self.global_set), self.portion)
        return np.concatenate([own, self.global_set[drawn]])

    def client(self, client: int, round: int, batch_size: int | None, purpose: str = "batches") -> "ClientData":
        """A client's samples, in the order that is this round's (and this purpose's)."""
        return ClientData(self, client, round, batch_size, purpose)

    def begun(self, clients: Sequence[int], round: int, batch_size: int | None) -> dict[int, "ClientData"]:
        """The data of the first of these clients, as many as there is room for, with their first samples gathered:
        between two clients' arithmetic, which leaves nothing of it in the cache, Python takes ten times as long."""
        held = np.cumsum(self.sizes[list(clients)]) * self.dataset.sample_bytes
        fitting = max(int((held <= GATHERED).sum()), 1)
        found = {k: self.client(k, round, batch_size) for k in clients[:fitting]}
        for data in found.values():
            data.begin()
        return found

    @property
    def all_training(self) -> np.ndarray:
        """What the clients train on, one client after another."""
        return np.concatenate([self.training(k) for k in range(self.num_clients)])

    def label_counts(self) -> np.ndarray:
        """[clients, classes]: what every client trains on; for sequences, how often each token is a target."""
        labels, classes = self.dataset.train_y.cpu().numpy()[self.all_training], self.dataset.num_classes
        owner = np.repeat(np.arange(self.num_clients), self.sizes)
        if self.dataset.sequence:
            owner, labels = np.repeat(owner, labels.shape[1]), labels.ravel()
            owner, labels = owner[labels != PAD], labels[labels != PAD]
        table = np.bincount(owner * classes + labels, minlength=self.num_clients * classes)
        return table.reshape(self.num_clients, classes)

    def sensitivity_batches(self, clients: Sequence[int], batch_size: int | None) -> Iterator[Iterable[Tensor]]:
        """B_k of each client without its labels, in the order in which it was drawn, with samples as they are stored;
        gathered together, unless there are many."""
        held = [self.on_device(self.split.sensitivity(client)) for client in clients]
        table, sizes = self.dataset.train_x, [len(own) for own in held]
        together = sum(sizes) * self.dataset.sample_bytes <= GATHERED
        places = torch.split(rows(table, torch.cat(held)), sizes) if together else held
        for own in places:
            batches = torch.split(own, batch_size or len(own)) if len(own) else ()
            yield batches if together else (rows(table, index) for index in batches)

    @cached_property
    def training_set(self) -> Tensor:
        """Positions of all samples that some client trains on."""
        return self.on_device(np.unique(self.all_training))

    def on_device(self, array: np.ndarray) -> Tensor:
        # Not non_blocking: the array is a temporary, and MPS would read it after it is gone.
        return torch.from_numpy(array).to(self.dataset.train_y.device)


class ClientData:
    """One client's samples in one round. Going over them twice goes on where the first time ended."""

    def __init__(self, whole: FederatedData, client: int, round: int, batch_size: int | None, purpose: str) -> None:
        self._whole, self.own = whole, whole.training(client)
        self._size = batch_size or len(self.own)
        self._order = rng.generator(whole.seed, purpose, round, client)
        self._augment = rng.generator(whole.seed, "augment", round, client) if whole.dataset.augment else None
        self._extra = (whole.seed, f"{purpose}, extra", round, client)
        self._begun: Iterator[Batch] | None = None

    def __len__(self) -> int:
        return len(self.own)

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-len(self) // self._size)

    def batches(self, epochs: int) -> Iterator[Batch]:
        """The training batches: each epoch a fresh order of the samples, the last batch may be short."""
        return (self.input(batch) for batch in self.stored(epochs))

    def stored(self, epochs: int) -> Iterator[Batch]:
        """The same, with samples as they are stored: gathered many at a time, handed out batch by batch."""
        begun, self._begun = self._begun, None
        return self._stored(epochs) if begun is None else chain(begun, self._stored(epochs - 1))

    def _stored(self, epochs: int) -> Iterator[Batch]:
        size, at_once = self._size, self._size * self._at_once
        for positions, draws in self.orders(epochs):
            order, crops = self._whole.on_device(positions), None if draws is None else self._whole.on_device(draws)
            for first in range(0, len(self), at_once):
                x, y = self._samples(order[first : first + at_once])
                if crops is not None:
                    x = crop_and_flip(x, crops[first : first + at_once])
                yield from zip(torch.split(x, size), torch.split(y, size), strict=True)

    @property
    def _at_once(self) -> int:
        """Batches that are gathered together."""
        return max(GATHERED // max(self._size * self._whole.dataset.sample_bytes, 1), 1)

    def begin(self) -> None:
        """Gather the first samples before they are asked for."""
        rest = self._stored(1)
        self._begun = chain([*islice(rest, self._at_once)], rest)

    def input(self, stored: Batch) -> Batch:
        """What the model is given of a batch."""
        return self._whole.dataset.inputs(stored[0]), stored[1]

    def _samples(self, index: Tensor) -> Batch:
        dataset = self._whole.dataset
        return rows(dataset.train_x, index), rows(dataset.train_y, index)

    def orders(self, epochs: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """The samples' positions in the dataset, each epoch in a fresh order, and how each is cropped."""
        for _ in range(epochs):
            order = self.own[self._order.permutation(len(self))]
            yield order, None if self._augment is None else _draw_crops(self._augment, len(self))

    @cached_property
    def extra(self) -> Iterator[Batch]:
        """More batches, as many as one likes, each drawn afresh and independently of the training batches."""
        return (self.input(batch) for batch in self.stored_extra)

    @cached_property
    def stored_extra(self) -> Iterator[Batch]:
        return (self._samples(self._whole.on_device(positions)) for positions in self.drawn())

    def drawn(self) -> Iterator[np.ndarray]:
        """The positions of the extra batches' samples."""
        generator, size = rng.generator(*self._extra), min(self._size, len(self))
        while True:
            yield self.own[rng.sample(generator, len(self), size)]

    def all(self) -> Iterator[Batch]:
        """Every sample once, in a fixed order, as it is."""
        for start in range(0, len(self), self._size):
            yield self.input(self._samples(self._whole.on_device(self.own[start : start + self._size])))


def rows(table: Tensor, index: Tensor) -> Tensor:
    """table[index], copied row by row; by that name it would be element by element."""
    if table.ndim > 1:
        return table.flatten(1).index_select(0, index).view(-1, *table.shape[1:])
    return table.index_select(0, index)


def _draw_crops(generator: rng.Rng, count: int) -> np.ndarray:
    """[count, 3]: row offset, column offset, flip."""
    return generator.randint(0, [2 * PADDING + 1, 2 * PADDING + 1, 2], size=(count, 3), dtype=np.int64)


def crop_and_flip(x: Tensor, draws: Tensor) -> Tensor:
    """Images [B, C, H, W] padded with zeros, cropped back at their own offsets, and mirrored where asked."""
    b, c, h, w = x.shape
    padded = torch.nn.functional.pad(x, (PADDING,) * 4)
    rows = draws[:, :1] + torch.arange(h, device=x.device)  # [B, H]
    straight = torch.arange(w, device=x.device).expand(b, w)
    columns = draws[:, 1:2] + torch.where(draws[:, 2:].bool(), w - 1 - straight, straight)  # [B, W]
    image = torch.arange(b, device=x.device).view(b, 1, 1, 1)
    channel = torch.arange(c, device=x.device).view(1, c, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
