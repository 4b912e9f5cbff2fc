"""Convolutions with 3 x 3 and 5 x 5 filters with a quarter, and little more than a third, of the multiplications
(winograd.cpp has the equation). In float32 the result is some three to ten times as far from the exact one as the plain
sum, at about 2e-6 of its size. oneDNN, with which torch convolves on a CPU, has no such kernel."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedsim.native import NUMBERS, library, serves

TILE = 6
FEW_CHANNELS, FEW_TILES, MANY_FILTERS = 8, 8, 2**16
"""What it does not pay for: with few channels the products are too small, with few tiles, or filters that no cache
holds, the filters' transform costs too much."""


def pays(x: Tensor, weight: Tensor, padding: Sequence[int]) -> bool:
    """For a plain convolution (stride 1, no gaps, no groups)."""
    (n, c, h, w), (k, _, r, s) = x.shape, weight.shape
    if not serves(x) or torch.get_num_threads() > 1 or (r, s) not in ((3, 3), (5, 5)):
        return False
    rows, columns, step = h + 2 * padding[0] - r + 1, w + 2 * padding[1] - s + 1, TILE - r + 1
    tiles = -(-rows // step) * -(-columns // step)
    enough = min(c, k) >= FEW_CHANNELS and c * k <= MANY_FILTERS and n * tiles >= max(FEW_TILES, c * k // 2**11)
    return enough and r * s * rows * columns >= 2 * TILE**2 * tiles  # half of the multiplications at least


def convolution(x: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """Of images [N, C, H, W] with filters [K, C, R, R], channels last."""
    plan = _plan(x.shape, weight.shape, *padding, x.dtype)
    y = torch.empty_strided(plan.shape, plan.strides, dtype=x.dtype)
    plan.library.convolution(x.data_ptr(), weight.data_ptr(), y.data_ptr(), plan.sizes)
    return y


def gradients(grad: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(of the images, of the filters)."""
    of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
    plan = _plan(x.shape, weight.shape, *padding, x.dtype)
    pointers = grad.data_ptr(), x.data_ptr(), weight.data_ptr(), of_x.data_ptr(), of_weight.data_ptr()
    plan.library.gradients(*pointers, plan.sizes)
    return of_x, of_weight


def outputs(x: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """Where a convolution goes."""
    (n, _, h, w), (k, _, r, s) = x.shape, weight.shape
    shape = n, k, h + 2 * padding[0] - r + 1, w + 2 * padding[1] - s + 1
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


class Sizes(ctypes.Structure):
    """`Convolution` of winograd.cpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("n", "h", "w", "c", "k", "top", "left"))


@dataclass(frozen=True)
class Plan:
    """All that is the same for convolutions of the same sizes."""

    library: Any
    sizes: Sizes
    shape: torch.Size
    strides: tuple[int, ...]


@cache
def _plan(x: torch.Size, weight: torch.Size, top: int, left: int, dtype: torch.dtype) -> Plan:
    (n, c, h, w), (k, *_) = x, weight
    y = outputs(torch.empty(x, device="meta"), torch.empty(weight, device="meta"), (top, left))
    return Plan(_typed(weight[2], dtype), Sizes(n, h, w, c, k, top, left), y.shape, y.stride())


@cache
def _typed(r: int, dtype: torch.dtype) -> Any:
    found, pointer, sizes = library("winograd", str(r), NUMBERS[dtype]), ctypes.c_void_p, ctypes.POINTER(Sizes)
    found.convolution.argtypes, found.convolution.restype = (*[pointer] * 3, sizes), None
    found.gradients.argtypes, found.gradients.restype = (*[pointer] * 5, sizes), None
    return found
