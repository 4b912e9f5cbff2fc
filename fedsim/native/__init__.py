"""Kernels for a CPU that torch lacks, in C++: compiled as torch compiles its own programs, and kept
where it keeps them, the first time they are asked for."""

import ctypes
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

X86 = platform.machine() in ("x86_64", "AMD64")
"""What they were measured on; elsewhere torch's own are taken."""
NUMBERS = {torch.float32: "float", torch.float64: "double"}


def serves(t: Tensor) -> bool:
    """Whether there may be a kernel for it here."""
    return X86 and t.device.type == "cpu" and t.dtype in NUMBERS


@dataclass
class Party:
    """Processes with a processor each, of which some have work: a kernel that gives the same whatever its threads are
    takes those of the others, too."""

    members: int = 1
    busy: Tensor | None = None
    """How many have; in memory that they share."""

    def processors(self) -> int:
        """That each of the busy may have."""
        return 1 if self.busy is None else max(self.members // max(int(self.busy), 1), 1)


party = Party()
"""This process's; alone, unless it is told."""


def whole(make: Callable[[], Any]) -> Any:
    """What torch compiles and keeps. Of a process that was killed meanwhile there may be half a file, which torch would
    find and fail to load in every later run."""
    from torch._inductor.runtime.runtime_utils import cache_dir  # type: ignore[attr-defined]

    removed: set[Path] = set()
    while True:
        try:
            return make()
        except Exception as error:
            unread = re.search(r"(?:^|: )(/[^\n]*\.so): ", str(error))
            file = Path(unread[1]) if unread else Path()
            if file in removed or not file.is_relative_to(cache_dir()) or not file.exists():
                raise
            file.unlink()
            removed.add(file)


@cache
def library(name: str, *parameters: str) -> ctypes.CDLL:
    """What `name`.cpp exports for these parameters."""
    from torch._inductor.codecache import CppCodeCache  # takes seconds to import

    folder = Path(__file__).parent
    source = "\n".join((folder / file).read_text() for file in ("vectors.hpp", f"{name}.cpp"))
    code, flags = f"{source}\nEXPORT({', '.join(parameters)})\n", ("-march=native", "-ffp-contract=fast")
    found: ctypes.CDLL = whole(lambda: CppCodeCache.load(code, extra_flags=(*flags, "-ftree-loop-vectorize")))
    return found
