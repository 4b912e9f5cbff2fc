"""Datasets from files of their official formats: whole, damaged, missing; decoded once."""

import gzip
import hashlib
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import environment, experiment

from fedsim import official
from fedsim.check import InputError
from fedsim.data import Dataset
from fedsim.dataset import cifar, idx, store

R = np.random.default_rng


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def idx_bytes(array: np.ndarray) -> bytes:
    kind, dtype = (8, ">u1") if array.dtype == np.uint8 else (12, ">i4")
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.astype(dtype).tobytes()


def publish(monkeypatch: pytest.MonkeyPatch, name: str, contents: dict[str, bytes]) -> None:
    """Take the checksums of these files for the published ones."""
    entry = official.DATASETS[name]
    layouts = tuple(
        replace(
            layout,
            files=tuple(
                replace(f, md5=md5(contents[f.name]), gzip_md5="") if f.name in contents else f for f in layout.files
            ),
        )
        for layout in entry.layouts
    )
    monkeypatch.setitem(official.DATASETS, name, replace(entry, layouts=layouts))


def mnist_files() -> dict[str, bytes]:
    r, files = R(0), {}
    for prefix, n in (("train", 12), ("t10k", 5)):
        files[f"{prefix}-images-idx3-ubyte"] = idx_bytes(r.integers(0, 256, (n, 28, 28), dtype=np.uint8))
        files[f"{prefix}-labels-idx1-ubyte"] = idx_bytes((np.arange(n) % 10).astype(np.uint8))
    return files


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four small files of MNIST's format, whose checksums are taken for the official ones."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in mnist_files().items():
        (raw / name).write_bytes(content)
    publish(monkeypatch, "mnist", mnist_files())
    return tmp_path


def load(loader: Callable[..., Dataset], root: Path, **keys: object) -> Dataset:
    return loader(str(root), str(root / "cache"), **{"standardize": False, "augment": False} | keys)


def cached(root: Path) -> list[str]:
    """What lies in the cache, but for locks and notes of what was hashed."""
    return sorted(p.name for p in (root / "cache").iterdir() if not p.name.endswith(".lock") and p.name != "hashed")


def test_mnist_from_files(tiny_mnist: Path) -> None:
    data = load(idx.mnist, tiny_mnist)
    first = R(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)[0]
    assert np.array_equal(data.train_x[0, 0].numpy(), first)
    assert data.train_y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert data.test_x.shape == (5, 1, 28, 28)
    assert (data.num_classes, data.train_x.dtype, data.train_y.dtype) == (10, torch.uint8, torch.int64)


def test_packed_files_straight_in_the_data_folder_are_the_same_data(tiny_mnist: Path, tmp_path: Path) -> None:
    """As Debian and the original site have them; the gzip header does not matter."""
    flat = tmp_path / "flat"
    flat.mkdir()
    for name, content in mnist_files().items():
        (flat / f"{name}.gz").write_bytes(gzip.compress(content, mtime=123))
    assert load(idx.mnist, flat).fingerprint == load(idx.mnist, tiny_mnist).fingerprint


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "gzip"])
def test_damaged_files_are_never_trained_on(tiny_mnist: Path, damage: str) -> None:
    file = tiny_mnist / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    wrong = {"truncate": bytes(content[:-100]), "flip": bytes(content), "empty": b""}
    file.unlink()
    if damage == "gzip":
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(bytes(content))[:-40])
    else:
        file.write_bytes(wrong[damage])
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte(\.gz)? is (damaged or another file|truncated)"):
        load(idx.mnist, tiny_mnist)
    assert cached(tiny_mnist) == []


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment().items():
        monkeypatch.setenv(key, value)


LOADERS: dict[str, Callable[..., Dataset]] = {
    "mnist": idx.mnist,
    "fashion_mnist": idx.fashion_mnist,
    "mnist_writers": idx.mnist_writers,
    "emnist": lambda *a, **k: idx.emnist(*a, split="byclass", **k),
    "cifar10": cifar.cifar10,
    "cifar100": lambda *a, **k: cifar.cifar100(*a, labels="fine", **k),
    "fed_cifar100": lambda *a, **k: cifar.fed_cifar100(*a, source="tff", alpha=0.1, beta=10, seed=0, **k),
}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", LOADERS)
def test_missing_files_without_network_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        load(LOADERS[name], tmp_path)
    said = str(error.value)
    assert f"dataset={name}" in said
    assert f"fedsim-data get {name}" in said
    assert str(tmp_path) in said
    assert "\n" not in said


