"""The plays of Shakespeare, a client for each role of each play: which character comes next?

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, and Caldas et
al., "LEAF", 2018, from either of two sources: the complete works as one plain text, or the JSON files that LEAF's own
scripts make of it. Samples have one of two forms:

    sequence   a role's text in consecutive pieces; every character of a piece is predicted from those before it in
               the piece (McMahan et al.; Reddi et al., "Adaptive Federated Optimization", ICLR 2021)
    window     every window of the text, and the one character after it (LEAF)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsim import check, fetch, official
from fedsim.data import PAD, Dataset
from fedsim.dataset import leaf, store

UNKNOWN = 1
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters in LEAF's order: tokens 2 to 81."""
NAMES = ("pad", "unk", *({"\n": "newline", " ": "space"}.get(letter, letter) for letter in LETTERS))
TOKENS = np.full(256, UNKNOWN, np.uint8)
TOKENS[[ord(letter) for letter in LETTERS]] = np.arange(2, len(NAMES))

AUTHOR = "by William Shakespeare"
"""Stands below the title of every work."""
UNINDENTED = "THE COMEDY OF ERRORS"

Texts = Mapping[str, Sequence[np.ndarray]]
"""The texts of each client, as tokens."""


def shakespeare(
    data_dir: str, cache_dir: str, source: str, form: str, sequence_length: int, test_fraction: float
) -> Dataset:
    """`source`: text, leaf, or auto for the first of them that is there. LEAF's files are split into training and test
    already: `test_fraction` is for the text alone."""
    check.choice("source", source, ("auto", "text", "leaf"))
    check.choice("form", form, ("sequence", "window"))
    check.integer("sequence_length", sequence_length, ge=1, le=10_000)
    check.number("test_fraction", test_fraction, gt=0, lt=1)
    layout, files = fetch.ensure("shakespeare", data_dir, None if source == "auto" else (source,))
    parameters: dict[str, Any] = {"form": form, "sequence_length": sequence_length}
    if layout == "text":
        parameters["test_fraction"] = test_fraction
    decode = decode_text if layout == "text" else decode_leaf
    found = store.decoded("shakespeare", files, lambda: decode(files, **parameters), cache_dir, **parameters)
    return store.dataset(found, torch.ones(1), torch.zeros(1), tokens=True)


def decode_text(files: Sequence[Path], form: str, sequence_length: int, test_fraction: float) -> store.Arrays:
    """From the plain text, split in time: the last `test_fraction` of each role's lines (rounded down, but at least
    one) are for testing, those before for training. Roles too short to give a sample of both are left out: of the 1,145
    with more than two lines none in the sequence form, and 350 in the window form (80 characters, 0.2)."""
    official.verify("shakespeare", "text", files)
    train, test = {}, {}
    shortest = 2 if form == "sequence" else sequence_length + 1
    for name, lines in roles(official.read(files[0]).decode("ascii")).items():
        parts = [encode(joined(part)) for part in split(lines, test_fraction)]
        if min(map(len, parts)) >= shortest:
            train[name], test[name] = parts[:1], parts[1:]
    return arrays(train, test, form, sequence_length)


def decode_leaf(files: Sequence[Path], form: str, sequence_length: int) -> store.Arrays:
    """From LEAF's JSON, as LEAF has split it. Its windows are joined to the texts they were cut from: cut again they
    are the same windows, and sequences can be cut from them as well."""
    train = [file for file in files if file.parent.name == "train"]
    test = [file for file in files if file.parent.name == "test"]
    return arrays(leaf_texts(train), leaf_texts(test), form, sequence_length)


def roles(text: str) -> dict[str, list[str]]:
    """PLAY_ROLE -> its lines in order, of every role that has more than two; as LEAF's script finds them: 1,145 of
    1,302 roles, and 1,130 with more than 80 characters, which have 4,226,206 windows.

    It goes by indentation alone. So a stage direction that is indented as speech is speech, and in The Comedy of
    Errors, which is not indented, two sentences of the copyright notice are roles."""
    lines = text.split("\n")
    works = [i for i, line in enumerate(lines) if AUTHOR in line]
    found = {}
    for start, end in pairwise([*works[1:], len(lines)]):  # the first work is the sonnets
        title = next(line.strip() for line in reversed(lines[:start]) if line.strip())
        for role, own in speeches(lines[start + 1 : end], title != UNINDENTED).items():
            if len(own) > 2:
                found[re.sub(r"\W", "_", f"{title}_{role}")] = own
    return found


