"""Dropout whose masks are a function of (seed, round, client, step), on any device and for any number of clients at
once, and not of a generator's state: so the same clients drop the same units whichever engine trains them."""

import torch
from torch import Tensor, nn

KEY = "dropout.key"
"""Where the buffers of a model in training carry the step's key, two 32-bit words."""


class Dropout(nn.Module):
    """nn.Dropout: while training, a share p of the units is 0 and the others grow by 1 / (1 - p).

    Unit i is kept where a hash of (key, i) is large enough; mixing constants by C. Wellons ("lowbias32")."""

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.register_buffer("key", torch.zeros(2, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        unit = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
        drawn = mixed(mixed(unit ^ self.key[0]) ^ self.key[1]) & 0x7FFFFFFF
        return torch.where(drawn >= int(self.p * 2**31), x / (1 - self.p), 0) if self.p < 1 else x * 0


def mixed(x: Tensor) -> Tensor:
    """A hash of 32-bit integers: every bit of the input may change every bit of the output."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)


def replace_dropout(module: nn.Module) -> None:
    """Put it in the place of every plain nn.Dropout inside a model."""
    for name, child in module.named_children():
        if type(child) is nn.Dropout:
            setattr(module, name, Dropout(child.p))
        else:
            replace_dropout(child)
