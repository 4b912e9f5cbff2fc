"""Shakespeare from a small text of the etext's format and from LEAF's JSON; the LSTM against its equations."""

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call

from fedsim import official
from fedsim.check import BadValue, InputError
from fedsim.data import Dataset
from fedsim.dataset import shakespeare as plays
from fedsim.model.lstm import Lstm, LstmShakespeare

TEXT = """This is the 100th Etext file presented by Project Gutenberg

THE SONNETS

by William Shakespeare

  From fairest creatures. We desire increase,
    That thereby beauty's rose
    might never die

THE END



1599

MUCH; ADO

by William Shakespeare


DRAMATIS PERSONAE
  HERO, a lady

ACT I. SCENE 1

Enter HERO

  HERO. One  two
    three
SCENE II
    four.
  Hero. Five
  Beatrice. Only
    two lines
                       Exit
  BOY. Too
    short
  HERO. six!

<<THIS ELECTRONIC VERSION IS
WITH PERMISSION.  ELECTRONIC>>

1593

THE COMEDY OF ERRORS

by William Shakespeare

<<THIS ELECTRONIC VERSION IS
WITH PERMISSION.  COPIES ARE
PERSONAL

ACT I. SCENE 1
not spoken
DUKE. Plead
  no more

<<THIS ELECTRONIC
neither
DUKE. Enough

1609

A LOVER'S COMPLAINT

by William Shakespeare

  From off a hill
    A plaintful story
"""
HERO = ["One  two", "three", "four.", "Five", "six!"]
DUKE = ["Plead", "  no more", "", "Enough", "", "1609", "", "A LOVER'S COMPLAINT", ""]


def tokens(text: str) -> list[int]:
    """One by one, as one would by hand."""
    return [2 + plays.LETTERS.index(c) if c in plays.LETTERS else 1 for c in text]


def characters(row: np.ndarray | Tensor) -> str:
    """Back again; padding as ~."""
    return "".join("~?"[t] if t < 2 else plays.LETTERS[t - 2] for t in row.tolist())


# Roles


def test_roles_are_found_as_leaf_finds_them() -> None:
    """The sonnets and a role of two lines are left out; indented directions are speech; a notice is a role."""
    assert plays.roles(TEXT) == {
        "MUCH__ADO_HERO": HERO,
        "MUCH__ADO_BEATRICE": ["Only", "two lines", "                   Exit"],
        "THE_COMEDY_OF_ERRORS_WITH_PERMISSION": [" COPIES ARE", "PERSONAL", ""],
        "THE_COMEDY_OF_ERRORS_DUKE": DUKE,
    }


def test_a_roles_text_has_a_space_after_each_line_and_never_two() -> None:
    assert plays.joined(HERO) == "One two three four. Five six! "
    assert plays.joined(DUKE) == "Plead no more Enough 1609 A LOVER'S COMPLAINT "
    assert plays.joined(["", "x"]) == " x "


@pytest.mark.parametrize(
    ("lines", "fraction", "test"),
    [(3, 0.2, 1), (9, 0.2, 1), (10, 0.2, 2), (14, 0.2, 2), (100, 0.2, 20), (3, 0.99, 2), (1000, 0.001, 1)],
)
def test_the_last_lines_are_for_testing(lines: int, fraction: float, test: int) -> None:
    """At least one line, and otherwise rounded down."""
    whole = [str(i) for i in range(lines)]
    before, after = plays.split(whole, fraction)
    assert len(after) == test
    assert [*before, *after] == whole


# Characters


def test_82_tokens_padding_and_unknown_first() -> None:
    assert len(plays.LETTERS) == len(set(plays.LETTERS)) == 80
    assert plays.NAMES[:6] == ("pad", "unk", "newline", "space", "!", '"')
    assert plays.NAMES[-2:] == ("z", "}")
    assert len(plays.NAMES) == len(set(plays.NAMES)) == 82
    # Counted by hand: newline, space and 9 signs, 10 digits, ; etc. before A; [ and ] between Z and a.
    assert plays.encode("\n !}Aa").tolist() == [2, 3, 4, 81, 27, 55]
    assert plays.encode("~é\u2019\U0001f600\ud800@").tolist() == [1] * 6


