"""FEMNIST, a client for each writer: TensorFlow Federated's HDF5 or LEAF's JSON; and what TFF's HDF5 files share.

Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. Both have images of 28 x 28 as numbers from 0 (ink) to
1 (background), and 62 classes: digits, capitals, small letters. The numbers are bytes / 255, and the bytes are kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from fedsim import check, fetch
from fedsim.data import Dataset, standardization
from fedsim.dataset import idx, leaf, store
from fedsim.dataset.own import statistics
from fedsim.dataset.store import Arrays

CLASSES = idx.CLASSES["byclass"]
SIDE = 28
TOLERANCE = 1e-3
"""Between a pixel and the nearest byte / 255: what rounding leaves, and a quarter of what could be mistaken."""

Client = tuple[str, np.ndarray, np.ndarray]
"""A client's name, samples and labels."""


def femnist(data_dir: str, cache_dir: str, source: str, only_digits: bool, standardize: bool) -> Dataset:
    """`source`: tff, leaf, or auto for the first of them that is there."""
    check.choice("source", source, ("auto", "tff", "leaf"))
    for key, value in (("only_digits", only_digits), ("standardize", standardize)):
        check.boolean(key, value)
    tff = "tff_digits" if only_digits else "tff"
    layouts = {"auto": (tff, "leaf"), "tff": (tff,), "leaf": ("leaf",)}[source]
    layout, files = fetch.ensure("femnist", data_dir, layouts)
    classes = 10 if only_digits else len(CLASSES)

    def decode() -> Arrays:
        if layout == "leaf":
            return decode_leaf(files, only_digits)
        train, test = files
        return decode_tff(train, test, classes)

    found = store.decoded("femnist", files, decode, cache_dir, layout=layout, only_digits=only_digits)
    mean, std = (found.arrays[name].tolist() for name in ("mean", "std"))
    return store.dataset(found, *standardization(mean, std, standardize))


def decode_tff(train: Path, test: Path, classes: int = len(CLASSES)) -> Arrays:
    """Groups examples/CLIENT with pixels [n, 28, 28] and label [n]."""

    def clients(path: Path) -> Iterator[Client]:
        for name, (pixels, label) in tff_examples("femnist", path, ("pixels", "label"), (SIDE, SIDE)):
            where = f"dataset=femnist: {path}: client {name}"
            yield name, as_bytes(where, pixels)[:, None], as_labels(where, label, classes)

    return writers(clients(train), clients(test), classes)


def decode_leaf(files: Sequence[Path], only_digits: bool) -> Arrays:
    """train/*.json and test/*.json, one file in memory at a time. LEAF has no file of digits alone: they are picked."""
    classes = 10 if only_digits else len(CLASSES)

    def clients(part: str) -> Iterator[Client]:
        seen: dict[str, Path] = {}
        for path in (file for file in files if file.parent.name == part):
            for name, x, y in leaf_users(path):
                if name in seen:
                    raise check.InputError(f"dataset=femnist: user {name} is in {path} and before that in {seen[name]}")
                seen[name] = path
                kept = y < classes if only_digits else np.ones(len(y), bool)
                if kept.any():
                    yield name, x[kept], y[kept]

    return writers(clients("train"), clients("test"), classes)


def writers(train: Iterable[Client], test: Iterable[Client], classes: int) -> Arrays:
    arrays = joined("femnist", list(train), list(test))
    arrays["class_names"] = np.array(list(CLASSES[:classes]))
    arrays["mean"], arrays["std"] = statistics(arrays["train_x"])
    return arrays


def joined(dataset: str, train: Sequence[Client], test: Sequence[Client]) -> Arrays:
    """All clients' samples in the order of their names, which is one for both parts: a client may be in one alone."""
    names = sorted({name for name, _, _ in (*train, *test)})
    place = {name: i for i, name in enumerate(names)}
    arrays: Arrays = {"client_names": np.array(names)}
    for part, found in (("train", train), ("test", test)):
        if not found:
            raise check.InputError(f"dataset={dataset}: there are no clients to {part} on")
        clients = sorted(found, key=lambda client: client[0])
        arrays[f"{part}_x"] = np.concatenate([x for _, x, _ in clients])
        arrays[f"{part}_y"] = np.concatenate([y for _, _, y in clients])
        owners = [place[name] for name, _, _ in clients]
        arrays[f"{part}_client"] = np.repeat(np.array(owners, np.int64), [len(y) for _, _, y in clients])
    return arrays


