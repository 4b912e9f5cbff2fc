"""Users' own data: an .npz file, or whatever a function of theirs returns; and what these share with folders of images
(pictures.py) and tables (parquet.py).

What all of them share: labels are whole numbers from 0, which stay as they are (a hole is fine), or text, whose sorted
values are the classes; whose a sample is may be told by numbers or text; data without a test set give a seeded fraction
of themselves. What could only be guessed is refused, with the file and the row.
"""

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim import check, rng
from fedsim.data import Dataset, fingerprint
from fedsim.dataset import store
from fedsim.dataset.store import Arrays
from fedsim.importing import blaming, imported

MOST_CLASSES = 2**16
"""A larger label is an identifier or a measurement, not a class."""
CHANNELS = (1, 3, 4)
PARTS = {"train": "train_", "test": "test_"}
SPELLINGS = {
    **{f"{kind}_{part}": f"{prefix}{kind}" for part, prefix in PARTS.items() for kind in "xy"},  # Keras
    **{f"{prefix}client_id": f"{prefix}client" for prefix in ("", *PARTS.values())},
}
"""Other names of arrays."""


# What a user types.


def npz(path: str, cache_dir: str, test_fraction: float, standardize: bool, seed: int) -> Dataset:
    """Arrays train_x, train_y, test_x, test_y (or Keras' x_train ...), or x and y alone; see `given`."""
    check_common(test_fraction, standardize, seed)
    file = existing(path)
    if not file.is_file():
        raise check.BadValue("path", path, "must be an .npz file")
    where = f"dataset=npz: {file}"
    found = store.decoded(
        "npz",
        [file],
        lambda: given(where, read_npz(where, file), test_fraction, seed),
        cache_dir,
        test_fraction=test_fraction,
        seed=seed,
    )
    return finished(found, standardize)


def custom(
    load: str, arguments: Mapping[str, Any] | None, test_fraction: float, standardize: bool, seed: int
) -> Dataset:
    """What the function or class `load` (MODULE.NAME; the current folder is importable) makes of the arguments: a
    Dataset, a dict of arrays with the names of an .npz, a map-style torch dataset of (x, y), or a pair of these, train
    and test. It is called in every run; random transforms are drawn once, when the samples are read."""
    check_common(test_fraction, standardize, seed)
    if arguments is not None:
        check.mapping("arguments", arguments)
    function, where = imported(load), f"dataset=custom: {load}"
    with blaming(where):
        result = function(**(arguments or {}))
    if isinstance(result, Dataset):
        if standardize:
            raise check.BadValue("standardize", standardize, "must be false: a Dataset brings its own scale and shift")
        return accepted(where, result)
    if isinstance(result, Mapping):
        with blaming(where):
            named = {str(name): plain(value) for name, value in result.items()}
        arrays = given(where, named, test_fraction, seed)
    elif isinstance(result, tuple | list) and len(result) == 2:
        pair = [samples(where, prefix, source) for prefix, source in zip(PARTS.values(), result, strict=True)]
        arrays = arrange(where, pair, test_fraction, seed)
    else:
        arrays = arrange(where, [samples(where, "", result)], test_fraction, seed)
    store.validate("custom", arrays)
    return finished(store.Decoded(arrays, fingerprint(arrays)), standardize)


def check_common(test_fraction: float, standardize: bool, seed: int) -> None:
    check.number("test_fraction", test_fraction, gt=0, lt=1)
    check.boolean("standardize", standardize)
    check.integer("seed", seed, ge=0)


def check_shape(key: str, shape: object, valid: str, axes: int | None = None) -> None:
    lengths = shape if isinstance(shape, list) else []
    if (
        not lengths
        or axes not in (None, len(lengths))
        or any(type(n) is not int or not 1 <= n <= 2**20 for n in lengths)
        or len(lengths) > 8
    ):
        raise check.BadValue(key, shape, valid)


def existing(path: str) -> Path:
    check.text("path", path)
    expanded = Path(os.path.expanduser(path))
    if not expanded.exists():
        raise check.BadValue("path", path, "there is no such file or folder")
    return expanded


