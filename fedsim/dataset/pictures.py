"""Users' own images, in folders."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from fedsim import check
from fedsim.data import Dataset
from fedsim.dataset import store
from fedsim.dataset.own import Part, arrange, array_names, check_common, check_shape, existing, finished, part
from fedsim.importing import said

SPLITS = ("train", "training", "test", "testing", "val", "valid", "validation")
GRAY, COLOUR = ("1", "L", "LA"), ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow's kinds of pixels that 8 bits can hold."""
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
JUNK = ("Thumbs.db", "desktop.ini")


def folder(
    path: str,
    cache_dir: str,
    size: list[int] | None,
    standardize: bool,
    augment: bool,
    test_fraction: float,
    seed: int,
) -> Dataset:
    """Images as train/CLASS/IMAGE and test/CLASS/IMAGE, or CLASS/IMAGE alone; where it is known whose they are, as
    CLIENT/CLASS/IMAGE in place of CLASS/IMAGE. A folder valid or val is not used."""
    check_common(test_fraction, standardize, seed)
    check.boolean("augment", augment)
    if size is not None:
        check_shape("size", size, "must be [HEIGHT,WIDTH], or null where all images are of one size", 2)
    root = existing(path)
    if not root.is_dir():
        raise check.BadValue("path", path, "must be a folder")
    pictured = find_pictures(root)
    files = [p.file for p in pictured]
    names = hashlib.sha256(b"\0".join(os.fsencode(f.relative_to(root)) for f in files)).hexdigest()
    found = store.decoded(
        "folder",
        files,
        lambda: arrange(f"dataset=folder: {root}", read_folder(root, pictured, size), test_fraction, seed),
        cache_dir,
        names=names,  # they are the labels, and the files' content does not tell them
        size=size,
        test_fraction=test_fraction,
        seed=seed,
    )
    return finished(found, standardize, augment)


@dataclass(frozen=True)
class Picture:
    """An image file, and what its folders say of it."""

    file: Path
    label: str
    client: str | None
    prefix: str


def find_pictures(root: Path) -> list[Picture]:
    """All there are in the order of their names, those to train on first."""
    valid = "valid: train, test, and valid or val (unused), or none of them"
    if not subfolders(root / "train"):  # if it is there at all, it is a class: of pictures of trains
        for other in subfolders(root):
            if other.name.lower() in SPLITS and subfolders(other):  # Train is no client
                raise check.InputError(f"dataset=folder: {other} without train; {valid}")
        return classified(root, "")
    for other in subfolders(root):
        if other.name not in ("train", "test", "valid", "val"):
            raise check.InputError(f"dataset=folder: {other} beside train; {valid}")
    test = classified(root / "test", "test_") if (root / "test").exists() else []
    return classified(root / "train", "train_") + test


def classified(top: Path, prefix: str) -> list[Picture]:
    """CLASS/IMAGE, or with one level more CLIENT/CLASS/IMAGE."""
    valid = "valid: CLASS/IMAGE, or CLIENT/CLASS/IMAGE, alike in all folders"
    first = subfolders(top)
    deep = [f for f in first if subfolders(f)]
    if not first:
        raise check.InputError(f"dataset=folder: {top} holds no folders; {valid}")
    if shallow := [f for f in first if deep and f not in deep]:
        raise check.InputError(f"dataset=folder: {shallow[0]} holds no folders but {deep[0]} does; {valid}")
    if astray := [f for f in (top, *deep) if any(e.name.lower().endswith(IMAGES) and e.is_file() for e in f.iterdir())]:
        raise check.InputError(f"dataset=folder: {astray[0]} holds images beside folders; {valid}")
    found = []
    for outer in first:
        own = [
            Picture(file, inner.name, outer.name if deep else None, prefix)
            for inner in (subfolders(outer) if deep else [outer])
            for file in image_files("folder", inner)
        ]
        if not own:
            raise check.InputError(f"dataset=folder: {outer} holds no images; valid: {' '.join(IMAGES)}")
        found += own
    return found


def subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(folder / e.name for e in entries if not e.name.startswith(".") and e.is_dir())


def image_files(name: str, folder: Path) -> list[Path]:
    """What a class folder holds: images, and nothing that would be passed over in silence."""
    with os.scandir(folder) as entries:
        found = sorted((e.name, e.is_file()) for e in entries if not e.name.startswith(".") and e.name not in JUNK)
    for file, plain_file in found:
        if not plain_file or not file.lower().endswith(IMAGES):
            raise check.InputError(f"dataset={name}: {folder / file} is no image; valid: {' '.join(IMAGES)}")
    return [folder / file for file, _ in found]


def read_folder(root: Path, pictured: Sequence[Picture], size: Sequence[int] | None) -> list[Part]:
    files = [p.file for p in pictured]

    def name(i: int) -> str:
        return f"dataset=folder: {files[i]}"

    gray, first = survey(files, name)
    shape = (1 if gray else 3, *(size or first))
    x = pictures(files, name, shape, resize=size is not None, remedy="; size=[HEIGHT,WIDTH] makes them alike")
    parts, start = [], 0
    for prefix in dict.fromkeys(p.prefix for p in pictured):
        rows = [p for p in pictured if p.prefix == prefix]
        clients = [p.client for p in rows if p.client is not None]
        own = x[start : start + len(rows)]
        y, client = np.array([p.label for p in rows]), np.array(clients) if clients else None
        parts.append(part(f"dataset=folder: {root}", array_names(prefix), own, y, client))
        start += len(rows)
    return parts


Source = Path | bytes
"""An image's file, or its content."""


def survey(sources: Sequence[Source], name: Callable[[int], str]) -> tuple[bool, tuple[int, int]]:
    """Whether all images are grayscale; height and width of the first."""
    gray = np.zeros(len(sources), bool)

    def look(i: int) -> None:
        with readable(sources[i], name(i)) as image:
            gray[i] = image.mode in GRAY

    on_threads(look, len(sources))
    with readable(sources[0], name(0)) as image:
        return bool(gray.all()), (image.height, image.width)


def pictures(
    sources: Sequence[Source],
    name: Callable[[int], str],
    shape: tuple[int, ...],
    resize: bool = False,
    remedy: str = "",
) -> np.ndarray:
    """Bytes [N, C, H, W] for a shape C, H, W: grayscale where C is 1, otherwise RGB."""
    channels, height, width = shape
    out = np.empty((len(sources), *shape), np.uint8)

    def decode(i: int) -> None:
        with readable(sources[i], name(i)) as image:
            if not resize and image.size != (width, height):
                problem = f"{image.height} x {image.width} pixels where {height} x {width} are needed{remedy}"
                raise check.InputError(f"{name(i)}: {problem}")
            if image.mode in ("P", "PA"):  # by way of RGBA: a palette may be transparent in many of its colours
                image = image.convert("RGBA")
            image = image.convert("L" if channels == 1 else "RGB")
            if resize:
                image = image.resize((width, height), Image.Resampling.BILINEAR)
            out[i] = np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)

    on_threads(decode, len(sources))
    return out


@contextmanager
def readable(source: Source, name: str) -> Iterator[Image.Image]:
    try:
        with Image.open(source if isinstance(source, Path) else BytesIO(source)) as image:
            if image.mode not in GRAY and image.mode not in COLOUR:
                raise check.InputError(f"{name}: pixels of kind {image.mode}; valid: 8 bits, grayscale or colour")
            yield image
    except check.InputError:
        raise
    except Exception as error:  # a damaged file makes decoders raise nearly anything
        raise check.InputError(f"{name}: no readable image ({said(error)})") from error


def on_threads(work: Callable[[int], None], count: int, block: int = 256) -> None:
    """work(0) to work(count - 1); the first to fail ends it."""

    def some(start: int) -> None:
        for i in range(start, min(start + block, count)):
            work(i)

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(some, range(0, count, block)):
            pass
