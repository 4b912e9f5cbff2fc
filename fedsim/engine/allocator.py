"""Memory that is asked for again in every step should not go back to the operating system in between."""

import ctypes
import sys
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@cache
def keep_freed_memory() -> None:
    """glibc returns every tensor above some 100 kB when it is freed, and the next one costs a page fault for every
    4 kB of it: a tenth of the time of a convolutional step, most of that of a stack of small models. Other C libraries
    are left alone."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
