"""Randomness as a function of (seed, purpose, ids ...), never of global state.

So a checkpoint needs no generator state, engines are interchangeable, and methods compared under one seed get
the same partition, cohorts, batches and initial weights.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

Rng = np.random.RandomState


def _digest(seed: int, purpose: str, ids: tuple[int, ...]) -> bytes:
    text = "/".join([str(int(seed)), purpose, *(str(int(i)) for i in ids)])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _key(seed: int, purpose: str, ids: tuple[int, ...]) -> int:
    return int.from_bytes(_digest(seed, purpose, ids), "little")


class _Key(ISeedSequence):
    """Philox' key as it is. Philox(key=...) takes the same one, but asks the system for entropy first, which it does
    not use: three times as long, for every client of every round."""

    def __init__(self, digest: bytes) -> None:
        self._words = np.frombuffer(digest, "<u8").astype(np.uint64, copy=False)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self._words


def generator(seed: int, purpose: str, *ids: int) -> Rng:
    """A fresh generator for one purpose, e.g. generator(seed, "batches", round, client).

    RandomState around Philox: NumPy guarantees that RandomState's streams never change between its releases
    (NEP 19), which its newer Generator does not, so the same seed gives the same split on any machine.
    """
    return Rng(np.random.Philox(_Key(_digest(seed, purpose, ids))))  # type: ignore[arg-type]


def words(seed: int, purpose: str, *ids: int) -> tuple[int, int]:
    """Two random 32-bit integers, with sign."""
    key = _key(seed, purpose, ids)
    return key % 2**32 - 2**31, (key >> 32) % 2**32 - 2**31


def seed_torch(device: torch.device, seed: int, purpose: str, *ids: int) -> None:
    """Set a device's own generator, which weight initialisation and dropout draw from.

    Not torch.manual_seed: where CUDA is installed but absent, that formats a stack trace and keeps it, at every call.
    """
    key = _key(seed, purpose, ids) % 2**63
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)
    else:
        torch.default_generator.manual_seed(key)


def sample(rng: Rng, population: int, size: int) -> np.ndarray:
    """`size` distinct numbers below `population`, sorted; the cost does not grow with the population."""
    if 4 * size >= population:
        return np.sort(rng.permutation(population)[:size])
    chosen: dict[int, None] = {}
    while len(chosen) < size:
        chosen.update(dict.fromkeys(rng.randint(population, size=size - len(chosen), dtype=np.int64).tolist()))
    return np.sort(np.fromiter(chosen, dtype=np.int64, count=size))
