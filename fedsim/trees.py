"""Nested dicts, tuples and lists of tensors. torch's own pytree asks at every node what kinds there are; ours are few,
and small models go through here many times in a millisecond."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, dict):
        for node in tree.values():
            _collect(node, found)
    elif isinstance(tree, tuple | list):
        for node in tree:
            _collect(node, found)
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
    return None if like is None else next(leaves)


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A tree of the same form, leaf by leaf; the others have that form too."""
    if not others:
        return rebuilt(tree, map(function, leaves(tree)))
    return rebuilt(tree, map(function, leaves(tree), *map(leaves, others)))


def length(tree: Any) -> Tensor:
    """The L2 norm of all tensors together."""
    return torch.stack([t.square().sum() for t in leaves(tree)]).sum().sqrt()
