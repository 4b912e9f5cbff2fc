"""A split is drawn once: kept under a fingerprint of (data, law, parameters, seed), checked when read again."""

import hashlib
import inspect
import json
import zipfile
from pathlib import Path

import numpy as np

from fedsim.data import Population, Split
from fedsim.dataset import store
from fedsim.partition.base import Partition


def key(partition: Partition, data: str, positions: np.ndarray, seed: int) -> str:
    """What a split is asked for. The law is its code: a changed line is another law."""
    law = [inspect.getsource(inspect.getmodule(kind) or kind) for kind in type(partition).__mro__[:-2]]
    asked = {
        "data": data,
        "positions": hashlib.sha256(np.ascontiguousarray(positions, dtype="<i8").data).hexdigest(),
        "law": type(partition).__qualname__,
        "code": hashlib.sha256("".join(law).encode()).hexdigest(),
        "parameters": vars(partition),
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def draw(partition: Partition, population: Population, seed: int, name: str, cache_dir: str) -> Split:
    """The split, from the cache where it lies there undamaged."""
    path = Path(cache_dir).expanduser() / "partitions" / f"{name}.npz"
    split = read(path)
    if split is None:
        split = partition(population, seed)
        store.write(path, {k: v for k, v in vars(split).items() if v is not None} | {"digest": [split.fingerprint()]})
    return split


def read(path: Path) -> Split | None:
    """None: not there, or not what was written."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            content = dict(stored)
    except (FileNotFoundError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    digest = content.pop("digest", None)
    if digest is None or not {"indices", "offsets", "held"} <= content.keys() <= {*Split.__annotations__}:
        return None
    split = Split(**content)
    return split if split.fingerprint() == digest[0] else None
