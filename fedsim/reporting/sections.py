"""What the report says of each table: the paper's shape filled with ours, verdicts, and how much a rate explains."""

import math
from collections.abc import Sequence

from fedsim.metrics import METRICS
from fedsim.reporting.board import Board
from fedsim.reporting.document import BAD, FAINT, GOOD, WEAK, Cell, Section, Sheet, sheet
from fedsim.reporting.figures import charts
from fedsim.reporting.runs import PICKS, UNITS, shown
from fedsim.reporting.statistics import Estimate
from fedsim.reporting.verdicts import (
    AGREES,
    CONTRADICTS,
    NOT_CLAIMED,
    NOT_YET,
    Split,
    Verdict,
    failures,
    splits,
    states_something,
    verdicts,
)

SCALES = {
    "full": "scale=full: the paper's rounds, where no others were typed.",
    "short": "scale=short: fewer rounds than the paper's; its values are not expected, its directions are.",
    "smoke": "scale=smoke: two rounds on small made-up data, to see that it runs. Nothing is judged by it or checked.",
}
WIDEST = 6
"""Columns of a table; with more of them than rows it is turned."""


def section(board: Board) -> Section:
    drawn, unknown = charts(board)
    found, parts = verdicts(board), splits(board)
    sheets = _filled(board)
    if found:
        sheets.append(_verdicts(board, found))
    if parts:
        sheets.append(_splits(board, parts))
    lines = [
        f"`fedsim experiment={board.table.experiment}{_typed(board.scale)}`",
        *_scale(board.scale),
        *_seeds(board),
        *([f"Rows not run: {', '.join(absent)}."] if (absent := _absent(board)) else []),
        *board.table.remarks,
        *board.table.notes,
        *unknown,
    ]
    return Section(board.name, tuple(lines), (*sheets, _details(board)), tuple(drawn))


def overview(boards: Sequence[Board]) -> Sheet:
    """A line a table."""
    rows: list[list[str | Cell]] = []
    for board in boards:
        states = [board.state(row, column) for row in board.rows for column in board.columns]
        found = verdicts(board)
        found = [verdict for verdict in found if verdict.word not in (NOT_CLAIMED, NOT_YET)]
        passed = sum(verdict.passes for verdict in found)
        wrong = list(failures(board))
        cells = f"{states.count('')} of {len(states)}"
        tone = FAINT if board.smoke else BAD if wrong else GOOD
        some = f", {len(board.begun)} of {len(board.rows)} rows" if len(board.begun) < len(board.rows) else ""
        check = "not checked" if board.smoke else f"{len(wrong)} fail" if wrong else f"passes{some}"
        if not wrong and not board.smoke and not states_something(board):
            check, tone = "nothing stated", FAINT
        claims = f"{passed} of {len(found)}" if found else "-"
        rows.append([board.table.experiment, board.scale, cells, claims, _farthest(board), Cell(check, tone)])
    header = ("experiment", "scale", "cells finished", "claims that agree", "farthest from the paper", "check")
    return sheet("All tables", header, rows)


def _filled(board: Board) -> list[Sheet]:
    """The paper's table: ours, the paper's value with the difference, how much there is of ours. A sheet a metric, or,
    turned, all of them beside each other."""
    note = "Ours: mean ± standard deviation over seeds. Below it the paper's value and ours minus it, seeds, rounds."
    titles = {metric: _title(board, metric) for metric in board.table.metrics}
    if len(board.columns) > WIDEST and len(board.rows) < len(board.columns):
        beside = [(row, metric) for row in board.rows for metric in titles]
        turned: list[list[str | Cell]] = [
            [column, *(_cell(board, row, column, metric) for row, metric in beside)] for column in board.columns
        ]
        header = ("", *(f"{row}: {titles[metric]}" for row, metric in beside))
        return [sheet(f"Ours and the paper's, scale={board.scale}", header, turned, note)]
    return [
        sheet(
            f"{title}, scale={board.scale}",
            ("", *board.columns),
            [[row, *(_cell(board, row, column, metric) for column in board.columns)] for row in board.rows],
            note,
        )
        for metric, title in titles.items()
    ]


def _title(board: Board, metric: str) -> str:
    picked = f" ({board.pick.replace('_', ' ')})" if metric in ("test accuracy", "train accuracy") else ""
    return f"{metric}{picked}" + (f", {UNITS[metric]}" if metric in UNITS else "")


def _cell(board: Board, row: str, column: str, metric: str) -> Cell:
    ours, paper, wrong = (
        board.ours(row, column, metric),
        board.table.value(row, column, metric),
        board.state(row, column),
    )
    lines = [_mean(ours, metric) if ours.n else wrong or "-"]
    if not math.isnan(paper):
        by = f" ({shown(ours.mean - paper, metric, signed=True)})" if ours.n and not board.smoke else ""
        lines.append(f"paper {shown(paper, metric)}{by}")
    runs = board.runs(row, column)
    if ours.n:
        lines.append(f"{_count(ours.n, 'seed')}, {board.rounds(row, column)} rounds")
        lines += [wrong] if wrong else []
    return Cell("\n".join(lines), WEAK if wrong and runs else FAINT if wrong else "")