@given(st.text())
def test_any_text_is_encoded_character_by_character(text: str) -> None:
    encoded = plays.encode(text)
    assert encoded.dtype == np.uint8
    assert encoded.tolist() == tokens(text)


# Samples


def test_a_sequence_predicts_each_next_character_once() -> None:
    x, y = plays.sequences(plays.encode("abcdefg"), 3)
    assert [characters(row) for row in x] == ["abc", "def"]
    assert [characters(row) for row in y] == ["bcd", "efg"]
    x, y = plays.sequences(plays.encode("abcde"), 3)
    assert [characters(row) for row in x] == ["abc", "d~~"]
    assert [characters(row) for row in y] == ["bcd", "e~~"]
    assert (x.dtype, y.dtype) == (np.uint8, np.int64)


def test_a_window_predicts_the_character_after_it() -> None:
    x, y = plays.windows(plays.encode("abcde"), 3)
    assert [characters(row) for row in x] == ["abc", "bcd"]
    assert characters(y) == "de"
    assert (x.dtype, y.dtype) == (np.uint8, np.int64)


some_tokens = st.lists(st.integers(1, 81), max_size=60).map(lambda t: np.array(t, np.uint8))


@given(some_tokens, st.integers(1, 20))
def test_sequences_keep_every_character(text: np.ndarray, length: int) -> None:
    x, y = plays.sequences(text, length)
    targets = max(len(text) - 1, 0)
    assert x.shape == y.shape == (-(-targets // length), length)
    assert x.ravel()[:targets].tolist() == text[:-1].tolist()
    assert y.ravel()[:targets].tolist() == text[1:].tolist()
    assert not x.ravel()[targets:].any()
    assert not y.ravel()[targets:].any()
    assert (y != 0).any(1).all()  # no sample without a target


@given(some_tokens, st.integers(1, 20))
def test_windows_are_all_there_are(text: np.ndarray, length: int) -> None:
    x, y = plays.windows(text, length)
    expected = [(text[i : i + length].tolist(), int(text[i + length])) for i in range(len(text) - length)]
    assert x.shape == (len(expected), length)
    assert list(zip(x.tolist(), y.tolist(), strict=True)) == expected


def leaf_windows(text: str, length: int) -> tuple[list[str], list[str]]:
    count = max(len(text) - length, 0)
    return [text[i : i + length] for i in range(count)], [text[i + length] for i in range(count)]


def test_windows_are_joined_where_they_go_on() -> None:
    x, y = leaf_windows("abcdefgh", 3)
    assert [characters(t) for t in plays.rejoined(x, y)] == ["abcdefgh"]
    assert [characters(t) for t in plays.rejoined(x[:2] + x[3:], y[:2] + y[3:])] == ["abcde", "defgh"]
    # The window before ends the same way, but another character comes next.
    assert [characters(t) for t in plays.rejoined(["abc", "bcd"], ["x", "e"])] == ["abcx", "bcde"]
    assert plays.rejoined([], []) == []


@given(st.text("ab ", max_size=30), st.integers(1, 5), st.data())
def test_joined_windows_cut_again_are_the_same(text: str, length: int, data: st.DataObject) -> None:
    """Whichever of them are there, in whatever order."""
    x, y = leaf_windows(text, length)
    chosen = data.draw(st.lists(st.sampled_from(range(len(x))))) if x else []
    x, y = [x[i] for i in chosen], [y[i] for i in chosen]
    again = [plays.windows(t, length) for t in plays.rejoined(x, y)]
    assert [characters(row) for windows, _ in again for row in windows] == x
    assert "".join(characters(after) for _, after in again) == "".join(y)


# From files


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of official files, as if TEXT were the complete works."""
    entry = official.entry("shakespeare")
    (file,) = entry.layout("text").files
    small = replace(file, md5=hashlib.md5(TEXT.encode()).hexdigest())
    layouts = (official.Layout("text", (small,)), entry.layout("leaf"))
    monkeypatch.setitem(official.DATASETS, "shakespeare", replace(entry, layouts=layouts))


def load(folder: Path, **values: Any) -> Dataset:
    usual: dict[str, Any] = {"source": "auto", "form": "sequence", "sequence_length": 8, "test_fraction": 0.2}
    cache = folder.with_name(f"{folder.name} cache")
    return plays.shakespeare(data_dir=str(folder), cache_dir=str(cache), **{**usual, **values})


def write_text(folder: Path, content: bytes = TEXT.encode(), name: str = "t8.shakespeare.txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def leaf(users: dict[str, str], length: int = 8) -> dict[str, Any]:
    """What LEAF's scripts make of each user's text."""
    cut = {user: leaf_windows(text, length) for user, text in users.items()}
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in cut.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in cut.items()},
    }


def write_leaf(folder: Path, train: object, test: object) -> None:
    for part, content in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / f"all_data_{part}.json").write_text(json.dumps(content))


def own(data: Dataset, client: str, part: str) -> tuple[list[str], list[str]]:
    """A client's inputs and targets as text."""
    code = data.client_names.index(client)
    x, y, owner = (getattr(data, f"{part}_{kind}") for kind in ("x", "y", "client"))
    inputs, targets = x[torch.from_numpy(owner == code)], y[torch.from_numpy(owner == code)]
    return [characters(row) for row in inputs], [characters(row) for row in targets[:, None].flatten(1)]


@pytest.mark.usefixtures("published")
def test_sequences_from_the_text(tmp_path: Path) -> None:
    write_text(tmp_path / "shakespeare")
    data = load(tmp_path)
    assert data.client_names == ("MUCH__ADO_HERO", "MUCH__ADO_BEATRICE")  # the others' last line is blank
    assert (data.num_classes, data.input_shape, data.tokens, data.sequence) == (82, (8,), True, True)
    assert data.class_names == plays.NAMES
    train, test = own(data, "MUCH__ADO_HERO", "train"), own(data, "MUCH__ADO_HERO", "test")
    assert train == (["One two ", "three fo", "ur. Five"], ["ne two t", "hree fou", "r. Five "])
    assert test == (["six!~~~~"], ["ix! ~~~~"])
    assert own(data, "MUCH__ADO_BEATRICE", "test") == ([" Exit~~~"], ["Exit ~~~"])
    assert data.inputs(data.train_x[:2]).dtype == torch.int64


@pytest.mark.usefixtures("published")
def test_windows_from_the_text(tmp_path: Path) -> None:
    write_text(tmp_path)
    data = load(tmp_path, form="window", sequence_length=4)
    assert data.client_names == ("MUCH__ADO_HERO", "MUCH__ADO_BEATRICE")
    assert own(data, "MUCH__ADO_HERO", "test") == (["six!"], [" "])
    assert own(data, "MUCH__ADO_BEATRICE", "test") == ([" Exi", "Exit"], ["t", " "])
    x, y = own(data, "MUCH__ADO_HERO", "train")
    assert (x[0], y[0], x[-1], y[-1], len(x)) == ("One ", "t", "Five", " ", len("One two three four. Five ") - 4)
    assert (data.sequence, data.train_y.dtype) == (False, torch.int64)


@pytest.mark.usefixtures("published")
def test_another_test_fraction(tmp_path: Path) -> None:
    write_text(tmp_path)
    assert own(load(tmp_path, test_fraction=0.5), "MUCH__ADO_HERO", "test") == (
        ["Five six", "!~~~~~~~"],
        ["ive six!", " ~~~~~~~"],
    )


@pytest.mark.usefixtures("published")
def test_a_packed_text_is_the_same_and_the_cache_serves_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    write_text(plain)
    write_text(packed, gzip.compress(TEXT.encode()), "t8.shakespeare.txt.gz")
    assert load(plain).fingerprint == load(packed).fingerprint
    monkeypatch.setattr(plays, "roles", None)  # from here on nothing is decoded
    assert own(load(packed), "MUCH__ADO_HERO", "test")[0] == ["six!~~~~"]


@pytest.mark.parametrize("form", ["sequence", "window"])
def test_text_and_leaf_give_the_same_samples(tmp_path: Path, published: None, form: str) -> None:
    parts = {
        name: [plays.joined(part) for part in plays.split(lines, 0.2)] for name, lines in plays.roles(TEXT).items()
    }
    kept = {name: own for name, own in parts.items() if min(map(len, own)) > 4}
    assert list(kept) == ["MUCH__ADO_HERO", "MUCH__ADO_BEATRICE"]
    train, test = ({name: own[i] for name, own in kept.items()} for i in (0, 1))
    write_leaf(tmp_path / "json", leaf(train, 4), leaf(test, 4))
    write_text(tmp_path / "text")
    from_text, from_leaf = (load(tmp_path / kind, form=form, sequence_length=4) for kind in ("text", "json"))
    for name in kept:
        for part in ("train", "test"):
            assert own(from_text, name, part) == own(from_leaf, name, part)


@pytest.mark.usefixtures("published")
def test_the_text_comes_first_unless_the_source_is_named(tmp_path: Path) -> None:
    write_text(tmp_path / "shakespeare")
    write_leaf(tmp_path / "shakespeare", leaf({"A": "to be or not to be"}), leaf({"A": "that is the question"}))
    assert "MUCH__ADO_HERO" in load(tmp_path).client_names
    assert "MUCH__ADO_HERO" in load(tmp_path, source="text").client_names
    assert load(tmp_path, source="leaf").client_names == ("A",)


def test_leaf_in_several_files_and_with_other_test_users(tmp_path: Path) -> None:
    """LEAF's split by user: who is tested on trains nothing."""
    write_leaf(tmp_path, leaf({"A": "to be or not to be"}), leaf({"C": "that is the question"}))
    (tmp_path / "train" / "more.json").write_text(
        json.dumps(leaf({"B": "whether 'tis nobler"}) | {"hierarchies": ["H"]})
    )
    data = load(tmp_path)
    assert data.client_names == ("A", "B", "C")
    assert own(data, "B", "train") == (["whether ", "'tis nob", "le~~~~~~"], ["hether '", "tis nobl", "er~~~~~~"])
    assert own(data, "C", "train") == ([], [])


def test_leaf_windows_with_gaps_are_texts_of_their_own(tmp_path: Path) -> None:
    content = leaf({"A": "to be or not to be"})
    x, y = content["user_data"]["A"]["x"], content["user_data"]["A"]["y"]
    content["user_data"]["A"] = {"x": [x[0], x[1], x[5]], "y": [y[0], y[1], y[5]], "raw": "to be or not to be"}
    content["num_samples"] = [3]
    write_leaf(tmp_path, content, leaf({"A": "that is the question"}))
    assert own(load(tmp_path), "A", "train")[0] == ["to be or", " ~~~~~~~", " or not "]
    assert own(load(tmp_path, form="window"), "A", "train")[0] == ["to be or", "o be or ", " or not "]


# Bad input


def refused(kind: type[InputError], call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("source", "tff"), ("form", "line"), ("sequence_length", 0), ("sequence_length", 8.0)),
        *(("sequence_length", 10**9), ("test_fraction", 0), ("test_fraction", 1), ("test_fraction", float("nan"))),
    ],
)
def test_bad_values(tmp_path: Path, key: str, value: object) -> None:
    refused(BadValue, lambda: load(tmp_path, **{key: value}), f"{key}={value}: must be")


