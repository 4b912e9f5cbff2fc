"""A layer of an LSTM (lstm.cpp has the equations), for a batch of few rows: torch's own kernel, oneDNN's, takes 1.1 to
1.5 times as long, and MKL's products are slower too."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedsim.native import NUMBERS, library, party

SPARE = 32
"""Numbers more in a row of gates than there are, at least: room for whole vectors, and one between rows."""


def layer(x: Tensor, w: Tensor, r: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(h, c, gates) of inputs [N, T, I] under weights [4H, I] and [4H, H]."""
    h, c, gates = outputs(x, w, r, bias)
    _call("forward", _sizes(x, r, gates), x, w, r, bias, h, c, gates)
    return h, c, gates


def gradients(
    of_h: Tensor, x: Tensor, h: Tensor, c: Tensor, gates: Tensor, w: Tensor, r: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x, both weights and the bias."""
    found = like(of_h, x, h, c, gates, w, r)
    _call("backward", _sizes(x, r, gates), of_h, x, h, c, gates, w, r, *found)
    return found


def outputs(x: Tensor, w: Tensor, r: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where a layer goes."""
    (n, time, _), (wide, hidden) = x.shape, r.shape
    return x.new_empty(n, time, hidden), x.new_empty(n, time, hidden), x.new_empty(n, time, wide + SPARE)


def like(
    of_h: Tensor, x: Tensor, h: Tensor, c: Tensor, gates: Tensor, w: Tensor, r: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where its gradients go."""
    return torch.empty_like(x), torch.empty_like(w), torch.empty_like(r), w.new_empty(len(w))


class Sizes(ctypes.Structure):
    """`Lstm` of lstm.cpp."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("n", "time", "inputs", "hidden", "width", "threads"))


def _sizes(x: Tensor, r: Tensor, gates: Tensor) -> Sizes:
    return Sizes(*x.shape, r.shape[1], gates.shape[2], party.processors())


def _call(name: str, sizes: Sizes, *tensors: Tensor) -> None:
    getattr(_typed(tensors[0].dtype), name)(*(t.data_ptr() for t in tensors), sizes)


@cache
def _typed(dtype: torch.dtype) -> Any:
    found, pointer, sizes = library("lstm", NUMBERS[dtype]), ctypes.c_void_p, ctypes.POINTER(Sizes)
    found.forward.argtypes, found.forward.restype = (*[pointer] * 7, sizes), None
    found.backward.argtypes, found.backward.restype = (*[pointer] * 11, sizes), None
    return found
