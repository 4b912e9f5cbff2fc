"""A split is drawn once: kept under a fingerprint of (data, law, parameters, seed), and checked before it is used."""

import hashlib
import inspect
import io
import json
from pathlib import Path

import numpy as np

from fedsim import rng
from fedsim.data import Population, Split
from fedsim.dataset import store
from fedsim.partition.base import Partition


def key(partition: Partition, data: str, positions: np.ndarray, seed: int) -> str:
    """What a split is asked for. The law is its code, with all that it may draw by: a changed line is another law."""
    files = {Path(inspect.getfile(type(partition))), Path(rng.__file__), *Path(__file__).parent.glob("*.py")}
    asked = {
        "data": data,
        "positions": hashlib.sha256(np.ascontiguousarray(positions, dtype="<i8").data).hexdigest(),
        "law": type(partition).__qualname__,
        "code": sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files),
        "parameters": vars(partition),
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def draw(partition: Partition, population: Population, seed: int, name: str, cache_dir: str) -> Split:
    """The split, from the cache where it lies there undamaged."""
    path = Path(cache_dir).expanduser() / "partitions" / name
    split = read(path)
    if split is None:
        split = partition(population, seed)
        content = io.BytesIO()
        np.savez(content, **{k: v for k, v in vars(split).items() if v is not None})
        store.write(path, digest(name, content.getvalue()) + content.getvalue())
    return split


def read(path: Path) -> Split | None:
    """None: not there, or not what was written there."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None  # writing it says what is wrong
    head, content = stored[: len(digest("", b""))], stored[len(digest("", b"")) :]
    if head != digest(path.name, content):
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return Split(**arrays)


def digest(name: str, content: bytes) -> bytes:
    """Of a stored split and the name it is stored under."""
    return hashlib.sha256(name.encode() + content).digest()