def speeches(play: Sequence[str], indented: bool) -> dict[str, list[str]]:
    """role -> its lines. A speech begins with the role's name and a full stop and goes on with lines that are indented
    further; in a play without indentation, up to the next heading or notice."""
    cue = re.compile(("  " if indented else "") + r"([A-Za-z][A-Za-z ]*)\. (.*)")
    further = "    " if indented else ""
    spoken: dict[str, list[str]] = {}
    role = ""
    for line in play:
        if not indented and line.upper().startswith(("ACT ", "<")):
            role = ""
        elif match := cue.match(line):
            role = match[1].upper()  # some are written in several ways
            spoken.setdefault(role, []).append(match[2])
        elif role and line.startswith(further):
            spoken[role].append(line[len(further) :])
    return spoken


def split(lines: Sequence[str], test_fraction: float) -> tuple[Sequence[str], Sequence[str]]:
    """Training lines and the test lines that come after them: no character is in both."""
    count = max(int(len(lines) * test_fraction), 1)
    return lines[:-count], lines[-count:]


def joined(lines: Sequence[str]) -> str:
    """LEAF's text of a role: a space after each line, and never two in a row."""
    return re.sub("  +", " ", "".join(f"{line} " for line in lines))


def encode(text: str) -> np.ndarray:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    tokens: np.ndarray = TOKENS[np.minimum(codes, 255)]  # 255 is none of LEAF's characters, nor is any above
    return tokens


def sequences(text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """[N, length] inputs and, shifted by one, the targets of every position; the last row is padded."""
    targets = max(len(text) - 1, 0)
    rows = -(-targets // length)
    x, y = np.full((rows, length), PAD, np.uint8), np.full((rows, length), PAD, np.int64)
    x.reshape(-1)[:targets], y.reshape(-1)[:targets] = text[:-1], text[1:]
    return x, y


def windows(text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """[N, length], every window that has a character after it, and [N], that character. The windows are views."""
    if len(text) <= length:
        return np.empty((0, length), np.uint8), np.empty(0, np.int64)
    return np.lib.stride_tricks.sliding_window_view(text[:-1], length), text[length:].astype(np.int64)


def arrays(train: Texts, test: Texts, form: str, length: int) -> store.Arrays:
    """All clients' samples, one client after another."""
    cut = sequences if form == "sequence" else windows
    found: store.Arrays = {"class_names": np.array(NAMES)}
    codes: dict[str, int] = {}
    for part, texts in (("train", train), ("test", test)):
        pieces = [(name, *cut(text, length)) for name, own in texts.items() for text in own]
        pieces = [piece for piece in pieces if len(piece[1])]
        if not pieces:
            longest = max((len(text) for own in texts.values() for text in own), default=0)
            raise check.BadValue(
                "sequence_length", length, f"gives no {part} samples: the longest {part} text has {longest} characters"
            )
        owners = [codes.setdefault(name, len(codes)) for name, _, _ in pieces]
        found[f"{part}_x"] = np.concatenate([x for _, x, _ in pieces])
        found[f"{part}_y"] = np.concatenate([y for _, _, y in pieces])
        found[f"{part}_client"] = np.repeat(np.array(owners, np.int64), [len(y) for _, _, y in pieces])
    found["client_names"] = np.array(list(codes))
    return found


def leaf_texts(files: Sequence[Path]) -> Texts:
    """The texts of every user in some of LEAF's files."""
    texts: dict[str, list[np.ndarray]] = {}
    whose: dict[str, Path] = {}
    for file in files:
        for user, x, y in leaf_users(file):
            if user in texts:
                raise check.InputError(
                    f"dataset=shakespeare: user {user} is in {whose[user]} and again in {file}; "
                    "keep the files of one run of LEAF's scripts only"
                )
            texts[user], whose[user] = rejoined(x, y), file
    return texts


def leaf_users(file: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each user's windows and next characters in one of LEAF's files."""
    for user, x, y in leaf.users("shakespeare", file):
        for key, texts in (("x", x), ("y", y)):
            if not all(isinstance(text, str) for text in texts):
                raise check.InputError(f"dataset=shakespeare: {file}: {key} of user {user} is not text")
        if len(set(map(len, x))) > 1 or "" in x:
            raise check.InputError(f"dataset=shakespeare: {file}: x of user {user} are not of one length")
        if set(map(len, y)) != {1}:
            raise check.InputError(f"dataset=shakespeare: {file}: y of user {user} are not all one character")
        yield user, x, y


def rejoined(x: Sequence[str], y: Sequence[str]) -> list[np.ndarray]:
    """The texts that windows were cut from: a window whose beginning is the end of the one before, with that one's next
    character, goes on with its text; any other begins a new one."""
    if not x:
        return []
    window, after = encode("".join(x)).reshape(len(x), -1), encode("".join(y))
    goes_on = (window[1:, :-1] == window[:-1, 1:]).all(1) & (window[1:, -1] == after[:-1])
    starts = [0, *(np.flatnonzero(~goes_on) + 1).tolist(), len(x)]
    return [np.concatenate([window[start], after[start:end]]) for start, end in pairwise(starts)]
