"""The model of the two-client quadratic: a single number."""

import torch
from torch import Tensor, nn

from fedsim import check


class Quadratic(nn.Module):
    """One scalar x; a sample (a, b) makes the output a x^2 + b x, which is itself the loss (supplement Sec. 9.5)."""

    def __init__(self, start: float, input_shape: tuple[int, ...], num_classes: int) -> None:
        check.number("start", start)
        super().__init__()
        if input_shape != (2,):
            raise check.InputError("model=quadratic goes with dataset=quadratic only: its samples are pairs (a, b)")
        self.x = nn.Parameter(torch.tensor([float(start)]))

    def forward(self, sample: Tensor) -> Tensor:
        return sample[:, :1] * self.x.square() + sample[:, 1:] * self.x
