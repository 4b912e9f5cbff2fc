"""Decoded data: each dataset is read from its own format once, and memory-mapped from then on.

A decoded copy is a folder of .npy files whose name is a hash of the source files' content, the decoders' code and the
parameters. So another version of a file never meets an old copy, processes that use the same data share the pages of
one copy, and starting again costs no decoding. A copy appears under its name complete or not at all.
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import Tensor

from fedsim import check
from fedsim.data import PAD, Dataset, fingerprint

Arrays = dict[str, np.ndarray]
"""What a decoder gives: train_x, train_y, test_x, test_y; where there are any train_client, test_client, client_names,
class_names, coarse (coarse label of each class), mean and std."""


@dataclass(frozen=True)
class Decoded:
    arrays: Arrays
    """Memory-mapped; a write to them stays in this process."""
    fingerprint: str
    """Of their content: the same for every format the data may come in."""


def decoded(
    name: str, files: Sequence[Path], decode: Callable[[], Arrays], cache_dir: str, **parameters: object
) -> Decoded:
    """What `decode` makes of the files, from the cache if it was ever made."""
    cache = Path(cache_dir).expanduser()
    source = content(name, files, cache)
    code = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(__file__).parent.glob("*.py"))
    asked = json.dumps([name, source, code, parameters], sort_keys=True)
    folder = cache / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    if (found := read(folder)) is not None:
        return found
    with writing(cache):
        lock = filelock.FileLock(cache / f".{folder.name}.lock")
        lock.acquire()  # ten processes of a sweep decode once
    try:
        if (found := read(folder)) is None:
            arrays = decode()
            validate(name, arrays)
            save(folder, arrays)
            found = read(folder)
            assert found is not None
        return found
    except OSError as error:  # the source cannot be read; what cannot be written has been said by then
        raise check.InputError(f"dataset={name}: {error.filename or name}: {error.strerror or error}") from error
    finally:
        lock.release()


def content(name: str, files: Sequence[Path], cache: Path) -> str:
    """A hash of the files' content. Files that have not been touched since they were last hashed are not read again."""
    try:
        seen = [
            (str(f.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for f in files for s in [f.stat()]
        ]
        note = cache / "hashed" / hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]
        if note.is_file() and len(known := note.read_text(encoding="ascii")) == 64:
            return known
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError as error:
        raise check.InputError(f"dataset={name}: {error.filename}: {error.strerror}") from error
    write(note, digest.hexdigest().encode())
    return digest.hexdigest()


def validate(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """What every dataset must be, said in one line where it is not."""

    def refuse(problem: str) -> None:
        raise check.InputError(f"dataset={name}: {problem}")

    classes = len(arrays["class_names"]) if "class_names" in arrays else None
    clients = len(arrays["client_names"]) if "client_names" in arrays else 0
    for part in ("train", "test"):
        x, y, owner = arrays[f"{part}_x"], arrays[f"{part}_y"], arrays.get(f"{part}_client")
        if not len(x):
            refuse(f"there are no {part} samples")
        if len(x) != len(y) or (owner is not None and len(owner) != len(x)):
            refuse(f"{len(x)} {part} samples, but {len(y)} labels and {len(x if owner is None else owner)} owners")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            bad = ~np.isfinite(x.reshape(len(x), -1)).all(1)
            refuse(f"{part} sample {int(np.argmax(bad))} (and {bad.sum() - 1} more) has a NaN or infinite feature")
        if y.min() < 0 or (classes is not None and y.max() >= classes):
            outside = (y < 0) | (y >= (classes or np.inf))
            sample = int(np.argmax(outside.reshape(len(y), -1).any(1)))
            said = f"0 to {classes - 1}" if classes else "0 or more"
            refuse(f"{part} sample {sample} has the label {y[outside].flat[0]}; valid: {said}")
        if y.ndim > 1 and not (y != PAD).any(1).all():
            refuse(f"{part} sample {int(np.argmin((y != PAD).any(1)))} has no target: nothing but padding")
        if owner is not None and not (owner.min() >= 0 and owner.max() < clients):
            refuse(f"a {part} sample belongs to client {int(owner.max())}, but there are {clients} clients")
    if arrays["train_x"].shape[1:] != arrays["test_x"].shape[1:]:
        refuse(f"training samples have shape {arrays['train_x'].shape[1:]}, test samples {arrays['test_x'].shape[1:]}")
    if clients:
        owned = [arrays[k] for k in ("train_client", "test_client") if k in arrays]
        counts = np.bincount(np.concatenate(owned), minlength=clients)
        if counts.min() == 0:
            refuse(f"client {arrays['client_names'][int(np.argmin(counts))]} has no samples")


def dataset(found: Decoded, scale: Tensor, shift: Tensor, augment: bool = False, tokens: bool = False) -> Dataset:
    """The tensors over a decoded copy: not a byte of it is read before it is used."""
    arrays = found.arrays
    names = tuple(arrays["class_names"].tolist()) if "class_names" in arrays else ()
    most = max(int(arrays["train_y"].max()), int(arrays["test_y"].max())) + 1
    return Dataset(
        train_x=torch.from_numpy(arrays["train_x"]),
        train_y=torch.from_numpy(arrays["train_y"]),
        test_x=torch.from_numpy(arrays["test_x"]),
        test_y=torch.from_numpy(arrays["test_y"]),
        num_classes=len(names) or most,
        scale=scale,
        shift=shift,
        augment=augment,
        tokens=tokens,
        train_client=arrays.get("train_client"),
        test_client=arrays.get("test_client"),
        client_names=tuple(arrays["client_names"].tolist()) if "client_names" in arrays else (),
        class_names=names,
        coarse=arrays.get("coarse"),
        fingerprint=found.fingerprint,
    )


def read(folder: Path) -> Decoded | None:
    """None: not there, or not as it was written."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if any(touched(folder / f"{key}.npy") != state for key, state in meta["files"].items()):
            return None
        # "c": private to the process where it is written to, so that a tensor may be made of it; shared as long as not.
        arrays = {key: np.load(folder / f"{key}.npy", mmap_mode="c") for key in meta["files"]}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None
    return Decoded(arrays, meta["fingerprint"])


def touched(file: Path) -> list[int]:
    """Size and time of the last change: not hashed at every start, but neither believed when someone has been at it."""
    state = file.stat()
    return [state.st_size, state.st_mtime_ns]


def save(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """All of it, or nothing."""
    with writing(folder.parent):
        for stale in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed; we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        temporary.mkdir()
        try:
            for key, array in arrays.items():
                plain = np.ascontiguousarray(array)
                with (temporary / f"{key}.npy").open("wb") as stream:
                    # As np.save, which would not say why a write failed.
                    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(plain))
                    stream.write(plain.reshape(-1).view(np.uint8).data)
                    stream.flush()
                    os.fsync(stream.fileno())
            files = {key: touched(temporary / f"{key}.npy") for key in arrays}
            meta = {"fingerprint": fingerprint(arrays), "files": files}
            (temporary / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # a damaged copy
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write(path: Path, content: bytes) -> None:
    """A small file, whole or not at all. A cache that may only be read is good enough: it is made again next time."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise unwritable(path.parent, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What goes wrong while the cache is written to, in one line."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> check.InputError:
    return check.InputError(
        f"cache_dir: {folder} cannot be written to ({error.strerror or error}); "
        "give another with cache_dir=FOLDER or FEDSIM_CACHE"
    )
