"""A model's layers, their kinds, and the norms of an update by layer and part."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsim.trees import combined, rows
from fedsim.types import Tree


@dataclass(frozen=True)
class Layers:
    """Layers are parameter tensors. Parts are groups of them whose norm is taken together: all convolutions, all
    linear layers (where the model has them), and, last, the whole model."""

    names: Sequence[str]
    kinds: Sequence[str]
    parts: Sequence[str]
    members: Tensor
    """[P, L], 1 where the layer belongs to the part."""

    @cached_property
    def filters(self) -> frozenset[str]:
        """Names of convolutions' parameters."""
        return frozenset(name for name, kind in zip(self.names, self.kinds, strict=True) if kind == "conv")

    @staticmethod
    def of(module: nn.Module) -> "Layers":
        kind_of = {
            name: _kind(owner)
            for prefix, owner in module.named_modules()
            for name, _ in owner.named_parameters(prefix=prefix, recurse=False)
        }
        names = [name for name, _ in module.named_parameters()]
        kinds = [kind_of[name] for name in names]
        parts = [part for part in ("conv", "linear") if part in kinds]
        rows = [[float(kind == part) for kind in kinds] for part in parts] + [[1.0] * len(kinds)]
        device = next(module.parameters()).device
        return Layers(names, kinds, [*parts, "all"], torch.tensor(rows, device=device))

    def norms(self, tree: Tree) -> Tensor:
        """L2 norms: [L + P], each layer's, then each part's; the last is the whole model's."""
        squared = rows(combined(torch._foreach_mul, tree, tree))
        squares = torch.stack([squared[name].sum() for name in self.names])
        return torch.cat([squares, (self.members * squares).sum(1)]).sqrt()

    def no_norms(self) -> Tensor:
        """Where nothing has moved."""
        return self.members.new_zeros(len(self.names) + len(self.parts))

    def stacked_norms(self, tree: Tree) -> Tensor:
        """The same of every client of a stack: [K, L + P]."""
        squares = torch.stack([tree[name].flatten(1).square().sum(1) for name in self.names], 1)
        return torch.cat([squares, squares @ self.members.T.to(squares)], 1).sqrt()


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm):
        return "norm"
    return "other"