def as_bytes(where: str, pixels: np.ndarray) -> np.ndarray:
    """Numbers that are bytes / 255, as those bytes."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinite or NaN is wrong, as is all that compares false
        scaled = np.rint(255 * pixels)
        wrong = ~((np.abs(pixels - scaled / 255) <= TOLERANCE) & (scaled >= 0) & (scaled <= 255))
    if wrong.any():
        sample = int(np.argmax(wrong.reshape(len(pixels), -1).any(1)))
        valid = "a whole number from 0 to 255, divided by 255"
        raise check.InputError(f"{where}: sample {sample} has a pixel {pixels[wrong][0]}; valid: {valid}")
    return np.asarray(scaled, np.uint8)


def as_labels(where: str, labels: np.ndarray, classes: int) -> np.ndarray:
    valid = f"whole numbers from 0 to {classes - 1}"
    if labels.dtype.kind not in "iu":
        raise check.InputError(f"{where}: labels are {labels.dtype}; valid: {valid}")
    if labels.min() < 0 or labels.max() >= classes:
        sample = int(np.argmax((labels < 0) | (labels >= classes)))
        raise check.InputError(f"{where}: sample {sample} has the label {labels[sample]}; valid: {valid}")
    return labels.astype(np.int64)


# TFF's HDF5.


def tff_examples(
    dataset: str, path: Path, names: Sequence[str], shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
    """The clients of a file in the order of their names, each with its datasets: the first of samples of the shape, the
    others of one number for each sample."""
    where = f"dataset={dataset}: {path}"
    try:
        with h5py.File(path, "r") as file:
            clients = file.get("examples")
            if not isinstance(clients, h5py.Group):
                raise check.InputError(f"{where} has no group examples; valid: TensorFlow Federated's HDF5")
            for client, group in clients.items():
                yield client, tuple(h5_datasets(f"{where}: examples/{client}", group, names, shape))
    except (OSError, RuntimeError, KeyError, ValueError) as error:  # what h5py raises for damaged files
        raise check.InputError(f"{where} is no HDF5 file, or it is damaged ({error})") from error


def h5_datasets(where: str, group: object, names: Sequence[str], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    length = None
    for name in names:
        found = group.get(name) if isinstance(group, h5py.Group) else None
        if not isinstance(found, h5py.Dataset):
            raise check.InputError(f"{where} has no dataset {name}; valid: {', '.join(names)}")
        expected = ("n", *shape) if length is None else (length,)
        if found.dtype.kind not in "iuf" or len(found.shape) != len(expected) or found.shape[1:] != expected[1:]:
            raise check.InputError(f"{where}/{name} is {found.dtype} of shape {found.shape}; valid: numbers {expected}")
        if length is not None and len(found) != length:
            raise check.InputError(f"{where}/{name} has {len(found)} entries, but {names[0]} has {length}")
        if len(found) == 0:
            raise check.InputError(f"{where} is empty: {name} has no entries")
        length = len(found)
        yield found[()]


def decode_fed_cifar100(train: Path, test: Path) -> Arrays:
    """Groups examples/CLIENT with image [n, 32, 32, 3], label [n] and coarse_label [n]."""
    coarse = np.full(100, -1)

    def clients(path: Path) -> Iterator[Client]:
        names = ("image", "label", "coarse_label")
        for name, (image, label, above) in tff_examples("fed_cifar100", path, names, (32, 32, 3)):
            where = f"dataset=fed_cifar100: {path}: client {name}"
            if image.dtype != np.uint8:
                raise check.InputError(f"{where}: images are {image.dtype}; valid: uint8")
            fine, above = as_labels(where, label, 100), as_labels(where, above, 20)
            for label, coarse_label in np.unique(np.stack([fine, above], 1), axis=0).tolist():
                if coarse[label] not in (-1, coarse_label):
                    problem = f"label {label} is in coarse label {coarse_label} here and in {coarse[label]} before"
                    raise check.InputError(f"{where}: {problem}")
                coarse[label] = coarse_label
            yield name, np.moveaxis(image, 3, 1), fine

    arrays = joined("fed_cifar100", list(clients(train)), list(clients(test)))
    if (coarse < 0).any():
        absent = int(np.argmin(coarse))
        raise check.InputError(f"dataset=fed_cifar100: label {absent} is in neither {train} nor {test}")
    return arrays | {"coarse": coarse, "class_names": np.arange(100).astype(str)}


# LEAF's JSON.


def leaf_users(path: Path) -> Iterator[Client]:
    """The users of one file: x lists of 784 numbers, and y."""
    for name, x, y in leaf.users("femnist", path):
        where = f"dataset=femnist: {path}: user {name}"
        try:
            pixels, labels = np.asarray(x), np.asarray(y)
        except ValueError as error:  # lists of different lengths
            raise check.InputError(f"{where} has no x of {SIDE * SIDE} numbers a sample ({error})") from error
        if labels.ndim != 1 or pixels.shape != (len(labels), SIDE * SIDE) or pixels.dtype.kind not in "iuf":
            found = f"x is {pixels.dtype} of shape {pixels.shape}, y of shape {labels.shape}"
            raise check.InputError(f"{where}: {found}; valid: {SIDE * SIDE} numbers for each label")
        yield name, as_bytes(where, pixels).reshape(-1, 1, SIDE, SIDE), as_labels(where, labels, len(CLASSES))
