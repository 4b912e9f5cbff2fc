"""Fully connected networks: logistic regression (no hidden layer) and multilayer perceptrons."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from fedsim import check


class Mlp(nn.Module):
    """Flattened input, hidden layers with ReLU, logits."""

    def __init__(self, hidden: Sequence[int], input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        if isinstance(hidden, str) or not isinstance(hidden, Sequence):
            raise check.BadValue("hidden", hidden, "must be a list of widths, such as [128] or [200,100]")
        for width in hidden:
            check.integer("hidden", width, ge=1)
        widths = [prod(input_shape), *hidden, num_classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        logits: Tensor = self.layers[-1](x)
        return logits
