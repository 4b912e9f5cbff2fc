"""CINIC-10: 270,000 images of CIFAR-10's classes, from CIFAR-10 and ImageNet. Darlow et al., 2018, arXiv:1810.03505."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsim import check, fetch, official
from fedsim.data import Dataset, standardization
from fedsim.dataset import store
from fedsim.dataset.cifar import CLASSES
from fedsim.dataset.pictures import pictures
from fedsim.dataset.store import Arrays

STATISTICS = [0.47889522, 0.47227842, 0.43047404], [0.24205776, 0.23828046, 0.25874835]
"""Mean and standard deviation of the training images, channel by channel, as its authors give them."""


def cinic10(data_dir: str, cache_dir: str, standardize: bool, augment: bool, train: str) -> Dataset:
    """`train`: the training images alone, or with the validation images as well."""
    check.choice("train", train, ("train", "train+valid"))
    check.boolean("standardize", standardize)
    check.boolean("augment", augment)
    layout, files = fetch.ensure("cinic10", data_dir)
    to_train = [file for file in files if file.parts[-3] in train.split("+")]
    to_test = [file for file in files if file.parts[-3] == "test"]
    used = to_train + to_test

    def decode() -> Arrays:
        folders(files)
        official.verify("cinic10", layout, files)  # whether all images are there
        return decode_cinic10(to_train, to_test)

    names = hashlib.sha256("/".join("/".join(file.parts[-3:]) for file in used).encode()).hexdigest()
    # With the names, since a folder's name is the label and the content does not tell it.
    found = store.decoded("cinic10", used, decode, cache_dir, names=names)
    return store.dataset(found, *standardization(*STATISTICS, standardize), augment)


def decode_cinic10(train: Sequence[Path], test: Sequence[Path]) -> Arrays:
    """Files SPLIT/CLASS/NAME.png of 32 x 32 pixels. Some are grayscale: they become RGB."""
    arrays: Arrays = {"class_names": np.array(CLASSES)}
    for part, files in (("train", train), ("test", test)):
        arrays[f"{part}_x"] = pictures(files, [f"dataset=cinic10: {file}" for file in files].__getitem__, (3, 32, 32))
        arrays[f"{part}_y"] = np.array([CLASSES.index(file.parts[-2]) for file in files])
    return arrays


def folders(files: Sequence[Path]) -> None:
    """Ten classes in every split, neither more nor less."""
    found: dict[Path, set[str]] = {}
    for file in files:
        found.setdefault(file.parents[1], set()).add(file.parts[-2])
    for split, classes in found.items():
        for problem, names in (("lacks", set(CLASSES) - classes), ("should not have", classes - set(CLASSES))):
            if names:
                what = ", ".join(sorted(names))
                raise check.InputError(f"dataset=cinic10: {split} {problem} {what}; valid: {', '.join(CLASSES)}")
