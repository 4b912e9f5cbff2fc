"""CIFAR-10 and CIFAR-100, from the binary version (no pickle to trust) or the python one; and Fed-CIFAR100."""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsim import check, fetch, official, rng
from fedsim.data import Dataset, Population, standardization
from fedsim.dataset import store
from fedsim.dataset.store import Arrays, Decoded
from fedsim.partition.pachinko import Pachinko

PIXELS = 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR10_STATISTICS = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
CIFAR100_STATISTICS = [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]
"""Mean and standard deviation of the training images, channel by channel."""

TRAIN_CLIENTS, TEST_CLIENTS = 500, 100


def cifar10(data_dir: str, cache_dir: str, standardize: bool, augment: bool) -> Dataset:
    check.boolean("standardize", standardize)
    check.boolean("augment", augment)
    layout, files = fetch.ensure("cifar10", data_dir)

    def decode() -> Arrays:
        official.verify("cifar10", layout, files)  # before anything is opened: a pickle can run code
        train_x, train_y = read(files[:-1], layout, ("labels",))
        test_x, test_y = read(files[-1:], layout, ("labels",))
        return {
            **{"train_x": train_x, "train_y": train_y[:, 0], "test_x": test_x, "test_y": test_y[:, 0]},
            "class_names": np.array(CLASSES),
        }

    found = store.decoded("cifar10", files, decode, cache_dir)
    return store.dataset(found, *standardization(*CIFAR10_STATISTICS, standardize), augment)


def cifar100(data_dir: str, cache_dir: str, labels: str, standardize: bool, augment: bool) -> Dataset:
    """100 fine classes that know their coarse ones, or the 20 coarse classes."""
    check.choice("labels", labels, ("fine", "coarse"))
    check.boolean("standardize", standardize)
    check.boolean("augment", augment)
    found = decoded_cifar100(data_dir, cache_dir, labels)
    return store.dataset(found, *standardization(*CIFAR100_STATISTICS, standardize), augment)


def fed_cifar100(
    data_dir: str,
    cache_dir: str,
    source: str,
    alpha: float,
    beta: float,
    standardize: bool,
    augment: bool,
    seed: int,
) -> Dataset:
    """CIFAR-100 over 500 training and 100 test clients of 100 images: as TFF publishes it, or allotted here."""
    check.choice("source", source, ("pachinko", "tff"))
    check.integer("seed", seed, ge=0)
    check.boolean("standardize", standardize)
    check.boolean("augment", augment)
    constants = standardization(*CIFAR100_STATISTICS, standardize)
    if source == "tff":
        from fedsim.dataset import femnist  # here: plain CIFAR needs no HDF5 at its start

        _, files = fetch.ensure("fed_cifar100", data_dir)
        found = store.decoded("fed_cifar100", files, lambda: femnist.decode_fed_cifar100(*files), cache_dir)
        return store.dataset(found, *constants, augment)
    found = decoded_cifar100(data_dir, cache_dir, "fine")
    whole = store.dataset(found, *constants, augment)
    owners = {}
    for part, clients in (("train", TRAIN_CLIENTS), ("test", TEST_CLIENTS)):
        law = Pachinko(num_clients=clients, sensitivity_fraction=0, sigma=0, power=0, alpha=alpha, beta=beta)
        people = Population(found.arrays[f"{part}_y"], coarse=whole.coarse)
        owners[part] = law.assign(people, rng.generator(seed, f"fed_cifar100 {part}"))
    allotted = hashlib.sha256(owners["train"].astype("<i8").tobytes() + owners["test"].astype("<i8").tobytes())
    return replace(
        whole,
        train_client=owners["train"],
        test_client=owners["test"] + TRAIN_CLIENTS,
        client_names=(
            *(f"train {k}" for k in range(TRAIN_CLIENTS)),
            *(f"test {k}" for k in range(TEST_CLIENTS)),
        ),
        fingerprint=hashlib.sha256(f"{found.fingerprint}{allotted.hexdigest()}".encode()).hexdigest()[:16],
    )


def decoded_cifar100(data_dir: str, cache_dir: str, labels: str) -> Decoded:
    layout, files = fetch.ensure("cifar100", data_dir)

    def decode() -> Arrays:
        official.verify("cifar100", layout, files)  # before anything is opened: a pickle can run code
        train_x, train = read(files[:1], layout, ("coarse_labels", "fine_labels"))
        test_x, test = read(files[1:], layout, ("coarse_labels", "fine_labels"))
        column, classes = (1, 100) if labels == "fine" else (0, 20)
        arrays = {
            **{"train_x": train_x, "train_y": train[:, column], "test_x": test_x, "test_y": test[:, column]},
            "class_names": np.arange(classes).astype(str),
        }
        return arrays | ({"coarse": hierarchy(np.concatenate([train, test]))} if labels == "fine" else {})

    return store.decoded("cifar100", files, decode, cache_dir, labels=labels)


def hierarchy(labels: np.ndarray) -> np.ndarray:
    """The coarse label of each fine one, from samples that have both."""
    coarse, fine = labels.T
    table = np.full(fine.max() + 1, -1)
    table[fine] = coarse
    if (table < 0).any() or (table[fine] != coarse).any():
        raise check.InputError("dataset: a fine label has no coarse one, or two of them")
    return table


def read(files: Sequence[Path], layout: str, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 3, 32, 32] and labels [N, len(keys)] of all files, in their order."""
    images, labels = [], []
    for file in files:
        content = official.read(file)
        if layout == "binary":  # records of the label bytes and three channel planes
            records = np.frombuffer(content, np.uint8).reshape(-1, len(keys) + PIXELS)
            images.append(records[:, len(keys) :])
            labels.append(records[:, : len(keys)])
        else:
            table = pickle.loads(content, encoding="latin1")
            images.append(table["data"])
            labels.append(np.stack([table[key] for key in keys], axis=1))
    return np.concatenate(images).reshape(-1, 3, 32, 32), np.concatenate(labels).astype(np.int64)
