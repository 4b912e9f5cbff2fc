"""The report's numbers as CSV: a file a table, and one of all verdicts."""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedsim.reporting.board import Board, slug
from fedsim.reporting.runs import PICKS, UNITS
from fedsim.reporting.verdicts import splits, verdicts


def write(boards: Sequence[Board], out: Path) -> list[Path]:
    """The files that were written."""
    paths = []
    for experiment in dict.fromkeys(board.table.experiment for board in boards):
        rows = [row for board in boards if board.table.experiment == experiment for row in _cells(board)]
        paths.append(out / f"table_{slug(experiment)}.csv")
        pd.DataFrame(rows).to_csv(paths[-1], index=False)
    if boards:
        paths.append(out / "verdicts.csv")
        pd.DataFrame([row for board in boards for row in _verdicts(board)], columns=VERDICTS).to_csv(
            paths[-1], index=False
        )
    return paths


VERDICTS = [
    *("experiment", "scale", "row", "column", "than", "claim", "metric", "pick", "paper", "ours", "low", "high", "p"),
    *("seeds", "verdict", "passes", "note"),
]


def _cells(board: Board) -> list[dict[str, object]]:
    rows = []
    for metric in dict.fromkeys([*board.table.metrics, "test accuracy"]):
        for row in board.rows:
            for column in board.columns:
                ours, paper = board.ours(row, column, metric), board.table.value(row, column, metric)
                picks = {pick: board.ours(row, column, metric, pick).mean for pick in PICKS}
                accuracy = metric in ("test accuracy", "train accuracy")
                rows.append(
                    {
                        "experiment": board.table.experiment,
                        "scale": board.scale,
                        "row": row,
                        "column": column,
                        "metric": metric,
                        "unit": UNITS.get(metric, ""),
                        "pick": board.pick if accuracy else "",
                        "mean": ours.mean,
                        "sd": ours.sd,
                        "seeds": ours.n,
                        "paper": paper,
                        "difference": ours.mean - paper,
                        **{pick: value if accuracy else math.nan for pick, value in picks.items()},
                        "rounds": board.rounds(row, column),
                        "state": board.state(row, column) or "finished",
                    }
                )
    return rows


def _verdicts(board: Board) -> list[list[object]]:
    """Claims, and the two parts of a gain as two more lines."""
    about: list[object] = [board.table.experiment, board.scale]
    lines = [
        [
            *(*about, v.row, v.column, v.than, v.claim, v.metric, board.pick, v.paper),
            *(v.ours.mean, v.ours.low, v.ours.high, v.ours.p if v.than else math.nan, v.ours.n),
            *(v.word, v.passes, v.note),
        ]
        for v in verdicts(board)
    ]
    for part in splits(board):
        for what, column, than, ours in (
            ("what the control gains", part.control, part.plain, part.shared),
            ("what the method has beyond it", part.method, part.control, part.own),
        ):
            numbers = [math.nan, ours.mean, ours.low, ours.high, ours.p, ours.n]
            lines.append([*about, part.row, column, than, what, part.metric, board.pick, *numbers, "", "", part.note])
    return lines
