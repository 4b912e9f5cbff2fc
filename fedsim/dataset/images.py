"""MNIST, Fashion-MNIST and CIFAR-10: fetched by torchvision where there is network, and checked before they are read.

torchvision verifies what it downloads. What already lies in `data_dir` is verified here, file by file, against the
checksums of the unpacked official files, so that a damaged copy is never trained on.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.mnist import read_image_file, read_label_file

from fedsim import check
from fedsim.data import Dataset, standardization

MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FASHION_MNIST_MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
CIFAR10_BINARY_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


MNIST_STATISTICS = [0.1307], [0.3081]
FASHION_MNIST_STATISTICS = [0.2860], [0.3530]
CIFAR10_STATISTICS = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
"""Mean and standard deviation of the training images, channel by channel."""


def mnist(data_dir: str, standardize: bool, augment: bool) -> Dataset:
    folder = Path(data_dir).expanduser() / "MNIST" / "raw"
    _fetch("mnist", datasets.MNIST, folder, MNIST_MD5)
    return _images(*_read_idx(folder), *MNIST_STATISTICS, standardize, augment)


def fashion_mnist(data_dir: str, standardize: bool, augment: bool) -> Dataset:
    folder = Path(data_dir).expanduser() / "FashionMNIST" / "raw"
    _fetch("fashion_mnist", datasets.FashionMNIST, folder, FASHION_MNIST_MD5)
    return _images(*_read_idx(folder), *FASHION_MNIST_STATISTICS, standardize, augment)


def cifar10(data_dir: str, standardize: bool, augment: bool) -> Dataset:
    """The binary version if it is there (no pickle to trust), otherwise the python version through torchvision."""
    root = Path(data_dir).expanduser()
    if (root / "cifar-10-batches-bin").is_dir():
        parts = _read_cifar_binary(root / "cifar-10-batches-bin")
    else:
        parts = _read_cifar_python(root)
    return _images(*parts, *CIFAR10_STATISTICS, standardize, augment)


def _fetch(name: str, source: type, folder: Path, md5: Mapping[str, str]) -> None:
    """Have torchvision complete the folder, then verify every file in it."""
    try:
        if not all((folder / file).exists() for file in md5):
            source(folder.parents[1], download=True)
    except (OSError, RuntimeError, URLError, EOFError) as error:
        raise _unavailable(name, folder, md5, error) from error
    _verify(name, folder, md5)


def _verify(name: str, folder: Path, md5: Mapping[str, str]) -> None:
    for file, expected in md5.items():
        path = folder / file
        if not path.is_file():
            raise check.InputError(f"dataset={name}: {path} is missing")
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "md5").hexdigest()
        if found != expected:
            raise check.InputError(
                f"dataset={name}: {path} is damaged or another file (md5 {found}, expected {expected}); "
                "delete it to have it fetched again"
            )


def _unavailable(name: str, folder: Path, files: Mapping[str, str], error: Exception) -> check.InputError:
    reason = shorten(str(error), 160, placeholder=" ...")
    return check.InputError(
        f"dataset={name}: {', '.join(files)} not found (or damaged) in {folder} and they could not be fetched "
        f"({reason}); put them there or give data_dir=FOLDER"
    )


def _read_idx(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def read(prefix: str) -> tuple[Tensor, Tensor]:
        images = read_image_file(str(folder / f"{prefix}-images-idx3-ubyte"))
        return images[:, None], read_label_file(str(folder / f"{prefix}-labels-idx1-ubyte"))

    return (*read("train"), *read("t10k"))


def _read_cifar_binary(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Records of one label byte and 3 x 32 x 32 channel planes."""
    _verify("cifar10", folder, CIFAR10_BINARY_MD5)
    records = [np.fromfile(folder / file, dtype=np.uint8).reshape(-1, 3073) for file in CIFAR10_BINARY_MD5]
    train, test = np.concatenate(records[:-1]), records[-1]
    return (*_split_records(train), *_split_records(test))


def _split_records(records: np.ndarray) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32))
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


def _read_cifar_python(root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """torchvision checks every pickle's md5 before it opens one, and fetches the archive if any is missing or wrong."""

    def read(train: bool) -> tuple[Tensor, Tensor]:
        data = datasets.CIFAR10(root, train=train, download=True)
        return torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets)

    try:
        return (*read(True), *read(False))
    except (OSError, RuntimeError, URLError, EOFError) as error:
        wanted = {f"{datasets.CIFAR10.base_folder} (or cifar-10-batches-bin)": ""}
        raise _unavailable("cifar10", root, wanted, error) from error


def _images(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    mean: list[float],
    std: list[float],
    standardize: bool,
    augment: bool,
) -> Dataset:
    check.boolean("standardize", standardize)
    check.boolean("augment", augment)
    scale, shift = standardization(mean, std, standardize)
    return Dataset(train_x, train_y, test_x, test_y, 10, scale, shift, augment)
