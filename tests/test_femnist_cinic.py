"""FEMNIST, Fed-CIFAR100 and CINIC-10 from small files of the published formats, whole and damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from fedsim import fetch, official
from fedsim.check import BadValue, InputError
from fedsim.data import Dataset
from fedsim.dataset import cinic10, femnist

Clients = dict[str, tuple[np.ndarray, list[int]]]

FEMNIST: dict[str, Any] = {"source": "auto", "only_digits": False, "standardize": False}
CINIC: dict[str, Any] = {"standardize": True, "augment": False, "train": "train"}


def draw(seed: int, *labels: int) -> tuple[np.ndarray, list[int]]:
    """Random bytes [n, 28, 28] and the labels."""
    return np.random.default_rng(seed).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8), list(labels)


TRAIN: Clients = {"f0001_41": draw(1, 3, 61), "f0000_14": draw(2, 10, 0, 9)}
TEST: Clients = {"f0002_07": draw(3, 36), "f0001_41": draw(4, 5)}
"""One writer in both parts, one in each alone."""


def write_h5(path: Path, clients: Clients) -> None:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        examples = file.create_group("examples")
        for name, (pixels, labels) in clients.items():
            examples[f"{name}/pixels"] = pixels.astype(np.float32) / np.float32(255)
            examples[f"{name}/label"] = np.array(labels, np.int32)


def write_json(path: Path, clients: Clients) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        name: {"x": [(image.flatten() / 255).tolist() for image in pixels], "y": labels}
        for name, (pixels, labels) in clients.items()
    }
    counts = [len(labels) for _, labels in clients.values()]
    path.write_text(json.dumps({"users": list(clients), "num_samples": counts, "user_data": data}))


@pytest.fixture
def tff(tmp_path: Path) -> Path:
    write_h5(tmp_path / "fed_emnist/fed_emnist_train.h5", TRAIN)
    write_h5(tmp_path / "fed_emnist/fed_emnist_test.h5", TEST)
    return tmp_path


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """A file for each training client, so that one client comes after another in two ways."""
    for i, (name, samples) in enumerate(TRAIN.items()):
        write_json(tmp_path / f"femnist/train/all_data_{i}_niid.json", {name: samples})
    write_json(tmp_path / "femnist/test/all_data_0.json", TEST)
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: object, **__: object) -> None:
        raise InputError("no network")

    monkeypatch.setattr(fetch, "get", get)


def load(folder: Path, **options: Any) -> Dataset:
    return femnist.femnist(str(folder), str(folder / "cache"), **{**FEMNIST, **options})


# FEMNIST


def test_tff_is_read_as_it_was_written(tff: Path) -> None:
    data = load(tff)
    assert data.client_names == ("f0000_14", "f0001_41", "f0002_07")
    assert data.train_client is not None
    assert data.train_client.tolist() == [0, 0, 0, 1, 1]
    assert data.test_client is not None
    assert data.test_client.tolist() == [1, 2]
    assert data.train_y.tolist() == [10, 0, 9, 3, 61]
    assert data.test_y.tolist() == [5, 36]
    assert data.num_classes == 62
    assert [data.class_names[i] for i in (0, 9, 10, 35, 36, 61)] == list("09AZaz")
    assert data.train_x.dtype == torch.uint8
    assert data.input_shape == (1, 28, 28)
    expected = np.concatenate([TRAIN["f0000_14"][0], TRAIN["f0001_41"][0]])
    assert np.array_equal(data.train_x[:, 0].numpy(), expected), "the bytes, not turned"
    assert np.allclose(data.inputs(data.train_x)[:, 0].numpy(), expected / 255, atol=1e-7), "as published, in [0, 1]"


def test_leaf_is_the_same_data(tff: Path, leaf: Path) -> None:
    assert load(leaf, source="leaf").fingerprint == load(tff, source="tff").fingerprint


def test_auto_takes_tff_first(leaf: Path) -> None:
    assert load(leaf).train_y.tolist() == [10, 0, 9, 3, 61], "LEAF's, there is nothing else"
    write_h5(leaf / "fed_emnist/fed_emnist_train.h5", {"f0000_14": draw(5, 7)})
    write_h5(leaf / "fed_emnist/fed_emnist_test.h5", {"f0000_14": draw(6, 8)})
    assert load(leaf).train_y.tolist() == [7]
    assert load(leaf, source="leaf").train_y.tolist() == [10, 0, 9, 3, 61]


def test_digits_have_files_of_their_own_at_tff(tff: Path) -> None:
    write_h5(tff / "fed_emnist/fed_emnist_digitsonly_train.h5", {"f0000_14": draw(5, 7)})
    write_h5(tff / "fed_emnist/fed_emnist_digitsonly_test.h5", {"f0000_14": draw(6, 8)})
    data = load(tff, only_digits=True)
    assert data.num_classes == 10
    assert data.class_names == tuple("0123456789")
    assert data.train_y.tolist() == [7]
    write_h5(tff / "fed_emnist/fed_emnist_digitsonly_test.h5", {"f0000_14": draw(6, 10)})
    with pytest.raises(InputError, match="sample 0 has the label 10; valid: whole numbers from 0 to 9"):
        load(tff, only_digits=True)


def test_digits_are_picked_from_leaf(leaf: Path) -> None:
    """The test client with a letter alone is left out."""
    assert load(leaf).num_classes == 62
    data = load(leaf, only_digits=True)
    assert data.train_y.tolist() == [0, 9, 3]
    assert data.test_y.tolist() == [5]
    assert data.client_names == ("f0000_14", "f0001_41")
    assert np.array_equal(data.train_x[:2, 0].numpy(), TRAIN["f0000_14"][0][1:])


def test_standardised_by_the_training_images(tmp_path: Path) -> None:
    """Half of the pixels 51/255 = 0.2, half 153/255 = 0.6: mean 0.4, deviation 0.2."""
    pixels = np.full((1, 28, 28), 51, np.uint8)
    pixels[0, 14:] = 153
    write_h5(tmp_path / "fed_emnist/fed_emnist_train.h5", {"a": (pixels, [0])})
    write_h5(tmp_path / "fed_emnist/fed_emnist_test.h5", {"a": (np.full((1, 28, 28), 255, np.uint8), [0])})
    data = load(tmp_path, standardize=True)
    assert data.inputs(data.train_x)[0, 0, :, 0].tolist() == pytest.approx([-1] * 14 + [1] * 14, abs=1e-5)
    assert data.inputs(data.test_x).unique().tolist() == pytest.approx([3.0], abs=1e-5)


def test_decoded_once(tff: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(tff)
    monkeypatch.setattr(femnist, "decode_tff", lambda *_: pytest.fail("decoded twice"))
    assert load(tff, standardize=True).fingerprint == first.fingerprint


@settings(deadline=None)
@given(hnp.arrays(np.uint8, (3, 5)), st.sampled_from([np.float32, np.float64]))
def test_bytes_survive_division(pixels: np.ndarray, dtype: type) -> None:
    assert np.array_equal(femnist.as_bytes("here", pixels.astype(dtype) / dtype(255)), pixels)
    rounded = np.round(pixels / 255, 3).astype(dtype)  # three digits still tell one byte from the next
    assert np.array_equal(femnist.as_bytes("here", rounded), pixels)


@settings(deadline=None)
@given(
    hnp.arrays(np.uint8, (4, 3)),
    st.one_of(
        st.floats(max_value=-0.0011),
        st.floats(min_value=1.0011),
        st.integers(0, 254).map(lambda k: (k + 0.5) / 255),
        st.sampled_from([float("nan"), float("inf")]),
    ),
    st.integers(0, 3),
)
def test_other_pixels_are_refused(pixels: np.ndarray, wrong: float, row: int) -> None:
    x = pixels / 255
    x[row, 1] = wrong
    with pytest.raises(InputError, match=f"here: sample {row} has a pixel .*; valid: a whole number from 0 to 255"):
        femnist.as_bytes("here", x)


def with_client(**datasets: Any) -> Callable[[h5py.File], None]:
    """Another client, called z, with these datasets."""

    def change(file: h5py.File) -> None:
        file["examples"].create_group("z")
        for name, values in datasets.items():
            file[f"examples/z/{name}"] = values

    return change


PIXELS = np.ones((2, 28, 28), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.move("examples", "samples"), "has no group examples; valid: TensorFlow Federated's HDF5"),
        (with_client(pixels=PIXELS), "examples/z has no dataset label; valid: pixels, label"),
        (with_client(label=[1, 2]), "examples/z has no dataset pixels"),
        (lambda file: file.create_dataset("examples/z", data=[1]), "examples/z has no dataset pixels"),
        (with_client(pixels=PIXELS, label=[1]), "examples/z/label has 1 entries, but pixels has 2"),
        (with_client(pixels=PIXELS[:0], label=np.zeros(0, int)), "examples/z is empty"),
        (with_client(pixels=PIXELS[:, 1:], label=[1, 2]), r"examples/z/pixels is float32 of shape \(2, 27, 28\)"),
        (with_client(pixels=PIXELS, label=[[1], [2]]), r"examples/z/label is int64 of shape \(2, 1\)"),
        (with_client(pixels=PIXELS, label=[b"a", b"b"]), "examples/z/label is object of shape"),
        (with_client(pixels=PIXELS, label=[1, 62]), "client z: sample 1 has the label 62; valid: .* 0 to 61"),
        (with_client(pixels=PIXELS, label=[1, -1]), "client z: sample 1 has the label -1"),
        (with_client(pixels=PIXELS, label=[1.0, 2.0]), "client z: labels are float64; valid: whole numbers"),
        (with_client(pixels=PIXELS * np.nan, label=[1, 2]), "client z: sample 0 has a pixel nan"),
        (with_client(pixels=PIXELS * 255, label=[1, 2]), r"client z: sample 0 has a pixel 255\.0"),
        (with_client(pixels=PIXELS * 0.5, label=[1, 2]), r"client z: sample 0 has a pixel 0\.5"),
    ],
)  # fmt: skip
def test_wrong_h5_files_are_named(tff: Path, change: Callable[[h5py.File], None], message: str) -> None:
    with h5py.File(tff / "fed_emnist/fed_emnist_test.h5", "a") as file:
        change(file)
    with pytest.raises(InputError, match=message) as error:
        load(tff)
    assert "fed_emnist_test.h5" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["empty", "text", "half", "end"])
def test_files_that_are_no_hdf5(tff: Path, damage: str) -> None:
    file = tff / "fed_emnist/fed_emnist_train.h5"
    content = file.read_bytes()
    file.write_bytes(
        {"empty": b"", "text": b"pixels", "half": content[: len(content) // 2], "end": content[:-9]}[damage]
    )
    with pytest.raises(InputError, match=r"fed_emnist_train\.h5 is no HDF5 file, or it is damaged \("):
        load(tff)


def test_a_file_without_clients(tff: Path) -> None:
    write_h5(tff / "fed_emnist/fed_emnist_test.h5", {})
    with pytest.raises(InputError, match="there are no clients to test on"):
        load(tff)


def user(x: object, y: object, count: int = 1) -> dict[str, object]:
    return {"users": ["u"], "num_samples": [count], "user_data": {"u": {"x": x, "y": y}}}


WHITE = [1.0] * 784


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is a list or a value; LEAF's files are"),
        ({"users": ["u"]}, "num_samples is missing"),
        (user([WHITE], [1]) | {"user_data": []}, "user_data is no dict"),
        (user([WHITE], [1]) | {"users": ["v"]}, "u is in only one of users and user_data"),
        (user([WHITE], [1]) | {"users": [["v"]]}, "users are not all names"),
        (user([WHITE], [1]) | {"users": ["u", "u"], "num_samples": [1, 1]}, "a user is there twice"),
        (user([], [], 0), "user u has no samples"),
        (user([WHITE], [1, 2]), "user u has 1 x, 2 y and num_samples 1"),
        (user([WHITE[1:]], [1]), r"user u: x is float64 of shape \(1, 783\)"),
        (user([WHITE, WHITE[1:]], [1, 2], 2), r"user u has no x of 784 numbers a sample \("),
        (user([WHITE], 1), "user u has no list y"),
        (user([WHITE], [[1]]), r"user u: x is float64 of shape \(1, 784\), y of shape \(1, 1\); valid: 784"),
        (user([["a"] * 784], [1]), "user u: x is <U1"),
        (user([WHITE], [62]), "user u: sample 0 has the label 62; valid: whole numbers from 0 to 61"),
        (user([WHITE], ["a"]), "user u: labels are <U1"),
        (user([WHITE], [None]), "user u: labels are object"),
        (user([[None] * 784], [1]), "user u: x is object"),
        (user([[0.5] * 784], [1]), r"user u: sample 0 has a pixel 0\.5"),
        (user([[float("nan")] * 784], [1]), "user u: sample 0 has a pixel nan"),
        (user([WHITE], [1]) | {"user_data": {"u": [WHITE]}}, "user_data of u has no keys"),
        (user([WHITE], [1]) | {"user_data": {"u": {"x": [WHITE]}}}, "user u has no list y"),
    ],
)
def test_wrong_json_files_are_named(leaf: Path, content: object, message: str) -> None:
    (leaf / "femnist/train/extra.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as error:
        load(leaf)
    assert "femnist/train/extra.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["empty", "half", "binary"])
def test_files_that_are_no_json(leaf: Path, damage: str) -> None:
    file = leaf / "femnist/train/all_data_0_niid.json"
    content = file.read_bytes()
    file.write_bytes({"empty": b"", "half": content[: len(content) // 2], "binary": b"\x89HDF\xff"}[damage])
    with pytest.raises(InputError, match=r"all_data_0_niid\.json is no JSON, or it is truncated"):
        load(leaf)


def test_a_user_in_two_files(leaf: Path) -> None:
    write_json(leaf / "femnist/train/copy.json", {"f0000_14": draw(9, 1)})
    with pytest.raises(
        InputError, match=r"user f0000_14 is in .*copy\.json and before that in .*all_data_1_niid\.json"
    ):
        load(leaf)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("source", ["auto", "tff", "leaf"])
def test_missing_files_are_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(InputError, match=r"dataset=femnist: .* not found in") as error:
        load(tmp_path, source=source)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "hdf5"}, "source=hdf5: must be one of auto, tff, leaf"),
        ({"only_digits": "yes"}, "only_digits=yes: must be true or false"),
        ({"standardize": None}, "standardize=None: must be true or false"),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        load(tmp_path, **options)


# Fed-CIFAR100


def write_cifar(path: Path, clients: dict[str, tuple[list[int], list[int]]], dtype: type = np.uint8) -> Path:
    with h5py.File(path, "w") as file:
        for name, (fine, coarse) in clients.items():
            image = np.zeros((len(fine), 32, 32, 3), dtype)
            image[:, 0, 1, 2] = fine
            file[f"examples/{name}/image"] = image
            file[f"examples/{name}/label"] = np.array(fine)
            file[f"examples/{name}/coarse_label"] = np.array(coarse)
    return path


EVEN, ODD = list(range(0, 100, 2)), list(range(1, 100, 2))


def test_fed_cifar100(tmp_path: Path) -> None:
    """Fine label f in coarse label f // 5; 7 is in the test file alone."""
    train = {"b": ([f for f in ODD if f != 7], [f // 5 for f in ODD if f != 7]), "a": (EVEN, [f // 5 for f in EVEN])}
    arrays = femnist.decode_fed_cifar100(
        write_cifar(tmp_path / "train.h5", train), write_cifar(tmp_path / "test.h5", {"t": ([7, 7], [1, 1])})
    )
    assert arrays["train_x"].shape == (99, 3, 32, 32)
    assert arrays["train_y"].tolist() == EVEN + [f for f in ODD if f != 7]
    assert np.array_equal(arrays["train_x"][:, 2, 0, 1], arrays["train_y"]), "blue, row 0, column 1"
    assert arrays["train_client"].tolist() == [0] * 50 + [1] * 49
    assert arrays["test_client"].tolist() == [2, 2]
    assert arrays["client_names"].tolist() == ["a", "b", "t"]
    assert arrays["coarse"].tolist() == [f // 5 for f in range(100)]
    assert len(arrays["class_names"]) == 100


@pytest.mark.parametrize(
    ("fine", "coarse", "dtype", "message"),
    [
        ([7, 8], [1, 2], np.uint8, r"test\.h5: client t: label 8 is in coarse label 2 here and in 1 before"),
        ([7, 7], [1, 2], np.uint8, r"test\.h5: client t: label 7 is in coarse label 2 here and in 1 before"),
        ([100], [1], np.uint8, "client t: sample 0 has the label 100; valid: whole numbers from 0 to 99"),
        ([7], [20], np.uint8, "client t: sample 0 has the label 20; valid: whole numbers from 0 to 19"),
        ([7], [1], np.float32, "client t: images are float32; valid: uint8"),
        ([8], [1], np.uint8, "label 7 is in neither"),
    ],
)
def test_wrong_fed_cifar100(tmp_path: Path, fine: list[int], coarse: list[int], dtype: type, message: str) -> None:
    known = [f for f in range(100) if f != 7]
    train = write_cifar(tmp_path / "train.h5", {"a": (known, [f // 5 for f in known])})
    with pytest.raises(InputError, match=message):
        femnist.decode_fed_cifar100(train, write_cifar(tmp_path / "test.h5", {"t": (fine, coarse)}, dtype))


# CINIC-10


@pytest.fixture
def cinic(tmp_path: Path) -> Path:
    """Two images a class and split; the red of each says which it is."""
    for s, split in enumerate(("train", "valid", "test")):
        for c, name in enumerate(cinic10.CLASSES):
            folder = tmp_path / "CINIC-10" / split / name
            folder.mkdir(parents=True)
            for i in range(2):
                image = np.zeros((32, 32, 3), np.uint8)
                image[3, 4] = [60 * s + 2 * c + i, 1, 2]
                Image.fromarray(image).save(folder / f"cifar10-{i}.png")
    return tmp_path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two images a class were all there are."""
    monkeypatch.setattr(official, "verify", lambda *_: None)


def load_cinic(folder: Path, **options: Any) -> Dataset:
    return cinic10.cinic10(str(folder), str(folder / "cache"), **{**CINIC, **options})


@pytest.mark.usefixtures("few")
def test_cinic10_from_its_folders(cinic: Path) -> None:
    data = load_cinic(cinic)
    assert data.class_names == (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    assert data.train_y.tolist() == [c for c in range(10) for _ in range(2)]
    assert data.train_x.shape == (20, 3, 32, 32)
    assert data.train_x[:, 0, 3, 4].tolist() == list(range(20))
    assert data.train_x[:, 1, 3, 4].tolist() == [1] * 20
    assert data.test_x[:, 0, 3, 4].tolist() == list(range(120, 140))
    scaled = data.inputs(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
    mean, std = [0.47889522, 0.47227842, 0.43047404], [0.24205776, 0.23828046, 0.25874835]
    assert scaled.tolist() == pytest.approx([(1 - m) / s for m, s in zip(mean, std, strict=True)], abs=1e-5)


@pytest.mark.usefixtures("few")
def test_validation_images_may_be_trained_on(cinic: Path) -> None:
    data = load_cinic(cinic, train="train+valid")
    assert data.train_x[:, 0, 3, 4].tolist() == [*range(20), *range(60, 80)]
    assert data.train_y.tolist() == 2 * [c for c in range(10) for _ in range(2)]
    assert len(data.test_y) == 20


@pytest.mark.usefixtures("few")
def test_grayscale_becomes_rgb(cinic: Path) -> None:
    Image.new("L", (32, 32), 77).save(cinic / "CINIC-10/train/bird/cifar10-1.png")
    assert load_cinic(cinic).train_x[5].unique().tolist() == [77]


@pytest.mark.usefixtures("few")
def test_an_image_moved_is_seen(cinic: Path) -> None:
    """The same files in the same order, but one folder further."""
    assert load_cinic(cinic).train_y[2] == 1
    (cinic / "CINIC-10/train/automobile/cifar10-0.png").rename(cinic / "CINIC-10/train/airplane/cifar10-2.png")
    assert load_cinic(cinic).train_y[2] == 0


def test_an_incomplete_copy_is_refused(cinic: Path) -> None:
    with pytest.raises(InputError, match=r"dataset=cinic10: .*CINIC-10 has 20 files train/\*/\*\.png, expected 90000"):
        load_cinic(cinic)


def lose(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: lose(root / "train/cat"), "CINIC-10/train lacks cat; valid: airplane, automobile"),
        (lambda root: lose(root / "valid/cat"), "CINIC-10/valid lacks cat"),
        (lambda root: (root / "test/dog").rename(root / "test/wolf"), "CINIC-10/test lacks dog"),
        (
            lambda root: ((root / "test/eel").mkdir(), Image.new("RGB", (32, 32)).save(root / "test/eel/0.png")),
            "CINIC-10/test should not have eel",
        ),
        (
            lambda root: Image.new("RGB", (32, 31)).save(root / "train/cat/cifar10-0.png"),
            r"train/cat/cifar10-0\.png: 31 x 32 pixels where 32 x 32 are needed",
        ),
        (
            lambda root: (root / "test/cat/cifar10-0.png").write_bytes(b"\x89PNG\r\n\x1a\n"),
            r"test/cat/cifar10-0\.png: no readable image",
        ),
    ],
)
def test_wrong_cinic10(cinic: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(cinic / "CINIC-10")
    with pytest.raises(InputError, match=message) as error:
        load_cinic(cinic)
    assert str(error.value).startswith("dataset=cinic10: ")


@pytest.mark.usefixtures("offline")
def test_a_missing_split_is_named(cinic: Path) -> None:
    for folder in list((cinic / "CINIC-10/valid").iterdir()):
        lose(folder)
    with pytest.raises(InputError, match=r"dataset=cinic10: valid/\*/\*\.png not found in"):
        load_cinic(cinic)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "valid"}, r"train=valid: must be one of train, train\+valid"),
        ({"standardize": "no"}, "standardize=no: must be true or false"),
        ({"augment": 1}, "augment=1: must be true or false"),
    ],
)
def test_cinic10_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        load_cinic(tmp_path, **options)