@pytest.mark.usefixtures("published")
def test_a_length_that_no_text_has(tmp_path: Path) -> None:
    write_text(tmp_path)
    refused(
        BadValue, lambda: load(tmp_path, form="window", sequence_length=500), "sequence_length=500", "no train samples"
    )
    assert not list(tmp_path.with_name(f"{tmp_path.name} cache").glob("shakespeare-*"))


@pytest.mark.usefixtures("published")
def test_another_text_is_not_taken_for_it(tmp_path: Path) -> None:
    """A byte more, half a packed file, nothing at all, and half of LEAF's folders."""
    path = write_text(tmp_path / "a", TEXT.encode() + b"\n")
    refused(InputError, lambda: load(tmp_path / "a"), str(path), "md5")
    path = write_text(tmp_path / "b", gzip.compress(TEXT.encode())[:-200], "t8.shakespeare.txt.gz")
    refused(InputError, lambda: load(tmp_path / "b"), str(path), "truncated")
    refused(InputError, lambda: load(tmp_path / "c"), "t8.shakespeare.txt", str(tmp_path / "c"))
    write_leaf(tmp_path / "d", leaf({"A": "to be or not to be"}), {})
    (tmp_path / "d" / "test" / "all_data_test.json").unlink()
    refused(InputError, lambda: load(tmp_path / "d", source="leaf"), "test/*.json")
    refused(InputError, lambda: load(tmp_path / "d", source="text"), "t8.shakespeare.txt")