@pytest.mark.usefixtures("offline")
def test_one_missing_file_is_noticed(tiny_mnist: Path) -> None:
    (tiny_mnist / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte not found"):
        load(idx.mnist, tiny_mnist)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with nothing"),
        (b"PK\x03\x04rest", "begins with 504b0304"),
        (idx_bytes(np.zeros((3, 4), np.uint8))[:-1], "file, of shape 3x4, is truncated"),
        (idx_bytes(np.zeros((1, 3), np.uint8)) + b"x", "shape 1x3, is truncated or too long: 4 bytes"),
        (idx_bytes(np.zeros(3, np.uint8)), "file has 1 axes, expected 2"),
    ],
)
def test_what_is_no_idx_file(content: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        idx.parse(content, "file", 2)


def test_idx_of_integers() -> None:
    table = np.array([[1, -2], [70000, 4]], dtype=np.int32)
    assert idx.parse(idx_bytes(table), "file", 2).tolist() == table.tolist()


def emnist_files(split: str, classes: int) -> dict[str, bytes]:
    r, files = R(3), {}
    for part, n in (("train", classes), ("test", 7)):
        images = r.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        files[f"emnist-{split}-{part}-images-idx3-ubyte"] = idx_bytes(images)
        files[f"emnist-{split}-{part}-labels-idx1-ubyte"] = idx_bytes((np.arange(n) % classes).astype(np.uint8))
    return files


@pytest.mark.parametrize(("split", "classes"), [("byclass", 62), ("digits", 10)])
def test_emnist_unpacked_or_in_its_archive(
    split: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are stored with rows and columns exchanged."""
    loose, packed = tmp_path / "loose", tmp_path / "packed"
    for folder in (loose, packed):
        (folder / "EMNIST" / "raw").mkdir(parents=True)
    files = emnist_files(split, classes)
    with zipfile.ZipFile(packed / "EMNIST/raw/gzip.zip", "w") as archive:
        for name, content in files.items():
            (loose / "EMNIST/raw" / name).write_bytes(content)
            archive.writestr(f"gzip/{name}.gz", gzip.compress(content))
    publish(monkeypatch, "emnist", {"gzip.zip": (packed / "EMNIST/raw/gzip.zip").read_bytes()})
    data = load(idx.emnist, loose, split=split)
    assert data.num_classes == classes
    assert len(data.class_names) == classes
    first = R(3).integers(0, 256, (classes, 28, 28), dtype=np.uint8)[0]
    assert np.array_equal(data.train_x[0, 0].numpy(), first.T)
    assert load(idx.emnist, packed, split=split).fingerprint == data.fingerprint


def test_emnist_archive_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "EMNIST/raw/gzip.zip"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"PK\x03\x04 not all of it")
    with pytest.raises(InputError, match=r"gzip\.zip is damaged or another file"):
        load(idx.emnist, tmp_path, split="digits")
    publish(monkeypatch, "emnist", {"gzip.zip": file.read_bytes()})
    with pytest.raises(InputError, match=r"gzip\.zip: gzip/emnist-digits-train.* cannot be read"):
        load(idx.emnist, tmp_path, split="digits")


WRITERS = {"train": [7, 7, 9, 9, 9, 30, 30, 30, 30, 7, 9, 30], "test": [7, 41, 41, 7, 41]}


def qmnist_files() -> dict[str, bytes]:
    """Rows of (label, series, writer, ...) as QMNIST's; its test file goes on beyond MNIST's test set."""
    files = {}
    for part, writers in WRITERS.items():
        extra = 3 if part == "test" else 0
        table = np.zeros((len(writers) + extra, 8), dtype=np.int32)
        table[:, 0], table[: len(writers), 2] = np.arange(len(table)) % 10, writers
        files[f"qmnist-{part}-labels-idx2-int"] = idx_bytes(table)
    return files


@pytest.mark.parametrize("form", ["qmnist", "npz"])
def test_mnist_by_writer(tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    publish(monkeypatch, "mnist_writers", mnist_files())
    if form == "qmnist":
        for name, content in qmnist_files().items():
            (tiny_mnist / "MNIST/raw" / name).write_bytes(content)
    else:
        arrays = {f"{part}_writer": np.array(writers, np.int16) for part, writers in WRITERS.items()}
        np.savez(tiny_mnist / "MNIST/mnist_writer_ids.npz", **arrays)
    data = load(idx.mnist_writers, tiny_mnist)
    assert data.client_names == ("0007", "0009", "0030", "0041")
    assert data.train_client is not None
    assert data.test_client is not None
    assert [int(data.client_names[c]) for c in data.train_client] == WRITERS["train"]
    assert [int(data.client_names[c]) for c in data.test_client] == WRITERS["test"]


def test_writers_of_other_images_are_refused(tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "mnist_writers", mnist_files())
    for name in qmnist_files():
        (tiny_mnist / "MNIST/raw" / name).write_bytes(idx_bytes(np.ones((12, 8), np.int32)))
    with pytest.raises(InputError, match="qmnist-train-labels-idx2-int: its labels are not MNIST's"):
        load(idx.mnist_writers, tiny_mnist)


def cifar10_planes() -> dict[str, np.ndarray]:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    r = R(1)
    return {name: r.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8) for name in names}


def test_cifar10_binary_and_python_are_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label byte, then the red, green and blue planes; or pickles of the same rows."""
    binary, python, contents = tmp_path / "binary", tmp_path / "python", {}
    for root, folder in ((binary, "cifar-10-batches-bin"), (python, "cifar-10-batches-py")):
        (root / folder).mkdir(parents=True)
    for i, (name, x) in enumerate(cifar10_planes().items()):
        rows = np.hstack([np.full((4, 1), i, dtype=np.uint8), x.reshape(4, -1)])
        contents[f"{name}.bin"] = rows.tobytes()
        contents[name] = pickle.dumps({"data": x.reshape(4, -1), "labels": [i] * 4})
        (binary / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(contents[f"{name}.bin"])
        (python / "cifar-10-batches-py" / name).write_bytes(contents[name])
    publish(monkeypatch, "cifar10", contents)
    data = load(cifar.cifar10, binary, augment=True)
    assert data.train_x.shape == (20, 3, 32, 32)
    assert np.array_equal(data.train_x[4:8].numpy(), cifar10_planes()["data_batch_2"])
    assert data.train_y.tolist() == sorted([0, 1, 2, 3, 4] * 4)
    assert data.test_y.tolist() == [5] * 4
    assert data.augment
    assert load(cifar.cifar10, python).fingerprint == data.fingerprint


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_an_unchecked_pickle_is_never_opened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A python-version folder with wrong checksums is refused, not unpickled."""
    for file in official.DATASETS[name].layout("python").files:
        path = tmp_path / file.path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"dataset={name}.*is damaged or another file"):
        load(LOADERS[name], tmp_path)
    assert not (tmp_path / "owned").exists()


def cifar100_rows(n: int, seed: int, coarse_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """n records (coarse, fine, planes) with every fine label as often as any other."""
    fine = np.arange(n) % 100
    planes = R(seed).integers(0, 256, (n, 3072), dtype=np.uint8)
    return np.hstack([coarse_of[fine][:, None], fine[:, None], planes]).astype(np.uint8), planes


@pytest.fixture
def tiny_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    coarse_of = R(5).permutation(np.repeat(np.arange(20), 5))
    folder, contents = tmp_path / "cifar-100-binary", {}
    folder.mkdir()
    for part, n in (("train", 1000), ("test", 200)):
        rows, _ = cifar100_rows(n, 6, coarse_of)
        contents[f"{part}.bin"] = rows.tobytes()
        (folder / f"{part}.bin").write_bytes(contents[f"{part}.bin"])
    publish(monkeypatch, "cifar100", contents)
    return tmp_path


def test_cifar100_fine_and_coarse(tiny_cifar100: Path) -> None:
    coarse_of = R(5).permutation(np.repeat(np.arange(20), 5))
    fine = load(cifar.cifar100, tiny_cifar100, labels="fine")
    coarse = load(cifar.cifar100, tiny_cifar100, labels="coarse")
    assert (fine.num_classes, coarse.num_classes) == (100, 20)
    assert fine.coarse is not None
    assert fine.coarse.tolist() == coarse_of.tolist()
    assert coarse.coarse is None
    assert fine.train_y[:3].tolist() == [0, 1, 2]
    assert coarse.train_y[:3].tolist() == coarse_of[:3].tolist()
    assert torch.equal(fine.train_x, coarse.train_x)


def test_a_fine_label_with_two_coarse_ones_is_refused() -> None:
    with pytest.raises(InputError, match="two of them"):
        cifar.hierarchy(np.array([[0, 0], [1, 1], [1, 0]]))


def test_fed_cifar100_is_allotted_by_pachinko(tiny_cifar100: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Balanced clients, different ones to test on, another allotment for another seed."""
    monkeypatch.setattr(cifar, "TRAIN_CLIENTS", 50)
    monkeypatch.setattr(cifar, "TEST_CLIENTS", 10)
    keys = {"source": "pachinko", "alpha": 0.1, "beta": 10.0}
    data, other = (load(cifar.fed_cifar100, tiny_cifar100, seed=seed, **keys) for seed in (0, 1))
    assert data.train_client is not None
    assert data.test_client is not None
    assert np.bincount(data.train_client).tolist() == [20] * 50
    assert np.bincount(data.test_client).tolist() == [0] * 50 + [20] * 10
    assert len(data.client_names) == 60
    classes = [len({*data.coarse[data.train_y.numpy()[data.train_client == k]]}) for k in range(50)]  # type: ignore[index]
    assert np.mean(classes) < 8, "Dirichlet 0.1 over 20 coarse labels leaves a client few of them"
    assert data.fingerprint != other.fingerprint
    again = load(cifar.fed_cifar100, tiny_cifar100, seed=0, **keys)
    assert data.fingerprint == again.fingerprint
    assert len(cached(tiny_cifar100)) == 1, "the images are kept once, whoever holds them"


def test_standardisation_constants(tiny_mnist: Path, tiny_cifar100: Path) -> None:
    """Mean and deviation of the training images, as commonly published."""
    for mean, std, data in (
        ([0.1307], [0.3081], experiment("dataset=mnist5k").data.dataset),
        ([0.1307], [0.3081], load(idx.mnist, tiny_mnist, standardize=True)),
        (
            [0.5071, 0.4865, 0.4409],
            [0.2673, 0.2564, 0.2762],
            load(LOADERS["cifar100"], tiny_cifar100, standardize=True),
        ),
    ):
        assert (data.scale.flatten() * 255 * torch.tensor(std)).tolist() == pytest.approx([1.0] * len(std))
        assert (-data.shift.flatten() * torch.tensor(std)).tolist() == pytest.approx(mean)
    assert idx.FASHION_MNIST_STATISTICS == ([0.2860], [0.3530])
    assert cifar.CIFAR10_STATISTICS == ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])


# --- the cache of decoded data ---


SAMPLES = {
    "train_x": np.arange(24, dtype=np.float32).reshape(6, 4),
    "train_y": np.array([0, 1, 2, 0, 1, 2]),
    "test_x": np.ones((3, 4), np.float32),
    "test_y": np.array([2, 1, 0]),
    "class_names": np.array(["a", "b", "c"]),
}


class Decoder:
    """Counts how often it is asked."""

    def __init__(self, **changes: np.ndarray) -> None:
        self.calls, self.changes = 0, changes

    def __call__(self) -> store.Arrays:
        self.calls += 1
        return {**SAMPLES, **self.changes}


def keep(tmp_path: Path, decode: Decoder, content: bytes = b"x", **parameters: object) -> store.Decoded:
    file = tmp_path / "source"
    if not file.exists() or file.read_bytes() != content:
        file.write_bytes(content)
    return store.decoded("mine", [file], decode, str(tmp_path / "cache"), **parameters)


def test_decoded_once_and_mapped_from_then_on(tmp_path: Path) -> None:
    decode = Decoder()
    first, second = keep(tmp_path, decode), keep(tmp_path, decode)
    assert decode.calls == 1
    assert first.fingerprint == second.fingerprint
    for key, array in SAMPLES.items():
        assert isinstance(second.arrays[key], np.memmap)
        assert np.array_equal(second.arrays[key], array)
    second.arrays["train_x"][0, 0] = 99  # stays in this process
    assert keep(tmp_path, decode).arrays["train_x"][0, 0] == 0


def test_other_content_or_parameters_are_another_copy(tmp_path: Path) -> None:
    decode = Decoder()
    keep(tmp_path, decode)
    keep(tmp_path, decode, b"y")
    keep(tmp_path, decode, b"y", form="window")
    assert decode.calls == 3
    keep(tmp_path, decode)
    assert decode.calls == 3, "known by its content, not by its time stamp"
    os.utime(tmp_path / "source")
    keep(tmp_path, decode)
    assert decode.calls == 3


@pytest.mark.parametrize("damage", ["shorter", "gone", "another byte", "no meta", "bad meta"])
def test_a_damaged_copy_is_made_again(tmp_path: Path, damage: str) -> None:
    decode = Decoder()
    keep(tmp_path, decode)
    (folder,) = (tmp_path / "cache").glob("mine-*")
    file = folder / ("meta.json" if "meta" in damage else "train_x.npy")
    if damage in ("gone", "no meta"):
        file.unlink()
    elif damage == "another byte":
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    else:
        file.write_bytes(file.read_bytes()[:-5])
    assert np.array_equal(keep(tmp_path, decode).arrays["train_x"], SAMPLES["train_x"])
    assert decode.calls == 2
    assert cached(tmp_path) == [folder.name]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_y": np.array([0, 1, 2, 0, 3, 2])}, "train sample 4 has the label 3; valid: 0 to 2"),
        ({"test_y": np.array([0, -1, 2])}, "test sample 1 has the label -1; valid: 0 to 2"),
        ({"train_y": np.array([0, 1])}, "6 train samples, but 2 labels"),
        ({"test_x": np.array([[0, 1, 2, np.nan]] * 3, np.float32)}, "test sample 0 (and 2 more) has a NaN"),
        ({"test_x": np.ones((3, 5), np.float32)}, "training samples have shape (4,), test samples (5,)"),
        ({"test_x": np.ones((0, 4), np.float32), "test_y": np.zeros(0, int)}, "there are no test samples"),
        (
            {"train_client": np.array([0, 0, 0, 2, 2, 2]), "client_names": np.array(["ann", "bob", "cid"])},
            "client bob has no samples",
        ),
        (
            {"train_client": np.array([0, 0, 0, 1, 1, 1]), "client_names": np.array(["ann"])},
            "a train sample belongs to client 1, but there are 1 clients",
        ),
        (
            {"train_y": np.array([[1, 2]] * 5 + [[0, 0]]), "test_y": np.array([[1, 0]] * 3)},
            "train sample 5 has no target: nothing but padding",
        ),
    ],
)
def test_wrong_data_are_refused_and_the_cache_left_clean(
    tmp_path: Path, changes: dict[str, np.ndarray], said: str
) -> None:
    with pytest.raises(InputError) as error:
        keep(tmp_path, Decoder(**changes))
    assert str(error.value).startswith(f"dataset=mine: {said}")
    assert cached(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real error of a real write: a file-size limit stands in for the disk."""
    import resource
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = Decoder(train_x=np.zeros((6, 50_000), np.float32), test_x=np.zeros((3, 50_000), np.float32))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(InputError, match=r"^cache_dir: .* cannot be written to \(File too large\)"):
            keep(tmp_path, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert cached(tmp_path) == []
    keep(tmp_path, big)
    assert len(cached(tmp_path)) == 1


def test_an_interrupted_decoding_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted() -> store.Arrays:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.decoded("mine", [], interrupted, str(tmp_path / "cache"))
    assert cached(tmp_path) == []


def test_what_a_killed_process_left_is_swept_up(tmp_path: Path) -> None:
    decode = Decoder()
    keep(tmp_path, decode)
    (folder,) = (tmp_path / "cache").glob("mine-*")
    folder.rename(folder.with_name(f".{folder.name}-killed"))
    keep(tmp_path, decode)
    assert cached(tmp_path) == [folder.name]


def test_a_cache_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match=r"cache_dir: .* cannot be written to"):
        keep(tmp_path, Decoder())