def finished(found: store.Decoded, standardize: bool, augment: bool = False) -> Dataset:
    """Bytes go to [0, 1] and numbers stay; or both to (x - mean) / std of the training data."""
    x, sequences = found.arrays["train_x"], found.arrays["train_y"].ndim > 1
    unit = 255 if x.dtype == np.uint8 else 1
    if not standardize:
        return store.dataset(found, torch.full((1,), 1 / unit), torch.zeros(1), augment, tokens=sequences)
    if sequences:
        raise check.BadValue("standardize", standardize, "must be false: tokens are no quantities")
    each = (-1, 1, 1) if x.ndim == 4 else x.shape[1:]
    mean, std = (torch.from_numpy(np.array(found.arrays[name])).view(each) for name in ("mean", "std"))
    return store.dataset(found, 1 / (unit * std), -mean / std, augment)


# From samples as they are given to the arrays of a dataset.


Names = tuple[str, str, str]
"""What the user calls samples, labels and clients, for messages."""


def array_names(prefix: str) -> Names:
    return f"{prefix}x", f"{prefix}y", f"{prefix}client_id"


@dataclass(frozen=True)
class Part:
    """The training samples, the test samples, or all there are."""

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None

    def take(self, rows: np.ndarray) -> "Part":
        return Part(self.x[rows], self.y[rows], None if self.client is None else self.client[rows])


def part(where: str, names: Names, x: np.ndarray, y: np.ndarray, client: np.ndarray | None = None) -> Part:
    """Samples, checked."""
    called, y_called, client_called = (f"{where}: {name}" for name in names)
    if x.dtype.kind not in "biuf":
        raise check.InputError(f"{called} holds {x.dtype}; valid: numbers")
    if x.ndim < 2 or 0 in x.shape:
        valid = "[samples, features] or more axes, none of them empty"
        raise check.InputError(f"{called} has shape {x.shape}; valid: {valid}")
    if y.ndim == 2 and y.shape[1] == 1:  # a column, as Keras' CIFAR has it
        y = y[:, 0]
    sequences = y.shape == x.shape and x.ndim == 2 and x.dtype.kind in "iu" and y.dtype.kind in "iu"
    if y.shape != x.shape[:1] and not sequences:
        raise check.InputError(f"{y_called} has shape {y.shape}; valid: {x.shape[:1]}, a label for each sample")
    y = labels(y_called, y)
    if sequences:
        x = tokens(called, x)
    if x.dtype != np.uint8:
        x = numbers(x)
        if not np.isfinite(x).all():
            bad = ~np.isfinite(x.reshape(len(x), -1))
            problem = f"{bad.sum()} NaN or infinite values, the first in row {int(np.argmax(bad.any(1)))}"
            raise check.InputError(f"{called} holds {problem}; valid: finite float32")
    if client is not None:
        client = identifiers(client_called, client)
        if client.shape != x.shape[:1]:
            valid = f"{x.shape[:1]}, a client for each sample"
            raise check.InputError(f"{client_called} has shape {client.shape}; valid: {valid}")
    return Part(x, y, client)


def arrange(where: str, parts: Sequence[Part], test_fraction: float, seed: int, **more: np.ndarray) -> Arrays:
    """Train and test (a fraction, where there is but one part), classes and clients by number, and the training data's
    statistics."""
    if len(parts) == 1:
        chosen = holdout(parts[0], test_fraction, seed)
        parts = [parts[0].take(~chosen), parts[0].take(chosen)]
    train, test = parts
    if (train.x.shape[1:], train.x.dtype, train.y.ndim) != (test.x.shape[1:], test.x.dtype, test.y.ndim):
        both = " but ".join(f"{n} samples are {p.x.dtype} {p.x.shape[1:]}" for n, p in zip(PARTS, parts, strict=True))
        raise check.InputError(f"{where}: {both}; they must agree")
    arrays = {"train_x": train.x, "test_x": test.x, **classes(where, train, test, more.get("class_names"))}
    if train.client is not None:
        owners = [train.client] if test.client is None else [train.client, test.client]
        if len({owner.dtype.kind for owner in owners}) > 1:
            both = " but ".join(f"{owner.dtype} in {name}" for name, owner in zip(PARTS, owners, strict=True))
            raise check.InputError(f"{where}: clients are {both}; they must agree")
        names, codes = np.unique(np.concatenate(owners), return_inverse=True)
        arrays["client_names"], arrays["train_client"] = names.astype(str), codes[: len(train.x)]
        if test.client is not None:
            arrays["test_client"] = codes[len(train.x) :]
    elif test.client is not None:
        raise check.InputError(f"{where}: test samples have clients but training samples have none")
    if "coarse" in more:
        coarse = labels(f"{where}: coarse", more["coarse"])
        if coarse.shape != arrays["class_names"].shape or coarse.dtype.kind != "i":
            raise check.InputError(f"{where}: coarse must be {len(arrays['class_names'])} numbers, one for each class")
        arrays["coarse"] = coarse
    if train.y.ndim == 1:
        arrays["mean"], arrays["std"] = statistics(train.x)
    return arrays


