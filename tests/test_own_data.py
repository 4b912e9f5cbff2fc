"""Users' own data, from files made here: what is read is what was written, and what is wrong is named."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import experiment
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from fedsim.check import BadValue, InputError
from fedsim.data import Dataset
from fedsim.dataset import own, parquet, pictures

COMMON: dict[str, Any] = {"test_fraction": 0.2, "standardize": False, "seed": 0}
PARQUET: dict[str, Any] = {"label": "label", "client_id": "client_id", "split": None, "shape": None}


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def arrays(**changed: Any) -> dict[str, Any]:
    """Four training and two test samples of two features."""
    x = np.array([[0, 1], [2, 3], [4, 5], [6, 7]], np.float32)
    whole = {"train_x": x, "train_y": np.array([0, 1, 2, 0]), "test_x": x[:2] + 0.5, "test_y": np.array([2, 1])}
    return {name: array for name, array in {**whole, **changed}.items() if array is not None}


@pytest.fixture
def npz(tmp_path: Path) -> Callable[..., Dataset]:
    """Write the arrays to a file and load it."""

    def load(named: dict[str, Any], **options: Any) -> Dataset:
        np.savez(tmp_path / "own.npz", **named)
        return own.npz(str(tmp_path / "own.npz"), str(tmp_path / "cache"), **{**COMMON, **options})

    return load


# .npz


def test_npz_is_read_as_it_was_written(npz: Callable[..., Dataset]) -> None:
    data = npz(arrays(train_client_id=np.array([7, 7, 30, 4]), test_client_id=np.array([9, 30])))
    assert data.train_x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert data.test_x.tolist() == [[0.5, 1.5], [2.5, 3.5]]
    assert data.train_y.tolist() == [0, 1, 2, 0]
    assert data.test_y.tolist() == [2, 1]
    assert data.train_y.dtype == torch.int64
    assert data.num_classes == 3
    assert data.class_names == ("0", "1", "2")
    assert data.client_names == ("4", "7", "9", "30"), "numbers in the order of numbers; a client may be in test alone"
    assert data.train_client is not None
    assert data.train_client.tolist() == [1, 1, 3, 0]
    assert data.test_client is not None
    assert data.test_client.tolist() == [2, 3]
    assert torch.equal(data.inputs(data.train_x), data.train_x), "numbers stay as they are"


def test_clients_by_numbers_of_any_kind(npz: Callable[..., Dataset]) -> None:
    data = npz(arrays(train_client_id=np.array([2, 1, 2, 1], np.uint16), test_client_id=np.array([2.0, 10.0])))
    assert data.client_names == ("1", "2", "10")
    assert data.test_client is not None
    assert data.test_client.tolist() == [1, 2]
    huge = npz(arrays(train_client_id=np.array([2**63, 2**63 + 1, 5, 5], np.uint64)))
    assert huge.client_names == ("5", "9223372036854775808", "9223372036854775809"), "none is taken for another"


def test_keras_spelling_is_the_same_data(npz: Callable[..., Dataset]) -> None:
    keras = {f"{name[-1]}_{name[:-2]}": a for name, a in arrays().items()}
    assert set(keras) == {"x_train", "y_train", "x_test", "y_test"}
    assert npz(keras).fingerprint == npz(arrays()).fingerprint


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 8, 6), (1, 8, 6)),
        ((5, 8, 6, 3), (3, 8, 6)),
        ((5, 8, 6, 1), (1, 8, 6)),
        ((5, 8, 6, 4), (4, 8, 6)),
        ((5, 3, 8, 6), (3, 8, 6)),
        ((5, 1, 8, 6), (1, 8, 6)),
        ((5, 3, 8, 3), (3, 8, 3)),
        ((5, 8, 6, 2), (8, 6, 2)),
        ((5, 8), (8,)),
        ((5, 2, 2, 2, 2), (2, 2, 2, 2)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_channels_come_first(
    npz: Callable[..., Dataset], shape: tuple[int, ...], expected: tuple[int, ...], dtype: type
) -> None:
    x = random(0).integers(0, 256, shape).astype(dtype)
    data = npz(arrays(train_x=x[:3], train_y=np.arange(3), test_x=x[3:]))
    assert data.input_shape == expected
    assert data.train_x.dtype == (torch.uint8 if dtype is np.uint8 else torch.float32)
    turned = len(shape) == 4 and shape[1] == 8 and shape[3] != 2
    for n, c, h, w in [(0, 0, 0, 0), (2, expected[0] - 1, 7, 5)] if turned else []:
        assert data.train_x[n, c, h, w] == x[n, h, w, c]


@pytest.mark.parametrize("dtype", ["i1", "u2", ">i4", "f2", ">f8", "?"])
def test_numbers_of_any_kind_become_float32(npz: Callable[..., Dataset], dtype: str) -> None:
    x = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    data = npz({"x": x, "y": np.array([0.0, 1.0, 3.0])}, test_fraction=0.34)
    assert data.train_x.dtype == torch.float32
    assert sorted(torch.cat([data.train_x, data.test_x]).tolist()) == [[0, 1], [1, 0], [1, 1]]
    assert data.num_classes == 4, "the largest label and all below it"


def test_bytes_go_to_the_unit_interval(npz: Callable[..., Dataset]) -> None:
    x = np.array([[[0, 255]], [[51, 102]], [[153, 204]]], np.uint8)
    data = npz(arrays(train_x=x, train_y=np.arange(3), test_x=x[:2]))
    assert data.inputs(data.train_x).flatten().tolist() == pytest.approx([0, 1, 0.2, 0.4, 0.6, 0.8])


def test_bytes_standardised_by_channel(npz: Callable[..., Dataset]) -> None:
    """Channel 0 is 0, 255, 0, 255: mean 1/2, deviation 1/2. Channel 1 is 51 throughout: its deviation counts as 1."""
    x = np.full((2, 1, 2, 3), 51, np.uint8)
    x[..., 0] = [[[0, 255]], [[0, 255]]]
    x[..., 2] = [[[0, 51]], [[102, 153]]]  # 0, 0.2, 0.4, 0.6: mean 0.3, deviation sqrt(0.05)
    x = np.moveaxis(x, 3, 1)  # [2, 3, 1, 2]
    test = np.full((2, 3, 1, 2), 255, np.uint8)  # has no part in the statistics
    data = npz(arrays(train_x=x, train_y=[0, 1], test_x=test), standardize=True)
    seen = data.inputs(data.train_x)
    assert seen[:, 0].flatten().tolist() == pytest.approx([-1, 1, -1, 1], abs=1e-6)
    assert seen[:, 1].flatten().tolist() == pytest.approx([0] * 4, abs=1e-6)
    assert seen[:, 2].flatten().tolist() == pytest.approx(np.array([-3, -1, 1, 3]) / np.sqrt(5), abs=1e-6)
    assert data.inputs(data.test_x)[:, 1].flatten().tolist() == pytest.approx([0.8] * 4, abs=1e-6)


def test_numbers_standardised_by_feature(npz: Callable[..., Dataset]) -> None:
    x = np.array([[1.0, 0.1], [3.0, 0.1]])  # the deviation of 0.1, 0.1 as computed need not be 0
    data = npz(arrays(train_x=x, train_y=[0, 1], test_x=[[5.0, 1.1], [2.0, 0.1]]), standardize=True)
    assert torch.allclose(data.inputs(data.train_x), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), atol=1e-6)
    assert torch.allclose(data.inputs(data.test_x), torch.tensor([[3.0, 1.0], [0.0, 0.0]]), atol=1e-6)


@settings(deadline=None)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5),
        elements=st.floats(-1e3, 1e3, width=32).filter(lambda v: v == 0 or abs(v) > 1e-3),
    )
)
def test_statistics_are_numpys(x: np.ndarray) -> None:
    mean, std = own.statistics(x)
    axes = (0, 2, 3) if x.ndim == 4 else (0,)
    double = x.astype(np.float64)
    np.testing.assert_allclose(mean, double.mean(axes), rtol=1e-6, atol=1e-9)
    constant = x.min(axes) == x.max(axes)
    np.testing.assert_allclose(std, np.where(constant, 1, double.std(axes)), rtol=1e-5)


def test_statistics_over_many_blocks() -> None:
    x = random(3).integers(0, 256, (5000, 3, 2, 2), dtype=np.uint8)
    mean, std = own.statistics(x)
    np.testing.assert_allclose(mean, (x / 255).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(std, (x / 255).std((0, 2, 3)), rtol=1e-6)


def test_text_labels_are_sorted_classes(npz: Callable[..., Dataset]) -> None:
    for kind in (np.str_, np.bytes_):
        data = npz(arrays(train_y=np.array(["dog", "ape", "dog", "cat"], kind), test_y=np.array(["eel", "ape"], kind)))
        assert data.class_names == ("ape", "cat", "dog", "eel")
        assert data.train_y.tolist() == [2, 0, 2, 1]
        assert data.test_y.tolist() == [3, 0]


def test_labels_in_a_column_are_labels(npz: Callable[..., Dataset]) -> None:
    assert npz(arrays(train_y=np.array([[0], [1], [2], [0]]))).train_y.tolist() == [0, 1, 2, 0]


def test_names_of_classes_their_groups_and_clients_may_be_given(npz: Callable[..., Dataset]) -> None:
    data = npz(
        arrays(
            class_names=["a", "b", "c", "unseen"],
            coarse=[0, 0, 1, 1],
            client_names=["Eve", "Bob"],
            train_client=[0, 1, 1, 0],
            test_client=[1, 1],
        )
    )
    assert data.num_classes == 4
    assert data.coarse is not None
    assert data.coarse.tolist() == [0, 0, 1, 1]
    assert data.client_names == ("Bob", "Eve")
    assert data.train_client is not None
    assert data.train_client.tolist() == [1, 0, 0, 1]


def test_sequences_are_tokens(npz: Callable[..., Dataset]) -> None:
    x = np.array([[3, 4, 0], [9, 1, 2]])
    data = npz(arrays(train_x=x, train_y=np.roll(x, -1, 1), test_x=x[:1], test_y=x[:1]))
    assert data.tokens
    assert data.sequence
    assert data.train_x.dtype == torch.uint8
    assert data.num_classes == 10
    assert data.inputs(data.train_x).tolist() == x.tolist()


def test_part_of_the_data_becomes_the_test_set(npz: Callable[..., Dataset]) -> None:
    whole = {"x": np.arange(100.0)[:, None], "y": np.arange(100) % 3}
    data = npz(whole, test_fraction=0.3)
    train, test = data.train_x.flatten().tolist(), data.test_x.flatten().tolist()
    assert (len(train), len(test)) == (70, 30)
    assert sorted(train + test) == list(range(100))
    assert train == sorted(train), "in the file's order"
    assert test != list(range(30)), "drawn, not cut off"
    assert data.test_y.tolist() == [int(v) % 3 for v in test]
    assert npz(whole, test_fraction=0.3).fingerprint == data.fingerprint
    assert npz(whole, test_fraction=0.3, seed=1).fingerprint != data.fingerprint


def test_the_test_set_is_part_of_every_client(npz: Callable[..., Dataset]) -> None:
    owner = np.array(["a"] * 10 + ["b"] * 5 + ["c"])
    data = npz({"x": np.arange(16.0)[:, None], "y": np.zeros(16, int), "client_id": owner[::-1]}, test_fraction=0.2)
    assert data.train_client is not None
    assert data.test_client is not None
    assert np.bincount(data.train_client).tolist() == [8, 4, 1]
    assert np.bincount(data.test_client, minlength=3).tolist() == [2, 1, 0]
    named = [data.client_names[c] for c in data.test_client]
    assert named == [str(owner[::-1][int(v)]) for v in data.test_x.flatten()]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60), st.floats(0.01, 0.99), st.integers(0, 2**31), st.booleans()
)
def test_holdout_takes_its_share_of_each(owner: list[int], fraction: float, seed: int, known: bool) -> None:
    whole = own.Part(np.zeros((len(owner), 1)), np.zeros(len(owner)), np.array(owner) if known else None)
    groups = [owner.count(k) for k in set(owner)] if known else [len(owner)]
    expected = [min(round(fraction * n), n - 1) for n in groups]
    if not sum(expected):
        with pytest.raises(BadValue, match="leaves no test sample"):
            own.holdout(whole, fraction, seed)
        return
    chosen = own.holdout(whole, fraction, seed)
    found = [int(chosen[np.array(owner) == k].sum()) for k in set(owner)] if known else [int(chosen.sum())]
    assert found == expected


def test_a_decoded_copy_is_used_until_the_file_changes(
    npz: Callable[..., Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = npz(arrays(), standardize=True)
    again = [str(tmp_path / "own.npz"), str(tmp_path / "cache")]
    with monkeypatch.context() as patch:
        patch.setattr(own, "read_npz", lambda *_: pytest.fail("decoded twice"))
        copy = own.npz(*again, **{**COMMON, "standardize": True})
    assert copy.fingerprint == first.fingerprint
    assert torch.equal(copy.scale, first.scale)
    assert torch.equal(copy.shift, first.shift)
    changed = npz(arrays(train_y=np.array([1, 1, 1, 1])))
    assert changed.train_y.tolist() == [1, 1, 1, 1]


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_y": [0, -1, 2, 0]}, r"train_y row 1 holds -1; valid: whole numbers from 0"),
        ({"train_y": [0, 1, 1.5, 0]}, r"train_y row 2 holds 1\.5"),
        ({"test_y": [0, NAN]}, r"test_y row 1 holds nan"),
        ({"test_y": [0, INF]}, r"test_y row 1 holds inf"),
        ({"test_y": [0, 70_000]}, r"test_y row 1 holds 70000"),
        ({"train_y": ["a", "b", "c", "d"]}, "labels must be all text or all numbers"),
        ({"train_y": [0, 1, 2]}, r"train_y has shape \(3,\); valid: \(4,\)"),
        ({"train_y": np.eye(4)}, r"train_y has shape \(4, 4\); valid: \(4,\), a label for each sample"),
        ({"train_y": np.zeros(4, complex)}, "train_y holds complex128; valid: numbers or text"),
        ({"train_y": np.array([b"\xff"] * 4)}, "train_y holds text that is not UTF-8"),
        ({"train_x": [[0, 1], [NAN, 3], [4, INF], [NAN, 7]]}, "train_x holds 3 NaN or infinite .* first in row 1"),
        ({"test_x": [[0, 1e300], [0, 0]]}, r"test_x holds 1 NaN or infinite values, the first in row 0"),
        ({"test_x": np.zeros((2, 3))}, r"train samples are float32 \(2,\) but test samples are float32 \(3,\)"),
        ({"test_x": np.zeros((2, 2), np.uint8)}, "but test samples are uint8"),
        ({"train_x": np.zeros((0, 2)), "train_y": []}, r"train_x has shape \(0, 2\)"),
        ({"test_x": np.zeros((2, 0))}, r"test_x has shape \(2, 0\)"),
        ({"train_x": np.zeros(4)}, r"train_x has shape \(4,\)"),
        ({"train_x": np.array([["a", "b"]] * 4)}, "train_x holds <U1; valid: numbers"),
        ({"train_y": None}, "holds train_x, test_x, test_y; valid: x and y, or train_x, train_y"),
        ({"test_y": None}, "valid: x and y, or train_x"),
        ({"train_x": None}, "valid: x and y, or train_x"),
        ({"client_ids": [0] * 4}, "client_ids; valid: .* train_client_id"),
        ({"client_id": [0] * 4}, "client_id; valid: .* train_client_id"),
        ({"x_train": np.zeros((4, 2))}, "valid: x and y"),
        ({"train_client_id": [0, 1]}, r"train_client_id has shape \(2,\); valid: \(4,\)"),
        ({"train_client_id": [0, NAN, 1, 1]}, "train_client_id row 1 holds nan"),
        ({"test_client_id": [0, 1]}, "test samples have clients but training samples have none"),
        ({"train_client_id": [1] * 4, "test_client_id": ["1", "2"]}, "clients are int64 in train but <U1 in test"),
        ({"train_client": [0, 0, 1, 2], "client_names": ["a", "b"]}, "train_client must be places in client_names: 0"),
        ({"train_client": [0, 0, 1, 0], "client_names": ["a", "a"]}, "client_names must be different names"),
        ({"class_names": ["a", "b"]}, "class_names must be text, at least 3 since there is a label 2"),
        ({"class_names": [0, 1, 2]}, "class_names must be text"),
        ({"coarse": [0, 1]}, "coarse must be 3 numbers"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_named(npz: Callable[..., Dataset], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        npz(arrays(**changed))
    assert str(error.value).startswith("dataset=npz: ")
    assert "own.npz" in str(error.value)
    assert "\n" not in str(error.value)


def test_tokens_beyond_a_byte_are_refused(npz: Callable[..., Dataset]) -> None:
    x = np.array([[1, 2, 3], [4, 256, 6]])
    with pytest.raises(InputError, match="train_x row 1 holds the token 256; valid: 0"):
        npz(arrays(train_x=x, train_y=x, test_x=x[:1], test_y=x[:1]))
    with pytest.raises(BadValue, match="standardize=True: must be false: tokens"):
        npz(arrays(train_x=x[:1], train_y=x[:1], test_x=x[:1], test_y=x[:1]), standardize=True)


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "pickled", "flipped", "array"])
def test_files_that_are_no_npz(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "own.npz"
    np.savez_compressed(file, **arrays())
    content = file.read_bytes()
    if damage == "pickled":
        np.savez(file, **arrays(train_y=np.array([0, None, 2, 3], object)))
    elif damage == "array":
        with file.open("wb") as stream:
            np.save(stream, np.zeros(3))
    else:
        flipped = content[:60] + bytes(b ^ 255 for b in content[60:80]) + content[80:]
        file.write_bytes({"empty": b"", "text": b"x,y\n1,2\n", "truncated": content[:-200], "flipped": flipped}[damage])
    with pytest.raises(InputError, match=r"own\.npz is (no readable \.npz of plain arrays|a single array)"):
        own.npz(str(file), str(tmp_path / "cache"), **COMMON)
    assert not [f for f in (tmp_path / "cache").glob("npz-*")], "nothing is kept of it"


@pytest.mark.parametrize(
    ("loader", "options"),
    [(own.npz, {}), (pictures.folder, {"size": None, "augment": False}), (parquet.parquet, PARQUET)],
)
def test_a_path_that_is_not_there(tmp_path: Path, loader: Callable[..., Dataset], options: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match=r"path=.*nowhere: there is no such file or folder") as error:
        loader(str(tmp_path / "nowhere"), str(tmp_path), **COMMON, **options)
    assert error.value.key == "path"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "mine.npz", **arrays())
    assert own.npz("~/mine.npz", "~/cache", **COMMON).num_classes == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_fraction": 0}, "test_fraction=0: must be a number > 0 and < 1"),
        ({"test_fraction": 1.0}, "test_fraction=1.0: must be"),
        ({"standardize": 1}, "standardize=1: must be true or false"),
        ({"seed": -1}, "seed=-1: must be"),
        ({"test_fraction": 0.01}, "test_fraction=0.01: leaves no test sample of 4 samples"),
    ],
)
def test_options_out_of_range(npz: Callable[..., Dataset], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        npz({"x": np.zeros((4, 2)), "y": np.zeros(4, int)}, **options)


# Folders of images.


def image(file: Path, pixels: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


def gray(value: int, height: int = 3, width: int = 2) -> np.ndarray:
    return np.full((height, width), value, np.uint8)


def load_folder(path: Path, **options: Any) -> Dataset:
    return pictures.folder(
        str(path / "own"), str(path / "cache"), **{**COMMON, "size": None, "augment": False, **options}
    )


def test_folders_are_classes(tmp_path: Path) -> None:
    for i, name in enumerate(["train/b/1.png", "train/a/2.BMP", "train/b/0.png", "test/c/0.png", "val/z/0.png"]):
        image(tmp_path / "own" / name, gray(i))
    (tmp_path / "own/train/a/.hidden").write_text("not an image")
    (tmp_path / "own/train/a/Thumbs.db").write_text("nor this")
    (tmp_path / "own/train/labels.txt").write_text("nor this")
    data = load_folder(tmp_path)
    assert data.class_names == ("a", "b", "c")
    assert data.train_x[:, 0, 0, 0].tolist() == [1, 2, 0], "a/2, b/0, b/1"
    assert data.input_shape == (1, 3, 2)
    assert data.train_y.tolist() == [0, 1, 1]
    assert data.test_x[:, 0, 0, 0].tolist() == [3]
    assert data.test_y.tolist() == [2]
    assert data.client_names == ()


@pytest.mark.parametrize("clients_in_test", [True, False])
def test_one_level_more_is_clients(tmp_path: Path, clients_in_test: bool) -> None:
    for name in ["train/eve/b/0.png", "train/bob/a/0.png", "train/bob/b/0.png"]:
        image(tmp_path / "own" / name, gray(1))
    (tmp_path / "own/train/eve/a").mkdir()
    image(tmp_path / "own/test" / ("ann/b/0.png" if clients_in_test else "b/0.png"), gray(2))
    data = load_folder(tmp_path)
    assert data.class_names == ("a", "b")
    assert data.client_names == (("ann", "bob", "eve") if clients_in_test else ("bob", "eve"))
    assert data.train_client is not None
    assert [data.client_names[c] for c in data.train_client] == ["bob", "bob", "eve"]
    assert data.train_y.tolist() == [0, 1, 1]
    assert (data.test_client is not None) == clients_in_test


def test_classes_alone_give_a_fraction_and_may_be_called_train(tmp_path: Path) -> None:
    for label in ("train", "plane"):
        for i in range(5):
            image(tmp_path / "own" / label / f"{i}.png", gray(10 * (label == "train") + i))
    data = load_folder(tmp_path)
    assert data.class_names == ("plane", "train")
    assert (len(data.train_y), len(data.test_y)) == (8, 2)
    both = [*zip(data.train_x[:, 0, 0, 0].tolist(), data.train_y.tolist(), strict=True)]
    both += zip(data.test_x[:, 0, 0, 0].tolist(), data.test_y.tolist(), strict=True)
    assert sorted(both) == [(v, v // 10) for v in (*range(5), *range(10, 15))]


def test_clients_alone_give_a_fraction_of_each(tmp_path: Path) -> None:
    for client in ("ann", "bob"):
        for i in range(4):
            image(tmp_path / "own" / client / "ab"[i % 2] / f"{i}.png", gray(i))
    data = load_folder(tmp_path, test_fraction=0.25)
    assert data.test_client is not None
    assert data.test_client.tolist() == [0, 1]


def test_colour_wherever_one_image_has_it(tmp_path: Path) -> None:
    colour = random(0).integers(0, 256, (3, 2, 3), dtype=np.uint8)
    image(tmp_path / "own/train/a/0.png", gray(7))
    image(tmp_path / "own/test/a/0.png", colour)
    data = load_folder(tmp_path)
    assert data.train_x.tolist() == np.full((1, 3, 3, 2), 7).tolist()
    assert np.array_equal(data.test_x[0].numpy(), colour.transpose(2, 0, 1))


def test_kinds_of_pixels(tmp_path: Path) -> None:
    """A palette, with transparency in many of its colours, gives the colours; one bit gives black and white."""
    colours = Image.new("P", (2, 1))
    colours.putpalette([10, 20, 30, 40, 50, 60])
    colours.putdata([0, 1])
    (tmp_path / "own/train/a").mkdir(parents=True)
    colours.save(tmp_path / "own/train/a/0.png", transparency=bytes([0, 128]))
    Image.new("1", (2, 1), 1).save(tmp_path / "own/train/a/1.png")
    Image.new("RGBA", (2, 1), (1, 2, 3, 4)).save(tmp_path / "own/train/a/2.png")
    data = load_folder(tmp_path, test_fraction=0.4)
    seen = {tuple(x.flatten().tolist()) for x in torch.cat([data.train_x, data.test_x])}
    assert seen == {(10, 40, 20, 50, 30, 60), (255,) * 6, (1, 1, 2, 2, 3, 3)}


def test_images_are_resized_where_asked(tmp_path: Path) -> None:
    """Bilinear: two pixels of 0 and 200 are the mean of each pair."""
    image(tmp_path / "own/train/a/0.png", np.array([[0, 0, 200, 200]] * 2, np.uint8))
    image(tmp_path / "own/train/a/1.png", gray(9, 8, 8))
    image(tmp_path / "own/test/a/0.png", gray(5, 1, 1))
    data = load_folder(tmp_path, size=[1, 2])
    assert data.input_shape == (1, 1, 2)
    expected = np.asarray(Image.open(tmp_path / "own/train/a/0.png").resize((2, 1), Image.Resampling.BILINEAR))
    assert data.train_x[0, 0].tolist() == expected.tolist()
    assert data.train_x[0, 0, 0, 0] < 50
    assert data.train_x[0, 0, 0, 1] > 150
    assert data.train_x[1].flatten().tolist() == [9, 9]
    assert data.test_x.flatten().tolist() == [5, 5]
    assert load_folder(tmp_path, size=[2, 1]).input_shape == (1, 2, 1)


def test_an_image_moved_to_another_class_is_seen(tmp_path: Path) -> None:
    """The content of all files, in their order, stays the same."""
    for name in ("train/a/0.png", "train/b/1.png", "train/b/2.png", "test/a/0.png"):
        image(tmp_path / "own" / name, gray(0))
    assert load_folder(tmp_path).train_y.tolist() == [0, 1, 1]
    (tmp_path / "own/train/b/1.png").rename(tmp_path / "own/train/a/1.png")
    assert load_folder(tmp_path).train_y.tolist() == [0, 0, 1]


def test_more_images_than_one_thread_takes(tmp_path: Path) -> None:
    count = 600
    for i in range(count):
        image(tmp_path / "own/train/a" / f"{i:04d}.png", np.full((1, 1), i % 251, np.uint8))
    image(tmp_path / "own/test/a/0.png", gray(0, 1, 1))
    assert load_folder(tmp_path).train_x.flatten().tolist() == [i % 251 for i in range(count)]
    (tmp_path / "own/train/a/0431.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"0431\.png: no readable image"):
        load_folder(tmp_path)


def broken_folder(root: Path, problem: str) -> None:
    """A good folder, then one thing wrong with it."""
    for name in ("train/a/0.png", "train/b/0.png", "test/a/0.png", "test/b/0.png"):
        image(root / name, random(1).integers(0, 256, (9, 9, 3), dtype=np.uint8))
    file = root / "train/b/1.png"
    match problem:
        case "size":
            image(file, gray(0, 5, 9))
        case "truncated":
            file.write_bytes((root / "train/b/0.png").read_bytes()[:-40])
        case "truncated jpeg":
            image(root / "train/b/1.jpg", random(2).integers(0, 256, (9, 9, 3), dtype=np.uint8))
            jpeg = root / "train/b/1.jpg"
            jpeg.write_bytes(jpeg.read_bytes()[:-60])
        case "empty":
            file.write_bytes(b"")
        case "16 bit":
            Image.fromarray(np.full((9, 9), 40_000, np.uint16)).save(file)
        case "text":
            (root / "train/b/notes.txt").write_text("these are dogs")
        case "no images":
            (root / "train/c").mkdir()
        case "mixed":
            image(root / "train/a/deeper/0.png", gray(0))
        case "stray":
            image(root / "train/0.png", gray(0))
        case "deep":
            for top in ("a", "b"):
                (root / f"train/{top}/0.png").unlink()
                image(root / f"train/{top}/x/y/0.png", gray(0))
        case "capital":
            (root / "train").rename(root / "Train")
        case "other":
            image(root / "Testing/a/0.png", gray(0))
        case "clients in test":
            for top in ("a", "b"):
                (root / f"test/{top}/0.png").unlink()
                image(root / f"test/{top}/x/0.png", random(1).integers(0, 256, (9, 9, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("size", r"train/b/1\.png: 5 x 9 pixels where 9 x 9 are needed; size=\[HEIGHT,WIDTH\] makes them alike"),
        ("truncated", r"train/b/1\.png: no readable image \(OSError"),
        ("truncated jpeg", r"train/b/1\.jpg: no readable image \(OSError"),
        ("empty", r"train/b/1\.png: no readable image"),
        ("16 bit", r"train/b/1\.png: pixels of kind I;16; valid: 8 bits"),
        ("text", r"train/b/notes\.txt is no image; valid: \.png"),
        ("no images", "train/c holds no images; valid: .png"),
        ("mixed", "train/b holds no folders but .*train/a does; valid: CLASS/IMAGE, or CLIENT/CLASS/IMAGE"),
        ("stray", "own/train holds images beside folders"),
        ("deep", "train/a/x/y is no image"),
        ("capital", "own/Train without train; valid: train, test"),
        ("other", "own/Testing beside train; valid: train, test"),
        ("clients in test", "test samples have clients but training samples have none"),
    ],
)
def test_wrong_folders_are_named(tmp_path: Path, problem: str, message: str) -> None:
    broken_folder(tmp_path / "own", problem)
    with pytest.raises(InputError, match=message) as error:
        load_folder(tmp_path)
    assert str(error.value).startswith("dataset=folder: ")
    assert "\n" not in str(error.value)


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with pytest.raises(InputError, match="own holds no folders; valid: CLASS/IMAGE"):
        load_folder(tmp_path)


@pytest.mark.parametrize("size", [32, [32], [0, 5], [1.5, 2], [True, 2], []])
def test_sizes_that_are_none(tmp_path: Path, size: object) -> None:
    with pytest.raises(BadValue, match=r"size=.*must be \[HEIGHT,WIDTH\]"):
        load_folder(tmp_path, size=size)


# Parquet.


def load_parquet(path: Path, **options: Any) -> Dataset:
    return parquet.parquet(str(path), str(path.parent / "cache"), **{**COMMON, **PARQUET, **options})


def write(file: Path, columns: dict[str, Any], **options: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, **options)
    return file


def whole(data: Dataset) -> list[tuple[Any, ...]]:
    """All samples with their labels, as a sorted list."""
    parts = [(data.train_x, data.train_y), (data.test_x, data.test_y)]
    return sorted((x.tolist(), int(y)) for xs, ys in parts for x, y in zip(xs, ys, strict=True))


def test_numbers_in_the_order_of_their_columns(tmp_path: Path) -> None:
    columns = {
        "z": [1, 2, 3, 4, 5],
        "label": ["b", "a", "b", "c", "a"],
        "a.b": [0.5, 1.5, 2.5, 3.5, 4.5],
        "flag": [True, False, True, False, True],
        "comment": ["not", "a", "feature", "at", "all"],
        "__index_level_0__": [9, 9, 9, 9, 9],
    }
    data = load_parquet(write(tmp_path / "t.parquet", columns))
    assert data.class_names == ("a", "b", "c")
    assert whole(data) == [([1, 0.5, 1], 1), ([2, 1.5, 0], 0), ([3, 2.5, 1], 1), ([4, 3.5, 0], 2), ([5, 4.5, 1], 0)]
    assert (len(data.train_y), len(data.test_y)) == (4, 1)
    chosen = load_parquet(tmp_path / "t.parquet", features=["a.b", "z"])
    assert whole(chosen)[0] == ([0.5, 1], 1)


def test_columns_that_say_split_and_client(tmp_path: Path) -> None:
    columns = {
        "value": [1.0, 2.0, 3.0, 4.0],
        "target": [3, 0, 1, 1],
        "part": ["train", "test", "train", "train"],
        "who": pa.array(["bob", "bob", "ann", "bob"]).dictionary_encode(),
    }
    file = write(tmp_path / "t.parquet", columns)
    data = load_parquet(file, label="target", split="part", client_id="who")
    assert data.train_x.flatten().tolist() == [1, 3, 4]
    assert data.test_x.flatten().tolist() == [2]
    assert data.train_y.tolist() == [3, 1, 1]
    assert data.num_classes == 4
    assert data.client_names == ("ann", "bob")
    assert data.train_client is not None
    assert data.train_client.tolist() == [1, 0, 1]


def test_client_id_is_a_client_or_nothing_but_no_feature(tmp_path: Path) -> None:
    columns = {"value": [1.0, 2.0, 3.0, 4.0], "label": [0, 1, 0, 1], "client_id": [5, 5, 20, 20]}
    file = write(tmp_path / "t.parquet", columns)
    assert load_parquet(file, test_fraction=0.5).client_names == ("5", "20")
    none = load_parquet(file, client_id=None)
    assert none.client_names == ()
    assert none.input_shape == (1,)


def test_a_folder_of_train_and_test_files(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    for name, start in (("train-00000-of-00002", 0), ("train-00001-of-00002", 3), ("test-00000-of-00001", 6)):
        count = np.arange(start, start + 3)
        write(folder / f"{name}.parquet", {"value": count * 1.0, "label": count % 2, "client_id": count})
    write(folder / "validation-00000-of-00001.parquet", {"value": [99.0], "label": [0], "client_id": [9]})
    data = load_parquet(folder)
    assert data.train_x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert data.test_x.flatten().tolist() == [6, 7, 8]
    assert data.train_y.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.client_names == tuple("012345678")
    (folder / "train-00001-of-00002.parquet").rename(folder / "test-00000-of-00000.parquet")
    assert load_parquet(folder).train_x.flatten().tolist() == [0, 1, 2], "the same content under another name"


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def test_rows_of_many_batches(tmp_path: Path) -> None:
    count = 10_000
    columns = {"value": np.arange(count, dtype=np.float32), "label": np.arange(count) % 7}
    data = load_parquet(write(tmp_path / "t.parquet", columns, row_group_size=3000), test_fraction=0.5)
    assert [v for (v,), _ in whole(data)] == list(range(count))
    assert all(v % 7 == y for (v,), y in whole(data))
    columns["value"] = [None if i == 7001 else float(i) for i in range(count)]
    with pytest.raises(InputError, match="column value row 7001 is missing"):
        load_parquet(write(tmp_path / "t.parquet", columns, row_group_size=3000))


@pytest.mark.parametrize("kind", ["list", "large", "fixed", "nested", "tensor"])
def test_one_column_of_lists(tmp_path: Path, kind: str) -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    column = {
        "list": pa.array(rows, pa.list_(pa.float32())),
        "large": pa.array(rows, pa.large_list(pa.int16())),
        "fixed": pa.array(rows, pa.list_(pa.float64(), 4)),
        "nested": pa.array([[r[:2], r[2:]] for r in rows], pa.list_(pa.list_(pa.int64()))),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.array(rows, np.float32).reshape(3, 2, 2)),
    }[kind]
    write(tmp_path / "t.parquet", {"embedding": column, "label": [0, 1, 2]})
    data = load_parquet(tmp_path / "t.parquet", test_fraction=0.4)
    assert data.input_shape == ((1, 2, 2) if kind == "nested" else (4,))
    assert data.train_x.dtype == torch.float32
    assert [np.ravel(x).tolist() for x, _ in whole(data)] == rows
    shaped = load_parquet(tmp_path / "t.parquet", test_fraction=0.4, shape=[2, 2, 1])
    assert shaped.input_shape == (2, 2, 1), "as it is said, whatever it looks like"


def test_bytes_stay_bytes(tmp_path: Path) -> None:
    """784 columns of pixels, or a list of them: the same data as an .npz of the same bytes."""
    pixels = random(5).integers(0, 256, (6, 4), dtype=np.uint8)
    y = np.arange(6)
    write(tmp_path / "c.parquet", {**{f"pixel{i}": pixels[:, i] for i in range(4)}, "label": y})
    write(tmp_path / "l.parquet", {"pixels": pa.array(pixels.tolist(), pa.list_(pa.uint8())), "label": y})
    np.savez(tmp_path / "n.npz", x=pixels.reshape(6, 2, 2), y=y)
    expected = own.npz(str(tmp_path / "n.npz"), str(tmp_path / "cache"), **COMMON)
    for name in ("c", "l"):
        data = load_parquet(tmp_path / f"{name}.parquet", shape=[1, 2, 2])
        assert data.train_x.dtype == torch.uint8
        assert data.fingerprint == expected.fingerprint


@pytest.mark.parametrize("struct", [True, False])
def test_one_column_of_images(tmp_path: Path, struct: bool) -> None:
    pixels = random(6).integers(0, 256, (5, 3, 2), dtype=np.uint8)
    content = [png(p) for p in pixels]
    images = [{"bytes": c, "path": "x.png"} for c in content] if struct else content
    data = load_parquet(write(tmp_path / "t.parquet", {"image": images, "label": list("abcde")}))
    assert data.train_x.dtype == torch.uint8
    assert data.input_shape == (1, 3, 2)
    assert [x for x, _ in whole(data)] == sorted([p.tolist()] for p in pixels)


def test_colour_in_a_later_batch(tmp_path: Path) -> None:
    colour = np.dstack([gray(1, 1, 1), gray(2, 1, 1), gray(3, 1, 1)])
    images = [png(gray(9, 1, 1))] * 4096 + [png(colour)]
    data = load_parquet(write(tmp_path / "t.parquet", {"image": images, "label": [0] * 4096 + [1]}))
    seen = {(tuple(np.ravel(x)), y) for x, y in whole(data)}
    assert seen == {((9, 9, 9), 0), ((1, 2, 3), 1)}


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"v": [1.0, None, 2.0], "label": [0, 1, 0]}, {}, r"column v row 1 is missing \(null\)"),
        ({"v": [1.0, 3.0, 2.0], "label": [0, 1, None]}, {}, r"column label row 2 is missing"),
        ({"v": [1.0, NAN, INF], "label": [0, 1, 0]}, {}, "features holds 2 NaN or infinite values, the first in row 1"),
        ({"v": [1.0, 3.0], "label": [0.0, -2.0]}, {}, r"column label row 1 holds -2\.0"),
        ({"v": [1.0, 3.0], "target": [0, 1]}, {}, r"label=label: must be a column of its own in .* has v, target"),
        ({"v": [1.0], "label": [0]}, {"client_id": "who"}, "client_id=who: must be a column of its own"),
        ({"v": [1.0], "label": [0]}, {"split": "part"}, "split=part: must be a column of its own"),
        ({"v": [1.0], "label": [0]}, {"split": "label"}, "label=label: must be a column of its own"),
        ({"v": [1.0], "label": [0]}, {"features": ["w"]}, r"features=\['w'\]: must be columns of numbers"),
        ({"v": [1.0], "label": [0]}, {"features": ["label"]}, r"features=\['label'\]: must be"),
        ({"v": [1.0], "label": [0]}, {"features": ["v", "v"]}, "features=.*: must be"),
        ({"v": [1.0], "label": [0]}, {"features": "v"}, "features=v: must be"),
        ({"v": [1.0], "label": [0]}, {"features": [["v"]]}, "features=.*: must be"),
        ({"v": ["a"], "label": [0]}, {}, "features=None: must be columns of numbers, .*; none is there"),
        ({"v": [[1.0]], "n": [1], "label": [0]}, {}, r"features=None: must be .*; which of v, n\?"),
        ({"v": [[1.0, 2.0], [1.0]], "label": [0, 1]}, {}, "column v row 1 has a list of 1, the first row one of 2"),
        ({"v": [[[1], [2]], [[3], [4, 5]]], "label": [0, 1]}, {}, "column v row 1 has a list of 2"),
        ({"v": pa.array([[], []], pa.list_(pa.int8())), "label": [0, 1]}, {}, "column v row 0 has a list of 0"),
        ({"v": [[1.0, None], [1.0, 2.0]], "label": [0, 1]}, {}, r"column v row 0 is missing"),
        ({"v": [1.0, 2.0], "label": [[1, 0], [0, 1]]}, {}, r"column label has shape \(2, 2\); valid: \(2,\)"),
        ({"v": [1, 2], "label": [0, 1]}, {"shape": [2]}, r"shape=\[2\]: must have as many values as a sample"),
        ({"v": [1, 2], "label": [0, 1]}, {"shape": 4}, "shape=4: must be the shape of a sample"),
        ({"v": [1, 2], "label": [0, 1], "s": ["train", "dev"]}, {"split": "s"}, "column s row 1 holds dev; valid:"),
        ({"v": [1, 2], "label": [0, 1], "s": ["train"] * 2}, {"split": "s"}, "column s has no row that says test"),
        ({"v": [1, 2], "label": [0, 1], "s": [0, 1]}, {"split": "s"}, "column s row 0 holds 0; valid: train or test"),
        ({"v": [b"GIF", b"x"], "label": [0, 1]}, {}, "column v row 0: no readable image"),
        ({"v": [png(gray(1)), None], "label": [0, 1]}, {}, "column v row 1 has no bytes of an image"),
        ({"v": [{"bytes": None}, {"bytes": b""}], "label": [0, 1]}, {}, "column v row 0 has no bytes of an image"),
        ({"v": [png(gray(1)), png(gray(1, 9, 9))], "label": [0, 1]}, {}, "column v row 1: 9 x 9 pixels where 3 x 2"),
        ({"v": pa.array([], pa.float32()), "label": pa.array([], pa.int64())}, {}, "has no rows"),
        ({"v": [1, 2], "label": [0, 1]}, {"label": ""}, "label=: must be text"),
    ],
)  # fmt: skip
def test_wrong_tables_are_named(tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_parquet(write(tmp_path / "t.parquet", columns), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "flipped"])
def test_files_that_are_no_parquet(tmp_path: Path, damage: str) -> None:
    file = write(tmp_path / "t.parquet", {"v": np.arange(500.0), "label": np.arange(500) % 3}, compression="gzip")
    content = file.read_bytes()
    flipped = content[:100] + bytes(b ^ 255 for b in content[100:140]) + content[140:]
    file.write_bytes({"empty": b"", "text": b"v,label\n", "truncated": content[:-50], "flipped": flipped}[damage])
    with pytest.raises(InputError, match=r"t\.parquet is no readable Parquet file"):
        load_parquet(file)


def test_folders_of_tables_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    write(folder / "other.parquet", {"v": [1.0], "label": [0]})
    with pytest.raises(BadValue, match=r"path=.*: must be a \.parquet file, or a folder with train"):
        load_parquet(folder)
    write(folder / "train.parquet", {"v": [1.0], "label": [0]})
    write(folder / "test.parquet", {"v": ["one"], "label": [0]})
    with pytest.raises(InputError, match=r"test\.parquet: column v is string, but double in train\.parquet"):
        load_parquet(folder)
    write(folder / "test.parquet", {"w": [1.0], "label": [0]})
    with pytest.raises(InputError, match=r"test\.parquet: column v is missing"):
        load_parquet(folder)
    with pytest.raises(BadValue, match="split=part: must be null for a folder"):
        load_parquet(folder, split="part")


# The user's own function.

MODULE = '''
import numpy as np
import torch
from torch.utils.data import TensorDataset
from fedsim.data import Dataset

x, y = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])

def named(count=6):
    return {"x": x[:count], "y": y[:count].numpy(), "client_id": list("aabbcc")[:count]}

def pair():
    return TensorDataset(x[:4], y[:4]), TensorDataset(x[4:], y[4:])

def whole():
    return TensorDataset(x, y)

def finished(labels=3, **more):
    one = torch.ones(1)
    return Dataset(x[:4], y[:4], x[4:], y[4:], labels, one, 0 * one, **more)

class Words:
    """Samples of a byte image [H, W, C] and a word."""
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return np.full((5, 6, 3), i, np.uint8), ["no", "yes"][i % 2]

class Ragged(Words):
    def __getitem__(self, i):
        return np.zeros(i + 1), 0

class Odd(Words):
    def __getitem__(self, i):
        if i == 2:
            raise KeyError("third")
        return np.zeros(2), 0

class Lonely(Words):
    def __getitem__(self, i):
        return np.zeros(3)

def empty():
    return TensorDataset(x[:0], y[:0])

def number():
    return 3

def fails():
    raise RuntimeError("the disk\\nis elsewhere")

constant = 5
'''


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """Load with a function of a module in the current folder."""
    (tmp_path / "users_own_module.py").write_text(MODULE)
    (tmp_path / "users_broken_module.py").write_text("import nowhere_to_be_found")
    (tmp_path / "users_wrong_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("users_")]:
        monkeypatch.delitem(sys.modules, name)

    def load(name: str, /, module: str = "users_own_module", options: dict[str, Any] = {}, **arguments: Any) -> Dataset:  # noqa: B006
        return own.custom(f"{module}.{name}", arguments, **{**COMMON, "test_fraction": 0.34, **options})

    return load


def test_a_function_may_return_arrays(custom: Callable[..., Dataset]) -> None:
    data = custom("named")
    assert whole(data) == [([2.0 * i, 2.0 * i + 1], i % 3) for i in range(6)]
    assert data.client_names == ("a", "b", "c")
    assert (len(data.train_y), len(data.test_y)) == (3, 3)
    assert len(custom("named", count=4).train_y) == 2
    assert data.fingerprint


def test_a_function_may_return_torch_datasets(custom: Callable[..., Dataset]) -> None:
    data = custom("pair", options={"standardize": True})
    assert data.train_x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert data.test_y.tolist() == [1, 2]
    assert torch.allclose(data.inputs(data.train_x)[:, 0], torch.tensor([-3.0, -1, 1, 3]) / 5**0.5)
    assert (len(custom("whole").train_y), len(custom("whole").test_y)) == (4, 2)


def test_a_class_is_a_function_too(custom: Callable[..., Dataset]) -> None:
    data = custom("Words")
    assert data.input_shape == (3, 5, 6)
    assert data.class_names == ("no", "yes")
    assert [(x[0][0][0], y) for x, y in whole(data)] == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_a_function_may_return_a_dataset(custom: Callable[..., Dataset]) -> None:
    data = custom("finished", train_client=np.array([0, 0, 1, 1]), client_names=("a", "b"))
    assert data.num_classes == 3
    assert data.identity()
    assert data.identity() != custom("finished").identity()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "load=users_own_module.nothing: must be a function or a class, and users_own_module has none"),
        ("constant", {}, "load=users_own_module.constant: must be a function or a class"),
        ("x", {"module": "users_absent_module"}, "there is no module users_absent_module in .*, nor installed"),
        (
            "x",
            {"module": "users_broken_module"},
            "users_broken_module needs a module that is not installed, nowhere_to",
        ),
        ("x", {"module": "users_wrong_module"}, r"users_wrong_module cannot be imported \(ZeroDivisionError: division"),
        ("fails", {}, r"users_own_module\.fails failed \(RuntimeError: the disk"),
        ("named", {"size": 3}, r"named failed \(TypeError: .*unexpected keyword argument 'size'"),
        ("number", {}, "number returned int; valid: a fedsim.data.Dataset, a dict of arrays, a map-style"),
        ("Ragged", {}, r"sample 1 has x of shape \(2,\) .*, but sample 0 has x of shape \(1,\)"),
        ("Odd", {}, r"sample 2 failed \(KeyError: 'third'\)"),
        ("Lonely", {}, r"sample 0 failed \(ValueError"),
        ("empty", {}, "the dataset is empty"),
        ("finished", {"labels": 2}, "train sample 2 has the label 2"),
        ("finished", {"options": {"standardize": True}}, "standardize=True: must be false: a Dataset brings its own"),
    ],
)
def test_what_goes_wrong_in_a_users_function(
    custom: Callable[..., Dataset], name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        custom(name, **options)


@pytest.mark.parametrize("load", ["load", "", ".load", "mydata.", 3])
def test_import_paths_that_are_none(load: Any) -> None:
    with pytest.raises(BadValue, match=r"load=.*: must be"):
        own.custom(load, {}, **COMMON)


# Through the configuration.


def test_own_data_trains(tmp_path: Path) -> None:
    """Clients by name from an .npz; complaints name the key as it is typed."""
    x = random(8).normal(size=(60, 5))
    np.savez(tmp_path / "own.npz", x=x, y=(x[:, 0] > 0).astype(int), client_id=np.arange(60) % 4)
    typed = [
        *("dataset=npz", f"dataset.path={tmp_path / 'own.npz'}", f"cache_dir={tmp_path / 'cache'}"),
        *("participation.clients_per_round=2", "aggregator=fedavg"),
    ]
    made = experiment(*typed)
    assert made.data.num_clients == 4
    assert made.data.dataset.input_shape == (5,)
    with pytest.raises(BadValue, match=r"dataset\.path=.*nowhere: there is no such file"):
        experiment(*typed, f"dataset.path={tmp_path / 'nowhere'}")


@settings(max_examples=40, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from([np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.int16)]),
        hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=4).filter(lambda s: s[0] > 1),
        elements=st.integers(0, 100),
    ),
    st.data(),
)
def test_whatever_goes_in_comes_out_once(x: np.ndarray, draw: st.DataObject) -> None:
    """Every sample is in one part, with its label and its client."""
    y = np.array(draw.draw(st.lists(st.sampled_from(["k", "l", "m"]), min_size=len(x), max_size=len(x))))
    made = own.given("here", {"x": x, "y": y, "client_id": np.array(["same"] * len(x))}, 0.5, 0)
    back = {name: np.concatenate([made[f"train_{name}"], made[f"test_{name}"]]) for name in ("x", "y")}
    found = sorted(
        (np.ravel(a).tolist(), str(made["class_names"][b])) for a, b in zip(back["x"], back["y"], strict=True)
    )
    turned = own.channels_first(x)
    assert found == sorted((np.ravel(a).tolist(), str(b)) for a, b in zip(turned, y, strict=True))