def other(**changes: Any) -> dict[str, Any]:
    return {**leaf({"A": "to be or not to be"}), **changes}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1], "is a list or a value"),
        ({"users": [], "num_samples": []}, "user_data is missing"),
        (other(users="A"), "users is no list"),
        (other(user_data=[]), "user_data is no dict"),
        (other(num_samples=[]), "1 users but 0 num_samples"),
        (other(users=[["A"]]), "users are not all names"),
        (other(users=["B"]), "A is in only one of users and user_data"),
        (other(user_data={"A": "to be"}), "user_data of A has no keys"),
        (other(user_data={"A": {"x": ["to be"]}}), "user A has no list y"),
        (other(num_samples=[1], user_data={"A": {"x": [[0.5]], "y": [3]}}), "x of user A is not text"),
        (other(user_data={"A": {"x": ["to"], "y": ["b", "e"]}}), "user A has 1 x, 2 y and num_samples 10"),
        (other(num_samples=[2], user_data={"A": {"x": ["to", "b"], "y": ["b", "e"]}}), "not of one length"),
        (other(num_samples=[1], user_data={"A": {"x": [""], "y": ["b"]}}), "not of one length"),
        (other(num_samples=[1], user_data={"A": {"x": ["to"], "y": ["be"]}}), "not all one character"),
    ],
)
def test_json_of_another_layout(tmp_path: Path, content: object, said: str) -> None:
    write_leaf(tmp_path, content, leaf({"A": "that is the question"}))
    refused(InputError, lambda: load(tmp_path), str(tmp_path / "train" / "all_data_train.json"), said)