def _verdicts(board: Board, found: Sequence[Verdict]) -> Sheet:
    rows: list[list[str | Cell]] = [
        [
            verdict.row,
            verdict.claim if verdict.metric == board.metric else f"{verdict.metric}: {verdict.claim}",
            shown(verdict.paper, verdict.metric, signed=bool(verdict.than)),
            shown(verdict.ours.mean, verdict.metric, signed=bool(verdict.than)),
            _range(verdict.ours, verdict.metric, signed=bool(verdict.than)),
            _p(verdict.ours.p) if verdict.than else "-",
            str(verdict.ours.n),
            Cell(verdict.word, tone(verdict)),
            verdict.note,
        ]
        for verdict in found
    ]
    header = ("row", "claim", "paper", "ours", "95 % interval", "p", "seeds", "verdict", "note")
    note = (
        f"{board.metric}, where nothing else is said; of a comparison the difference of the two, paired by seed. "
        "p: paired t-test."
    )
    return sheet(f"Verdicts, scale={board.scale}", header, rows, note)


def tone(verdict: Verdict) -> str:
    if verdict.word in (NOT_CLAIMED, NOT_YET):
        return FAINT
    if verdict.passes:
        return GOOD if verdict.word == AGREES else WEAK
    return BAD if verdict.word == CONTRADICTS else WEAK if verdict.ours.n else FAINT


def _splits(board: Board, parts: Sequence[Split]) -> Sheet:
    rows: list[list[str | Cell]] = []
    for part in parts:
        share = "-" if math.isnan(part.share) else f"{100 * part.share:.0f} %"
        numbers = [
            "\n".join([shown(e.mean, part.metric, signed=True), *([_range(e, part.metric)] if e.n > 1 else [])])
            for e in (part.gain, part.shared, part.own)
        ]
        gain = f"{part.method} over {part.plain}" + ("" if part.metric == board.metric else f", {part.metric}")
        rows.append([part.row, gain, part.control, *numbers, share, str(part.gain.n), part.note])
    lines = [
        f"{control}: the plain method, its server rate set to the mean over rounds of {source} in the run of "
        f"{board.table.controls[control]} ({METRICS.get(source, 'as logged')})."
        for control, source in board.table.sources.items()
    ]
    note = (
        "Paired by seed, below each number its 95 % interval. The share is given where the gain is surely not 0, and "
        "can pass 100 % where the control is the better of the two. " + " ".join(lines)
    )
    header = ("row", "gain", "control", "whole", "control - plain", "method - control", "share", "seeds", "note")
    return sheet(f"Is it the rate? scale={board.scale}", header, rows, note)


def _details(board: Board) -> Sheet:
    rows: list[list[str | Cell]] = []
    for row in board.rows:
        for column in board.columns:
            wrong = board.state(row, column)
            picks = [_mean(board.ours(row, column, "test accuracy", pick), "test accuracy") for pick in PICKS]
            seeds = ", ".join(str(run.seed) for run in board.runs(row, column))
            loss = _mean(board.ours(row, column, "loss"), "loss")
            state = Cell(wrong or "finished", WEAK if wrong else "")
            rows.append([row, column, *picks, loss, seeds or "-", board.rounds(row, column), state])
    header = ("row", "column", *(pick.replace("_", " ") for pick in PICKS), "loss", "seeds", "rounds", "state")
    return sheet(f"Every cell, test accuracy in %, scale={board.scale}", header, rows, detail=True)


def _seeds(board: Board) -> list[str]:
    """Seeds the experiment asks for that no cell has."""
    there = {run.seed for runs in board.cells.values() for run in runs}
    absent = [str(seed) for seed in board.table.seeds if seed not in there]
    return [f"Seeds not run: {', '.join(absent)} (of {len(board.table.seeds)})."] if absent else []


def _absent(board: Board) -> list[str]:
    return [row for row in board.rows if row not in board.begun]


def _farthest(board: Board) -> str:
    metric = board.metric
    if board.smoke:
        return "-"
    gaps = [
        (abs(gap), gap, f"{row}, {column}")
        for row in board.rows
        for column in board.columns
        if not math.isnan(gap := board.ours(row, column, metric).mean - board.table.value(row, column, metric))
    ]
    _, gap, where = max(gaps, default=(0.0, math.nan, ""))
    return f"{shown(gap, metric, signed=True)} ({where})" if where else "-"


def _mean(ours: Estimate, metric: str) -> str:
    if not ours.n:
        return "-"
    return shown(ours.mean, metric) + (f" ± {shown(ours.sd, metric)}" if ours.n > 1 else "")


def _range(ours: Estimate, metric: str, signed: bool = True) -> str:
    if math.isnan(ours.low):
        return "none (one seed)" if ours.n == 1 else "-"
    return f"{shown(ours.low, metric, signed)} to {shown(ours.high, metric, signed)}"


def _p(p: float) -> str:
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _scale(scale: str) -> list[str]:
    """What a scale means, and that a typed change makes it another setting."""
    name, _, changes = scale.partition(", ")
    other = [f"Changed: {changes}: not the paper's setting, its values are not expected."] if changes else []
    return [SCALES.get(name, f"scale={name}"), *other]


def _typed(scale: str) -> str:
    """What gives this scale, and these changes, on the command line."""
    return "" if scale == "full" else " " + " ".join(f"scale={scale}".removeprefix("scale=full, ").split(", "))
