"""Nested dicts, tuples and lists of tensors. torch's own pytree asks at every node what kinds there are; ours are few,
and small models go through here many times in a millisecond."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lot:
    """Where one of the tensors lies that are packed together."""

    name: str
    piece: int
    count: int
    shape: tuple[int, ...]
    """As it lies: channels come last, if `last`."""
    last: bool


class Form:
    """How a tree is packed. There is one of each kind: two trees are packed alike if they have the same."""

    def __init__(self, lots: tuple[Lot, ...]) -> None:
        self.lots = lots
        self.counts = [[lot.count for lot in lots if lot.piece == piece] for piece in sorted({x.piece for x in lots})]
        self._on: dict[torch.device, Tensor] = {}

    def counts_on(self, device: torch.device) -> Tensor:
        """Of the first piece."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.counts[0], device=device)
        return self._on[device]

    def __reduce__(self) -> Any:
        return the_form, (self.lots,)


@cache
def the_form(lots: tuple[Lot, ...]) -> Form:
    return Form(lots)


@dataclass(frozen=True)
class Packed(Mapping[str, Tensor]):
    """A tree whose tensors lie one after another in a single one (one for each kind of number), filters with channels
    last, and are views of it, made when they are asked for: what is done with all of a model is one operation, not one
    for each of its layers."""

    form: Form
    pieces: list[Tensor]

    @staticmethod
    def of(tree: Mapping[str, Tensor], filters: Container[str] = ()) -> "Packed":
        """`filters`: names of convolutions' weights."""
        pieces: dict[torch.dtype, list[Tensor]] = {t.dtype: [] for t in tree.values()}
        number = {kind: number for number, kind in enumerate(pieces)}
        lots = []
        for name, t in tree.items():
            last, kind = t.ndim == 4 and name in filters, t.dtype
            lying = t.permute(0, 2, 3, 1) if last else t
            lots.append(Lot(name, number[kind], t.numel(), tuple(lying.shape), last))
            pieces[kind].append(lying.reshape(-1))
        return Packed(the_form(tuple(lots)), [torch.cat(parts) for parts in pieces.values()])

    def rows(self) -> dict[str, Tensor]:
        """Each tensor as one row of numbers."""
        parts = [iter(torch.split(*each)) for each in zip(self.pieces, self.form.counts, strict=True)]
        return {lot.name: next(parts[lot.piece]) for lot in self.form.lots}

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        lying = {lot: row.view(lot.shape) for lot, row in zip(self.form.lots, self.rows().values(), strict=True)}
        return {lot.name: t.permute(0, 3, 1, 2) if lot.last else t for lot, t in lying.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self.form.lots)


def rows(tree: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A model layer by layer, where the form of a layer's tensor does not matter."""
    return tree.rows() if isinstance(tree, Packed) else tree


def spread(values: Sequence[Tensor], like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A number for each layer, to be combined with all of the layer's."""
    if not isinstance(like, Packed) or len(like.pieces) > 1:
        return dict(zip(like, values, strict=True))
    numbers, counts = torch.stack(list(values)), like.form.counts_on(values[0].device)
    return Packed(like.form, [torch.repeat_interleave(numbers, counts, output_size=len(like.pieces[0]))])


def packed(tree: Mapping[str, Tensor], filters: Container[str] = ()) -> Packed:
    return tree if isinstance(tree, Packed) else Packed.of(tree, filters)


def packed_alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return isinstance(a, Packed) and isinstance(b, Packed) and a.form is b.form


def pairs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Two models' tensors side by side: layer by layer, or all in one where they are packed alike."""
    if packed_alike(a, b):
        assert isinstance(a, Packed)
        assert isinstance(b, Packed)
        return a.pieces, b.pieces
    return list(a.values()), [b[name] for name in a]


def combined(
    function: Callable[[list[Tensor], list[Tensor]], Iterable[Tensor]], a: Mapping[str, Tensor], b: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """A model of two, by a function of their tensors side by side, which looks at each number apart."""
    one, other = pairs(a, b)
    found = function(one, other)
    if isinstance(a, Packed) and one is a.pieces:
        return Packed(a.form, list(found))
    return dict(zip(a, found, strict=True))


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return combined(torch._foreach_sub, a, b)


def leaves(tree: Any, forms: list[Form] | None = None) -> list[Any]:
    """Those of what is packed are its pieces; `forms` is given how."""
    found: list[Any] = []
    _collect(tree, found, forms)
    return found


def _collect(tree: Any, found: list[Any], forms: list[Form] | None) -> None:
    if isinstance(tree, dict):
        for node in tree.values():
            _collect(node, found, forms)
    elif isinstance(tree, tuple | list):
        for node in tree:
            _collect(node, found, forms)
    elif isinstance(tree, Packed):
        found += tree.pieces
        if forms is not None:
            forms.append(tree.form)
    elif tree is not None:
        found.append(tree)


def rebuilt(like: Any, leaves: Iterator[Any]) -> Any:
    """A tree of the same form with these leaves."""
    if isinstance(like, dict):
        return {name: rebuilt(node, leaves) for name, node in like.items()}
    if isinstance(like, tuple):
        return tuple(rebuilt(node, leaves) for node in like)
    if isinstance(like, list):
        return [rebuilt(node, leaves) for node in like]
    if isinstance(like, Packed):
        return Packed(like.form, [next(leaves) for _ in like.pieces])
    return None if like is None else next(leaves)


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A tree of the same form, leaf by leaf; the others have that form too."""
    if not others:
        return rebuilt(tree, map(function, leaves(tree)))
    return rebuilt(tree, map(function, leaves(tree), *map(leaves, others)))


def length(tree: Any) -> Tensor:
    """The L2 norm of all tensors together."""
    return torch.stack([t.square().sum() for t in leaves(tree)]).sum().sqrt()
