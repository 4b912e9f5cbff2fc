"""metrics.csv and layers.csv: plain files, a row a round (a row a layer and round), flushed as they grow."""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from fedsim import check
from fedsim.layers import Layers
from fedsim.logger.base import RunInfo
from fedsim.metrics import EVALUATED, LAYER_METRICS, METRICS
from fedsim.runner import LayerRows, Row


class Csv:
    def __init__(self, layers: Layers, eval_every: int) -> None:
        self._layers, self._eval_every = layers, eval_every
        self._files: list[TextIO] = []

    def open(self, run: RunInfo) -> None:
        self._folder, self._rounds = run.folder, run.rounds
        for name, columns in (("metrics.csv", METRICS), ("layers.csv", LAYER_METRICS)):
            if run.start == 0:
                _write(run.folder / name, columns, [])
        self._cut(run.start)
        self._files = [
            (run.folder / name).open("a", newline="", encoding="utf-8") for name in ("metrics.csv", "layers.csv")
        ]

    def log(self, row: Row, layers: LayerRows) -> None:
        metrics, layer_file = self._files
        metrics.write(_line(row, METRICS))
        for i, (name, kind) in enumerate(zip(self._layers.names, self._layers.kinds, strict=True)):
            values = {column: values[i] for column, values in layers.items()}
            layer_file.write(_line({"round": row["round"], "layer": name, "kind": kind, **values}, LAYER_METRICS))
        for file in self._files:
            file.flush()

    def sync(self) -> None:
        """Onto the disk: a checkpoint must never be ahead of the rows it continues."""
        for file in self._files:
            os.fsync(file.fileno())

    def rewind(self, round: int) -> None:
        """Forget rows after a round (one that was interrupted half way)."""
        self.close()
        self._cut(round)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def _cut(self, round: int) -> None:
        """Keep the rows of the first `round` rounds, as a run that is still going would have written them: the
        evaluation that a shorter run added after its last round is blanked."""
        going_on = round < self._rounds
        for name, columns in (("metrics.csv", METRICS), ("layers.csv", LAYER_METRICS)):
            path = self._folder / name
            rows = [row for row in _read(path, columns) if row["round"].isdigit() and int(row["round"]) <= round]
            per_round = len(self._layers.names) if name == "layers.csv" else 1
            if len(rows) != round * per_round:
                raise check.InputError(
                    f"{path} has {len(rows)} rows for the {round} rounds of the checkpoint; "
                    "overwrite=true starts the run again"
                )
            for row in rows:
                if going_on and int(row["round"]) % self._eval_every:
                    row.update({column: "" for column in row if column.startswith(EVALUATED)})
            _write(path, columns, rows)


def _read(path: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """Whole rows only: a killed process may leave half a line at the end."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = text[: text.rfind("\n") + 1].splitlines()
    reader = csv.DictReader(lines)
    if lines and reader.fieldnames != list(columns):
        raise check.InputError(f"{path} has other columns than this version's; overwrite=true starts the run again")
    return list(reader)


def _write(path: Path, columns: Iterable[str], rows: Sequence[Mapping[str, str]]) -> None:
    names = list(columns)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def _line(row: Mapping[str, float | str], columns: Iterable[str]) -> str:
    return ",".join(_text(row[name]) if name in row else "" for name in columns) + "\n"


def _text(value: float | str) -> str:
    """Nine digits bring a float32 back exactly."""
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else f"{value:.9g}"
