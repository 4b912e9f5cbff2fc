"""Users' own tables, in Parquet files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsim import check
from fedsim.data import Dataset
from fedsim.dataset import store
from fedsim.dataset.own import (
    PARTS,
    Part,
    arrange,
    channels_first,
    check_common,
    check_shape,
    existing,
    finished,
    numbers,
    part,
)
from fedsim.dataset.pictures import pictures, survey


def parquet(
    path: str,
    cache_dir: str,
    label: str,
    client_id: str | None,
    split: str | None,
    shape: list[int] | None,
    test_fraction: float,
    standardize: bool,
    seed: int,
    features: list[str] | None = None,
) -> Dataset:
    """A table, or a folder with train*.parquet and test*.parquet; see `choose` for what its columns are."""
    check_common(test_fraction, standardize, seed)
    check.text("label", label)
    for key, name in (("client_id", client_id), ("split", split)):
        if name is not None:
            check.text(key, name)
    if shape is not None:
        check_shape("shape", shape, "must be the shape of a sample, as in [CHANNELS,HEIGHT,WIDTH], or null")
    files = find_tables(existing(path), split)
    columns = choose(files[0][1], features, label, client_id, split)
    where = f"dataset=parquet: {existing(path)}"
    found = store.decoded(
        "parquet",
        [file for _, file in files],
        lambda: arrange(where, read_parquet(where, files, columns, shape), test_fraction, seed),
        cache_dir,
        parts=[prefix for prefix, _ in files],
        columns=vars(columns),
        shape=shape,
        test_fraction=test_fraction,
        seed=seed,
    )
    return finished(found, standardize)


@dataclass(frozen=True)
class Columns:
    features: tuple[str, ...]
    label: str
    client_id: str | None
    split: str | None

    @property
    def others(self) -> list[str]:
        return [name for name in (self.label, self.client_id, self.split) if name is not None]


def find_tables(path: Path, split: str | None) -> list[tuple[str, Path]]:
    """Files, each with what its rows are: train_, test_, or both in one."""
    if path.is_file():
        return [("", path)]
    found = [(prefix, file) for part, prefix in PARTS.items() for file in sorted(path.glob(f"{part}*.parquet"))]
    if not found or found[0][0] != "train_":
        raise check.BadValue("path", path, "must be a .parquet file, or a folder with train*.parquet and test*.parquet")
    if split is not None:
        raise check.BadValue("split", split, "must be null for a folder, where files are called train* and test*")
    return found


def choose(file: Path, features: list[str] | None, label: str, client_id: str | None, split: str | None) -> Columns:
    """What the columns are. Features: those that are named; or else all that are numbers, in the file's order, or the
    one of lists, or the one of images (bytes, or Hugging Face's {bytes, path}). `client_id` is the column of that name
    if there is one; any other name must be there."""
    with legible(file):
        schema = pq.read_schema(file)
        there = f"{file}, which has {shorten(', '.join(schema.names), 300, placeholder=' ...')}"
    if len(set(schema.names)) < len(schema.names):
        raise check.InputError(f"dataset=parquet: names of columns must differ in {there}")
    if client_id == "client_id" and client_id not in schema.names:
        client_id = None
    others = Columns((), label, client_id, split).others
    for key, name in (("label", label), ("client_id", client_id), ("split", split)):
        if name is not None and (name not in schema.names or others.count(name) > 1):
            raise check.BadValue(key, name, f"must be a column of its own in {there}")
    kinds = {name: kind(schema.field(name).type) for name in schema.names if name not in others}
    if features is None:
        # No features: the index, which pandas stores of a table that was filtered; and clients, asked for or not.
        found = [n for n, k in kinds.items() if k and n != "client_id" and not n.startswith("__index_level_")]
    else:
        found = features if isinstance(features, list) else []
    of = {kinds.get(name) if isinstance(name, str) else None for name in found}
    if not (of == {"number"} or (len(found) == 1 and of < {"list", "image"})) or len(set(found)) < len(found):
        some = "" if features is not None else f"; which of {', '.join(found)}?" if found else "; none is there"
        valid = f"must be columns of numbers, or one of lists or of images, in {there}{some}"
        raise check.BadValue("features", features, valid)
    return Columns(tuple(found), label, client_id, split)


def kind(of: pa.DataType) -> str:
    """number, list, image; or empty: nothing to feed a model with."""
    if isinstance(of, pa.BaseExtensionType):
        return kind(of.storage_type)
    if pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_boolean(of) or pa.types.is_decimal(of):
        return "number"
    if nested(of):
        return "list" if kind(of.value_type) in ("number", "list") else ""
    if pa.types.is_struct(of):
        return "image" if of.get_field_index("bytes") >= 0 else ""
    return "image" if pa.types.is_binary(of) or pa.types.is_large_binary(of) else ""


def nested(of: pa.DataType) -> bool:
    return bool(pa.types.is_list(of) or pa.types.is_large_list(of) or pa.types.is_fixed_size_list(of))


def read_parquet(
    where: str, files: Sequence[tuple[str, Path]], columns: Columns, shape: Sequence[int] | None
) -> list[Part]:
    chunks: list[np.ndarray] = []
    others: dict[str, list[np.ndarray]] = {name: [] for name in columns.others}
    counts = dict.fromkeys((prefix for prefix, _ in files), 0)
    for prefix, file in files:
        for row, batch in batches(file, files[0][1], columns):
            cell = Cell(file, row)
            with legible(file):
                chunks.append(inputs(batch, columns.features, cell, chunks[0].shape[1:] if chunks else None))
                for name, read in others.items():
                    read.append(dense(batch.column(name), cell.of(name)))
            counts[prefix] += len(batch)
    if not chunks:
        raise check.InputError(f"{where} has no rows")
    if len({c.shape[1] for c in chunks}) > 1:  # images, some batches of which are all grayscale
        chunks = [c if c.shape[1] == 3 else c.repeat(3, 1) for c in chunks]
    x = np.concatenate(chunks)
    if shape is None:
        x = channels_first(x)
    elif np.prod(shape) == np.prod(x.shape[1:]):
        x = x.reshape(len(x), *shape)
    else:
        raise check.BadValue("shape", shape, f"must have as many values as a sample, which is of shape {x.shape[1:]}")
    table = {name: np.concatenate(read) for name, read in others.items()}
    parts, start = [], 0
    for prefix, count in counts.items():
        rows = slice(start, start + count)
        client = table[columns.client_id][rows] if columns.client_id else None
        of = f" of {prefix[:-1]}*.parquet" if prefix else ""
        names = (f"features{of}", f"column {columns.label}{of}", f"column {columns.client_id}{of}")
        parts.append(part(where, names, x[rows], table[columns.label][rows], client))
        start += count
    return parts if columns.split is None else divided(where, parts[0], table[columns.split], columns.split)


def divided(where: str, whole: Part, split: np.ndarray, name: str) -> list[Part]:
    wrong = ~np.isin(split, list(PARTS)) if split.dtype.kind == "U" else np.ones(len(split), bool)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise check.InputError(f"{where}: column {name} row {row} holds {split[row]!s}; valid: train or test")
    for valid in PARTS:
        if valid not in split:
            raise check.InputError(f"{where}: column {name} has no row that says {valid}")
    return [whole.take(split == valid) for valid in PARTS]


@contextmanager
def legible(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise check.InputError(f"dataset=parquet: {file} is no readable Parquet file ({error})") from error


def batches(file: Path, like: Path, columns: Columns) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A file's rows, a few thousand at a time, with the number of the first."""
    used = [*columns.features, *columns.others]
    with legible(file), pq.ParquetFile(file) as table:
        mine, first = table.schema_arrow, pq.read_schema(like)
        for name in used:
            if name not in mine.names or mine.field(name).type != first.field(name).type:
                found = mine.field(name).type if name in mine.names else "missing"
                problem = f"column {name} is {found}, but {first.field(name).type} in {like.name}"
                raise check.InputError(f"dataset=parquet: {file}: {problem}")
        row = 0
        for batch in table.iter_batches(4096, columns=used):
            if len(batch):
                yield row, batch
            row += len(batch)


@dataclass(frozen=True)
class Cell:
    """Where a batch's values are, for messages."""

    file: Path
    row: int

    def of(self, column: str) -> Callable[[int], str]:
        return lambda i: f"dataset=parquet: {self.file}: column {column} row {self.row + i}"


def inputs(batch: pa.RecordBatch, features: Sequence[str], cell: Cell, like: tuple[int, ...] | None) -> np.ndarray:
    """A batch's samples, of the same shape as those before."""
    name, column = cell.of(features[0]), batch.column(features[0])
    if kind(column.type) == "image":
        return images(column, name, like)
    if kind(column.type) == "list":
        x = dense(column, name)
        if like is not None and x.shape[1:] != like:
            raise check.InputError(f"{name(0)} is of shape {x.shape[1:]}, but {like} in the first row")
    else:
        x = np.stack([dense(batch.column(f), cell.of(f)) for f in features], 1)
    return x if x.dtype == np.uint8 else numbers(x)


def images(column: pa.Array, name: Callable[[int], str], like: tuple[int, ...] | None) -> np.ndarray:
    contents = (column.field("bytes") if pa.types.is_struct(column.type) else column).to_pylist()
    if None in contents or column.null_count:
        missing = [content is None or not valid for content, valid in zip(contents, column.is_valid(), strict=True)]
        raise check.InputError(f"{name(missing.index(True))} has no bytes of an image")
    gray, size = survey(contents, name)
    return pictures(contents, name, (1 if gray else 3, *(size if like is None else like[1:])))


def dense(column: pa.Array, name: Callable[[int], str], per_row: int = 1) -> np.ndarray:
    """Numbers or text, or lists (of lists) of equally many, as an array; `per_row` entries make a row."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        missing = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise check.InputError(f"{name(missing // per_row)} is missing (null)")
    if nested(column.type):
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        length = int(lengths[0])
        if length == 0 or (lengths != length).any():
            other = int(np.argmax((lengths != length) | (length == 0)))
            raise check.InputError(
                f"{name(other // per_row)} has a list of {lengths[other]}, the first row one of {length}"
            )
        inner = dense(column.flatten(), name, per_row * length)
        return inner.reshape(len(column), length, *inner.shape[1:])
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    values = column.to_numpy(zero_copy_only=False)
    return np.array(values.tolist()) if values.dtype == object else values
