"""What goes from one process to another: nested dicts, lists and dataclasses, their tensors in one piece of shared
memory. The memory stays and is written again and again: to share a new piece costs more than to fill it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16


@dataclass(frozen=True)
class Place:
    """Where a tensor was."""

    number: int


@dataclass(frozen=True)
class Parcel:
    memory: Tensor | None
    """Bytes; None: the same as the last time but one."""
    shapes: list[tuple[int, torch.dtype, torch.Size]]
    """Where each tensor begins, and what it is."""
    rest: Any
    """The structure, with a Place for each tensor."""


class Outbox:
    """The sender's side. It has two pieces of memory and takes them in turns: what was sent stays as it is until the
    second parcel after it is packed."""

    def __init__(self) -> None:
        self._pieces = [torch.empty(0, dtype=torch.uint8)] * 2

    def pack(self, content: Any) -> Parcel:
        tensors: list[Tensor] = []

        def placed(tensor: Tensor) -> Place:
            tensors.append(tensor)
            return Place(len(tensors) - 1)

        rest = walked(content, lambda node: isinstance(node, Tensor), placed)
        shapes, size = [], 0
        for t in tensors:
            shapes.append((size, t.dtype, t.shape))
            size += -(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT
        memory = self._pieces.pop(0)
        device = tensors[0].device if tensors else memory.device
        # On a GPU it is a new piece each time: torch then orders what the two processes do with it.
        new = size > len(memory) or device.type != "cpu"
        if new:
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                memory.share_memory_()  # type: ignore[no-untyped-call]
        self._pieces.append(memory)
        for t, place in zip(tensors, views(memory, shapes), strict=True):
            place.copy_(t)
        return Parcel(memory if new else None, shapes, rest)


class Inbox:
    """The receiver's."""

    def __init__(self) -> None:
        self._pieces = [torch.empty(0, dtype=torch.uint8)] * 2

    def unpack(self, parcel: Parcel, copy: bool) -> Any:
        """The content. Unless copied, its tensors are in the shared memory, and only lent."""
        memory = self._pieces.pop(0)
        memory = memory if parcel.memory is None else parcel.memory
        self._pieces.append(memory)
        tensors = [t.clone() if copy else t for t in views(memory, parcel.shapes)]
        return walked(parcel.rest, lambda node: isinstance(node, Place), lambda place: tensors[place.number])


def walked(node: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """A structure of the same form, with the wanted things in it changed."""
    if wanted(node):
        return change(node)
    if isinstance(node, Mapping):
        return {key: walked(value, wanted, change) for key, value in node.items()}
    if isinstance(node, list):
        return [walked(value, wanted, change) for value in node]
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{f.name: walked(getattr(node, f.name), wanted, change) for f in fields(node)})
    return node


def views(memory: Tensor, shapes: Sequence[tuple[int, torch.dtype, torch.Size]]) -> Iterator[Tensor]:
    for start, dtype, shape in shapes:
        size = shape.numel() * dtype.itemsize
        yield memory[start : start + size].view(dtype).view(shape)