def test_json_that_is_none_or_twice_the_same(tmp_path: Path) -> None:
    write_leaf(tmp_path, leaf({"A": "to be or not to be"}), leaf({"A": "that is the question"}))
    whole = (tmp_path / "test" / "all_data_test.json").read_text()
    (tmp_path / "test" / "copy.json").write_text(whole)
    refused(InputError, lambda: load(tmp_path), "user A is in", "copy.json", "all_data_test.json")
    for bad in (whole[:100].encode(), b"\xff\xfe\xfd", b"[" * 100_000):
        (tmp_path / "test" / "copy.json").write_bytes(bad)
        refused(InputError, lambda: load(tmp_path), "copy.json is no JSON")


def test_json_without_samples(tmp_path: Path) -> None:
    write_leaf(tmp_path, leaf({"A": "to be or not to be"}), leaf({}))
    refused(InputError, lambda: load(tmp_path), "no test samples")


# The LSTM


def small(layers: int = 2) -> LstmShakespeare:
    torch.manual_seed(3)
    network = LstmShakespeare(3, 5, layers, input_shape=(7,), num_classes=11)
    for parameter in network.parameters():  # biases and embeddings large enough to be seen
        torch.nn.init.normal_(parameter, std=0.7)
    return network.double()


SAMPLE = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [10, 9, 8, 1, 0, 0, 0]])


