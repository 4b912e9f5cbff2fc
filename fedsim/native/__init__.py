"""Kernels for a single thread of a CPU that torch lacks, in C++: compiled as torch compiles its own programs, and kept
where it keeps them, the first time they are asked for."""

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

X86 = platform.machine() in ("x86_64", "AMD64")
"""What they were measured on; elsewhere torch's own are taken."""
NUMBERS = {torch.float32: "float", torch.float64: "double"}


def serves(t: Tensor) -> bool:
    """Whether there may be a kernel for it here."""
    return X86 and t.device.type == "cpu" and t.dtype in NUMBERS


@cache
def library(name: str, *parameters: str) -> ctypes.CDLL:
    """What `name`.cpp exports for these parameters."""
    from torch._inductor.codecache import CppCodeCache  # takes seconds to import

    folder = Path(__file__).parent
    source = "\n".join((folder / file).read_text() for file in ("vectors.hpp", f"{name}.cpp"))
    found: ctypes.CDLL = CppCodeCache.load(
        f"{source}\nEXPORT({', '.join(parameters)})\n",
        extra_flags=("-march=native", "-ffp-contract=fast", "-ftree-loop-vectorize"),
    )
    return found