def numbers(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # becomes infinite, and is refused as that
        return x.astype(np.float32, copy=False)


def tokens(where: str, x: np.ndarray) -> np.ndarray:
    outside = (x < 0) | (x > 255)
    if outside.any():
        row = int(np.argmax(outside.any(1)))
        raise check.InputError(f"{where} row {row} holds the token {x[outside][0]}; valid: 0 (padding) to 255")
    return x.astype(np.uint8)


def labels(where: str, y: np.ndarray) -> np.ndarray:
    """Whole numbers as int64, or text."""
    y = plain_text(where, y)
    if y.dtype.kind == "U":
        return y
    wrong = ~((y >= 0) & (y < MOST_CLASSES) & (np.floor(y) == y))
    if wrong.any():
        row = int(np.argmax(wrong.reshape(len(y), -1).any(1)))
        valid = f"whole numbers from 0 to {MOST_CLASSES - 1}, or text"
        raise check.InputError(f"{where} row {row} holds {y[wrong][0]}; valid: {valid}")
    return y.astype(np.int64)


def plain_text(where: str, values: np.ndarray) -> np.ndarray:
    """Text as str and truth as numbers; numbers stay what they are."""
    kind = values.dtype.kind
    if kind == "S":
        try:
            return np.char.decode(values, "utf-8")
        except UnicodeDecodeError as error:
            raise check.InputError(f"{where} holds text that is not UTF-8: {error.object[:40]!r}") from error
    if kind not in "biufU":
        raise check.InputError(f"{where} holds {values.dtype}; valid: numbers or text")
    if kind == "f" and np.isnan(values).any():
        row = np.unravel_index(np.argmax(np.isnan(values)), values.shape)[0]
        raise check.InputError(f"{where} row {row} holds nan; valid: numbers or text")
    return values.astype(np.int64) if kind == "b" else values


def identifiers(where: str, client: np.ndarray) -> np.ndarray:
    """Text or numbers; whole numbers as int64, whatever they are stored as, so that train and test can be compared."""
    client = plain_text(where, client)
    if client.dtype.kind in "uf" and (np.abs(client) < 2**53).all() and (np.floor(client) == client).all():
        return client.astype(np.int64)
    return client


def classes(where: str, train: Part, test: Part, names: np.ndarray | None) -> Arrays:
    """Labels by number, and what the classes are called."""
    kinds = {train.y.dtype.kind, test.y.dtype.kind}
    if len(kinds) > 1 or (kinds == {"U"} and names is not None):
        problem = "labels must be all text or all numbers, and numbers where class_names says what they mean"
        raise check.InputError(f"{where}: {problem}")
    if kinds == {"U"}:
        names, y = np.unique(np.concatenate([train.y, test.y]), return_inverse=True)
        return {"train_y": y[: len(train.y)], "test_y": y[len(train.y) :], "class_names": names}
    sequences = [train.x, test.x] if train.y.ndim > 1 else []  # a token that is read may be predicted
    count = max(int(array.max()) for array in (train.y, test.y, *sequences)) + 1
    names = plain_text(f"{where}: class_names", np.arange(count).astype(str) if names is None else names)
    if names.ndim != 1 or names.dtype.kind != "U" or len(names) < count:
        raise check.InputError(
            f"{where}: class_names must be text, at least {count} since there is a label {count - 1}"
        )
    return {"train_y": train.y, "test_y": test.y, "class_names": names}


def holdout(whole: Part, fraction: float, seed: int) -> np.ndarray:
    """Which samples become the test set: a random share, of each client's own where there are clients, but never all
    that a client has."""
    count = len(whole.x)
    owner = np.zeros(count, np.int64) if whole.client is None else np.unique(whole.client, return_inverse=True)[1]
    order = rng.generator(seed, "test set").permutation(count)
    order = order[np.argsort(owner[order], kind="stable")]  # client by client, each in random order
    sizes = np.bincount(owner)
    quota = np.minimum(np.rint(fraction * sizes), sizes - 1)
    rank = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(count, bool)
    chosen[order[rank < np.repeat(quota, sizes)]] = True
    if not chosen.any():
        of = f"{count} samples" if whole.client is None else f"{count} samples of {len(sizes)} clients"
        raise check.BadValue("test_fraction", fraction, f"leaves no test sample of {of}")
    return chosen


def statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel of images [N, C, H, W], of each feature of anything else; bytes count
    as [0, 1]. The deviation of what is constant is 1."""
    axes = (0, 2, 3) if x.ndim == 4 else (0,)
    unit = 255 if x.dtype == np.uint8 else 1
    lowest, highest = x.min(axes, keepdims=True), x.max(axes, keepdims=True)
    count = x.size // lowest.size
    blocks = [x[start : start + 1024] for start in range(0, len(x), 1024)]  # no float64 copy of it all
    total, squares = np.zeros(lowest.shape), np.zeros(lowest.shape)
    for block in blocks:
        total += block.sum(axes, np.float64, keepdims=True)
    mean = total / count
    for block in blocks:
        squares += np.square(block - mean).sum(axes, keepdims=True)
    # Compared, since the computed deviation of a constant is not quite 0.
    std = np.where(lowest == highest, unit, np.sqrt(squares / count))
    return (mean / unit).squeeze(axes).astype(np.float32), (std / unit).squeeze(axes).astype(np.float32)


def channels_first(x: np.ndarray) -> np.ndarray:
    """Images become [N, C, H, W]: [N, H, W] gets a channel axis, and [N, H, W, C] with C of 1, 3 or 4 is turned round,
    unless its second axis is 1, 3 or 4 as well: then it is [N, C, H, W] already. Anything else stays."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in CHANNELS and x.shape[3] in CHANNELS:
        return np.ascontiguousarray(np.moveaxis(x, 3, 1))
    return x


# Arrays by name: .npz files, and what functions return.


def read_npz(where: str, file: Path) -> dict[str, np.ndarray]:
    try:
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise check.InputError(f"{where} is a single array; valid: an .npz, as np.savez writes it")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise check.InputError(f"{where} is no readable .npz of plain arrays ({error})") from error


def given(where: str, named: Mapping[str, np.ndarray], test_fraction: float, seed: int) -> Arrays:
    """From x and y, or train_x, train_y, test_x and test_y (or x_train ...); with client_id, or train_client_id and
    test_client_id (or train_client and test_client, places in client_names), class_names and coarse where known."""
    found = {SPELLINGS.get(name, name): array for name, array in named.items()}
    once = len(found) == len(named)
    more = {name: found.pop(name) for name in ("class_names", "coarse") if name in found}
    if (names := found.pop("client_names", None)) is not None:
        used = [codes for key, codes in found.items() if key.endswith("client")]
        if not used or len(np.unique(np.concatenate([c.ravel() for c in used]))) < names.size:
            raise check.InputError(f"{where}: client_names has a client without samples")
        found |= {key: looked_up(where, key, names, found[key]) for key in found if key.endswith("client")}
    prefixes = [prefix for prefix in ("", *PARTS.values()) if f"{prefix}x" in found]
    needed = {f"{prefix}{kind}" for prefix in prefixes for kind in "xy"}
    usable = needed | {f"{prefix}client" for prefix in prefixes}
    if not once or prefixes not in ([""], ["train_"], ["train_", "test_"]) or not needed <= set(found) <= usable:
        raise check.InputError(
            f"{where} holds {', '.join(named) or 'nothing'}; valid: x and y, or train_x, train_y, test_x and test_y "
            "(or x_train ...); with client_id, or train_client_id and test_client_id, class_names and coarse if known"
        )
    parts = []
    for prefix in prefixes:
        x, y, client = channels_first(found[f"{prefix}x"]), found[f"{prefix}y"], found.get(f"{prefix}client")
        parts.append(part(where, array_names(prefix), x, y, client))
    return arrange(where, parts, test_fraction, seed, **more)


def looked_up(where: str, key: str, names: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Clients by name, from their places in client_names."""
    if names.ndim != 1 or len(np.unique(names)) < len(names):
        raise check.InputError(f"{where}: client_names must be different names")
    if codes.dtype.kind not in "iu" or (codes.size and (codes.min() < 0 or codes.max() >= len(names))):
        raise check.InputError(f"{where}: {key} must be places in client_names: 0 to {len(names) - 1}")
    return np.asarray(names[codes])


# What functions return.


def samples(where: str, prefix: str, source: Any) -> Part:
    """A map-style torch dataset of (x, y), from its first sample to its last."""
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise check.InputError(
            f"{where} returned {type(source).__name__}; valid: a fedsim.data.Dataset, a dict of arrays, a map-style "
            "torch dataset of (x, y), or a pair of these"
        )
    with blaming(where):
        count = len(source)
    xs, ys = [], []
    for i in range(count):
        with blaming(f"{where}: {prefix}sample {i}"):
            x, y = source[i]
            xs.append(plain(x))
            ys.append(plain(y))
        if (xs[i].shape, ys[i].shape) != (xs[0].shape, ys[0].shape):
            these, those = (f"x of shape {xs[j].shape} and y of {ys[j].shape}" for j in (i, 0))
            raise check.InputError(f"{where}: {prefix}sample {i} has {these}, but sample 0 has {those}")
    if not xs:
        raise check.InputError(f"{where}: the {prefix}dataset is empty")
    return part(where, array_names(prefix), channels_first(np.stack(xs)), np.stack(ys))


def plain(value: object) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def accepted(where: str, result: Dataset) -> Dataset:
    """A Dataset of the user's own making, looked through like any other."""

    def need(valid: bool, problem: str) -> None:
        if not valid:
            raise check.InputError(f"{where} returned a Dataset whose {problem}")

    need(
        type(result.num_classes) is int and 0 < result.num_classes <= MOST_CLASSES, "num_classes is no whole number > 0"
    )
    arrays: Arrays = {"class_names": np.arange(result.num_classes).astype(str)}
    for key in ("train_x", "test_x", "train_y", "test_y"):
        value = getattr(result, key)
        need(isinstance(value, Tensor), f"{key} is of type {type(value).__name__}; valid: a torch tensor")
        wanted = (torch.uint8, torch.float32) if key.endswith("x") else (torch.int64,)
        need(value.dtype in wanted, f"{key} is {value.dtype}; valid: {' or '.join(map(str, wanted))}")
        need(value.ndim > key.endswith("x") and not value.requires_grad, f"{key} has no axis of samples, or a gradient")
        arrays[key] = plain(value)
    need(result.train_x.dtype == result.test_x.dtype, "train_x and test_x are of different types")
    need(not result.augment or result.train_x.ndim == 4, "samples are no images that could be augmented")
    need(len(result.class_names) in (0, result.num_classes), "class_names are not as many as its num_classes")
    for key in ("train_client", "test_client", "coarse"):
        value = getattr(result, key)
        whole = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
        need(value is None or whole, f"{key} is no array of whole numbers")
        if value is not None and key != "coarse":
            arrays[key] = value
    need(result.coarse is None or len(result.coarse) >= result.num_classes, "coarse labels are fewer than its classes")
    if result.client_names:
        arrays["client_names"] = np.array(result.client_names)
    store.validate("custom", arrays)
    return result