def reference(network: LstmShakespeare, rows: Tensor) -> np.ndarray:
    """Hochreiter and Schmidhuber's cell with forget gates, a step and a sample at a time."""
    p = {name: value.detach().numpy() for name, value in network.named_parameters()}

    def sigmoid(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    out = np.zeros((*rows.shape, len(p["linear.bias"])))
    for b, row in enumerate(rows.tolist()):
        h = [np.zeros(network.linear.in_features) for _ in network.layers]
        c = [np.zeros_like(state) for state in h]
        for t, token in enumerate(row):
            x = p["embedding.weight"][token]
            for i in range(len(h)):
                gates = p[f"layers.{i}.input_weight"] @ x + p[f"layers.{i}.recurrent_weight"] @ h[i]
                into, forget, cell, output = np.split(gates + p[f"layers.{i}.bias"], 4)
                c[i] = sigmoid(forget) * c[i] + sigmoid(into) * np.tanh(cell)
                h[i] = x = sigmoid(output) * np.tanh(c[i])
            if token != 0:
                out[b, t] = p["linear.weight"] @ x + p["linear.bias"]
    return out


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_lstm_is_its_equations(layers: int) -> None:
    network = small(layers=layers)
    np.testing.assert_allclose(network(SAMPLE).detach().numpy(), reference(network, SAMPLE), rtol=0, atol=1e-12)
    single = network.float()(SAMPLE).detach().numpy()  # another kernel
    np.testing.assert_allclose(single, reference(network.double(), SAMPLE), rtol=0, atol=1e-5)


def test_lstm_has_the_published_number_of_parameters() -> None:
    """Reddi et al.: 720 + 271,360 + 525,312 + 23,130."""
    network = LstmShakespeare(8, 256, 2, input_shape=(80,), num_classes=90)
    assert [sum(p.numel() for p in part.parameters()) for part in network.layers] == [271_360, 525_312]
    assert sum(p.numel() for p in network.parameters()) == 820_522
    assert not list(network.buffers())
    assert network(torch.ones(2, 80, dtype=torch.int64)).shape == (2, 80, 90)


def test_padding_counts_nowhere() -> None:
    """Not in the outputs, not in the gradient of their norm, and not in what comes before it."""
    network = small()
    outputs = network(SAMPLE[1:])
    assert not outputs[:, 4:].any()
    padded = torch.autograd.grad(outputs.square().sum(), list(network.parameters()))
    short = network(SAMPLE[1:, :4])
    torch.testing.assert_close(outputs[:, :4], short, rtol=0, atol=1e-12)
    for a, b in zip(padded, torch.autograd.grad(short.square().sum(), list(network.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert not padded[0][0].any()  # the padding's own embedding


def test_lstm_takes_parameters_from_outside() -> None:
    """Those that are handed in decide, with gradients that finite differences confirm, in training and in eval mode."""
    network, names = small(layers=1), [name for name, _ in small(layers=1).named_parameters()]
    given = [torch.randn_like(p).requires_grad_() for p in network.parameters()]

    def outputs(*values: Tensor) -> Tensor:
        return functional_call(network, dict(zip(names, values, strict=True)), (SAMPLE[:, 2:6],))

    for mode in (True, False):
        network.train(mode)
        assert torch.autograd.gradcheck(outputs, given)
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), given, strict=True):
            parameter.copy_(value)
    assert torch.equal(outputs(*given), network(SAMPLE[:, 2:6]))


def test_lstm_gives_the_same_bits_every_time() -> None:
    network = LstmShakespeare(8, 256, 2, input_shape=(80,), num_classes=82)
    x = torch.arange(320).reshape(4, 80) % 81 + 1

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(network(x).square().mean(), list(network.parameters()))

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_lstm_starts_as_keras_does() -> None:
    torch.manual_seed(0)
    layer, network = Lstm(64, 128), LstmShakespeare(8, 256, 2, input_shape=(80,), num_classes=82)
    spread = (2 / 64) ** 0.5
    assert layer.input_weight.std().item() == pytest.approx(spread, rel=0.02)
    assert layer.input_weight.abs().max().item() <= 2 * spread / 0.8796
    torch.testing.assert_close(layer.recurrent_weight.T @ layer.recurrent_weight, torch.eye(128), rtol=0, atol=1e-5)
    assert layer.bias.tolist() == [0.0] * 128 + [1.0] * 128 + [0.0] * 256
    assert 0.049 < network.embedding.weight.abs().max().item() <= 0.05
    limit = (6 / (256 + 82)) ** 0.5
    assert 0.99 * limit < network.linear.weight.abs().max().item() <= limit
    assert not network.linear.bias.any()


def test_lstm_learns() -> None:
    """What comes next in "abcabc...", which it can know from the second character on."""
    torch.manual_seed(0)
    network = LstmShakespeare(4, 16, 1, input_shape=(9,), num_classes=5)
    x = torch.tensor([[2, 3, 4] * 3, [3, 4, 2] * 3])
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
    assert torch.equal(network(x[:, :-1]).argmax(-1), x[:, 1:])


@pytest.mark.parametrize("key", ["embedding", "hidden", "layers"])
def test_lstm_sizes_are_checked(key: str) -> None:
    sizes: dict[str, Any] = {"embedding": 8, "hidden": 256, "layers": 2, key: 0}
    refused(
        BadValue,
        lambda: LstmShakespeare(**sizes, input_shape=(80,), num_classes=82),
        f"{key}=0: must be a whole number >= 1",
    )


def test_lstm_wants_tokens() -> None:
    refused(
        InputError, lambda: LstmShakespeare(8, 256, 2, input_shape=(1, 28, 28), num_classes=10), "tokens", "1x28x28"
    )
