"""MNIST and its relatives, in the idx format: header (type, number of axes, their lengths), then the data."""

import gzip
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from fedsim import check, fetch, official
from fedsim.data import Dataset, standardization
from fedsim.dataset import store
from fedsim.dataset.own import read_npz
from fedsim.dataset.store import Arrays

PARTS = ("train", "test")
TYPES = {0x08: ">u1", 0x0C: ">i4"}
DIGITS = "0123456789"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CLASSES = {"byclass": DIGITS + LETTERS + LETTERS.lower(), "digits": DIGITS}

MNIST_STATISTICS = [0.1307], [0.3081]
FASHION_MNIST_STATISTICS = [0.2860], [0.3530]
EMNIST_STATISTICS = [0.1736], [0.3317]
"""Mean and standard deviation of the training images."""


def mnist(data_dir: str, cache_dir: str, standardize: bool, augment: bool) -> Dataset:
    return _images("mnist", DIGITS, data_dir, cache_dir, MNIST_STATISTICS, standardize, augment)


def fashion_mnist(data_dir: str, cache_dir: str, standardize: bool, augment: bool) -> Dataset:
    return _images("fashion_mnist", CLOTHES, data_dir, cache_dir, FASHION_MNIST_STATISTICS, standardize, augment)


def mnist_writers(data_dir: str, cache_dir: str, standardize: bool, augment: bool) -> Dataset:
    """MNIST by who wrote it, from QMNIST's label files (or their writer columns alone, as an .npz)."""
    return _images("mnist_writers", DIGITS, data_dir, cache_dir, MNIST_STATISTICS, standardize, augment)


def emnist(data_dir: str, cache_dir: str, split: str, standardize: bool, augment: bool) -> Dataset:
    """EMNIST, byclass (62 classes) or digits (10)."""
    check.choice("split", split, tuple(CLASSES))
    return _images("emnist", CLASSES[split], data_dir, cache_dir, EMNIST_STATISTICS, standardize, augment, split)


def _images(
    name: str,
    classes: Sequence[str],
    data_dir: str,
    cache_dir: str,
    statistics: tuple[list[float], list[float]],
    standardize: bool,
    augment: bool,
    split: str = "",
) -> Dataset:
    check.boolean("standardize", standardize)
    check.boolean("augment", augment)
    layout, files = fetch.ensure(name, data_dir, ("zip", split) if split else None)

    def decode() -> Arrays:
        official.verify(name, layout, files)
        if layout == "zip":
            return decode_emnist({f"{files[0]}, {m}": unzipped(files[0], m) for m in members(split)}, classes)
        if split:
            return decode_emnist({str(file): official.read(file) for file in files}, classes)
        arrays = decode_mnist({str(file): official.read(file) for file in files[:4]}, classes)
        return arrays | decode_writers(files[4:], arrays) if layout in ("qmnist", "npz") else arrays

    found = store.decoded(name, files, decode, cache_dir, split=split)
    return store.dataset(found, *standardization(*statistics, standardize), augment)


def decode_mnist(contents: Mapping[str, bytes], classes: Sequence[str]) -> Arrays:
    """Training images and labels, test images and labels, by the names of their files."""
    axes = (3, 1, 3, 1)
    train_x, train_y, test_x, test_y = (parse(c, name, n) for (name, c), n in zip(contents.items(), axes, strict=True))
    return {
        "train_x": train_x[:, None],
        "train_y": train_y.astype(np.int64),
        "test_x": test_x[:, None],
        "test_y": test_y.astype(np.int64),
        "class_names": np.array(list(classes)),
    }


def decode_emnist(contents: Mapping[str, bytes], classes: Sequence[str]) -> Arrays:
    """EMNIST's images lie on their side: rows and columns are exchanged."""
    arrays = decode_mnist(contents, classes)
    return arrays | {key: np.ascontiguousarray(arrays[key].swapaxes(2, 3)) for key in ("train_x", "test_x")}


def members(split: str) -> list[str]:
    """EMNIST's files within its archive."""
    kinds = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
    return [f"gzip/emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in kinds]


def unzipped(archive: Path, member: str) -> bytes:
    """A gzipped member of a zip archive, unpacked."""
    try:
        with zipfile.ZipFile(archive) as opened:
            return gzip.decompress(opened.read(member))
    except (zipfile.BadZipFile, KeyError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise check.InputError(f"{archive}: {member} cannot be read ({error})") from error


def decode_writers(files: Sequence[Path], mnist: Arrays) -> Arrays:
    """Who wrote each image. QMNIST's rows are MNIST's, in their order (of its test set the first 10,000): column 0 is
    the label, column 2 the writer's number."""
    if files[0].suffix == ".npz":
        named = read_npz("dataset=mnist_writers:", files[0])
        train, test = (named.get(f"{part}_writer", np.empty(0)) for part in PARTS)
        if train.dtype.kind not in "iu" or test.dtype.kind not in "iu" or train.ndim != 1 or test.ndim != 1:
            raise check.InputError(f"{files[0]} must have train_writer and test_writer, whole numbers, one an image")
    else:
        tables = [
            parse(official.read(file), str(file), 2)[: len(mnist[f"{part}_y"])]
            for file, part in zip(files, PARTS, strict=True)
        ]
        for file, part, table in zip(files, PARTS, tables, strict=True):
            if not np.array_equal(table[:, 0], mnist[f"{part}_y"]):
                raise check.InputError(f"{file}: its labels are not MNIST's; the two do not belong together")
        train, test = tables[0][:, 2], tables[1][:, 2]
    writers, code = np.unique(np.concatenate([train, test]), return_inverse=True)
    return {
        "train_client": code[: len(train)].astype(np.int64),
        "test_client": code[len(train) :].astype(np.int64),
        "client_names": np.array([f"{writer:04d}" for writer in writers.tolist()]),
    }


def parse(content: bytes, name: str, expected: int) -> np.ndarray:
    """The array an idx file holds, of so many axes."""
    kind, axes = (content[2], content[3]) if len(content) > 3 else (0, 0)
    if content[:2] != b"\0\0" or kind not in TYPES:
        raise check.InputError(f"{name} is no idx file: it begins with {content[:4].hex() or 'nothing'}")
    if axes != expected:
        raise check.InputError(f"{name} has {axes} axes, expected {expected}")
    start = 4 + 4 * axes
    shape = tuple(np.frombuffer(content[4:start], ">i4").tolist())
    dtype = np.dtype(TYPES[kind])
    if len(shape) != axes or len(content) - start != dtype.itemsize * prod(shape):
        raise check.InputError(
            f"{name}, of shape {'x'.join(map(str, shape))}, is truncated or too long: {len(content) - start} bytes"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
