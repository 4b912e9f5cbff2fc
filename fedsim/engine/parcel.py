"""What goes from one process to another: nested dicts, lists and dataclasses, their tensors in one piece of shared
memory. The memory stays and is written again and again: to share a new piece costs more than to fill it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""As torch's own memory has it: kernels may go another way where it is less."""
Shapes = list[tuple[torch.dtype, torch.Size, tuple[int, ...]]]
"""And strides."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor was."""

    number: int


@dataclass(frozen=True)
class Parcel:
    memory: Tensor | None
    """Bytes; None: the same as the last time but one."""
    shapes: Shapes | None
    """What lies there, one tensor after another; None: likewise."""
    rest: list[Any]
    """The structure, with a Place for each tensor; empty: likewise."""


@dataclass
class Piece:
    """Some memory, and what lies in it at present."""

    memory: Tensor
    shapes: Shapes
    tensors: list[Tensor]
    rest: list[Any]
    content: Any
    """The receiver's: the structure with these tensors in it, as long as all of that is the same."""

    @staticmethod
    def empty() -> "Piece":
        return Piece(torch.empty(0, dtype=torch.uint8), [], [], [], None)

    def hold(self, shapes: Shapes) -> None:
        """Give every tensor its part of the memory."""
        self.shapes, self.tensors, start = shapes, [], 0
        for dtype, shape, strides in shapes:
            numbers = self.memory[start : start + shape.numel() * dtype.itemsize].view(dtype)
            self.tensors.append(numbers.as_strided(shape, strides))
            start += room(dtype, shape)


def strides(t: Tensor) -> tuple[int, ...]:
    """As it lies in memory: to lay it out anew takes longer than to copy it."""
    whole = t.is_contiguous() or (t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last))
    return t.stride() if whole else t.contiguous().stride()


def room(dtype: torch.dtype, shape: torch.Size) -> int:
    return -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Outbox:
    """The sender's side. It has two pieces of memory and takes them in turns: what was sent stays as it is until the
    second parcel after it is packed."""

    def __init__(self) -> None:
        self._pieces = [Piece.empty(), Piece.empty()]

    def pack(self, content: Any) -> Parcel:
        tensors: dict[int, Tensor] = {}  # one that stands in two places goes once
        numbers: dict[int, Place] = {}

        def placed(tensor: Tensor) -> Place:
            tensors[id(tensor)] = tensor
            return numbers.setdefault(id(tensor), Place(len(numbers)))

        rest = [walked(content, Tensor, placed)]
        shapes = [(t.dtype, t.shape, strides(t)) for t in tensors.values()]
        piece = self._pieces.pop(0)
        self._pieces.append(piece)
        device = next((t.device for t in tensors.values()), piece.memory.device)
        size = sum(room(dtype, shape) for dtype, shape, _ in shapes)
        # On a GPU it is a new piece each time: torch then orders what the two processes do with it.
        new, other = size > len(piece.memory) or device.type != "cpu", shapes != piece.shapes
        if new:
            piece.memory = torch.empty(size, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                piece.memory.share_memory_()  # type: ignore[no-untyped-call]
        if new or other:
            piece.hold(shapes)
        if tensors:
            torch._foreach_copy_(piece.tensors, list(tensors.values()))
        other_rest = rest != piece.rest
        piece.rest = rest
        return Parcel(piece.memory if new else None, shapes if new or other else None, rest if other_rest else [])


class Inbox:
    """The receiver's."""

    def __init__(self) -> None:
        self._pieces = [Piece.empty(), Piece.empty()]

    def unpack(self, parcel: Parcel, copy: bool) -> Any:
        """The content. Unless copied, its tensors are in the shared memory, and only lent."""
        piece = self._pieces.pop(0)
        self._pieces.append(piece)
        if parcel.memory is not None:
            piece.memory = parcel.memory
        if parcel.shapes is not None:
            piece.hold(parcel.shapes)
        piece.rest = parcel.rest or piece.rest

        def filled(tensors: list[Tensor]) -> Any:
            return walked(piece.rest[0], Place, lambda place: tensors[place.number])

        if parcel.shapes is not None or parcel.rest:
            piece.content = filled(piece.tensors)
        return filled([t.clone() for t in piece.tensors]) if copy else piece.content


def walked(node: Any, wanted: type, change: Callable[[Any], Any]) -> Any:
    """A structure of the same form, with the wanted things in it changed."""
    if isinstance(node, wanted):
        return change(node)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{f.name: walked(getattr(node, f.name), wanted, change) for f in fields(node)})
    if isinstance(node, Mapping):
        return {key: walked(value, wanted, change) for key, value in node.items()}
    if isinstance(node, list):
        return [walked(value, wanted, change) for value in node]
    return node
