"""Does it come out as the paper says? Each claim of a table, row by row, paired by seed; and what fails --check."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fedsim.reporting.board import Board, Together, together
from fedsim.reporting.experiment import Claim
from fedsim.reporting.runs import LOWER_IS_BETTER, shown
from fedsim.reporting.statistics import ROUNDING, Estimate, difference, estimate

AGREES, AGREES_NOISE, AGREES_ONE = "agrees", "agrees, within noise", "agrees, one seed"
CONTRADICTS, CONTRADICTS_NOISE, CONTRADICTS_ONE = "contradicts", "contradicts, within noise", "contradicts, one seed"
EQUAL, MISSING, INCOMPARABLE, NOT_CLAIMED = "equal", "missing", "not comparable", "not claimed"

LEGEND = {
    AGREES: "ours has the paper's direction (or lies within the claim's bounds), and so does the whole 95 % interval",
    AGREES_NOISE: "the mean does, the 95 % interval also has the opposite: more seeds would tell",
    AGREES_ONE: "it does for the one seed there is; no interval",
    CONTRADICTS: "ours has the other direction (or lies outside the bounds), and so does the whole 95 % interval",
    CONTRADICTS_NOISE: "the mean has the other direction, the 95 % interval also has the paper's",
    CONTRADICTS_ONE: "it has the other direction for the one seed there is; no interval",
    EQUAL: "no difference at all, where the paper has one",
    MISSING: "no seed has all the runs that are needed",
    INCOMPARABLE: "the runs have the same settings but not the same partition: their data were not the same",
    NOT_CLAIMED: "the paper's own values are equal here",
}
PASSES = (AGREES, AGREES_NOISE, AGREES_ONE, NOT_CLAIMED)


@dataclass(frozen=True)
class Verdict:
    """One claim in one row."""

    row: str
    column: str
    than: str
    claim: str
    metric: str
    paper: float
    """What the paper's values give for the same number; NaN where it has none."""
    ours: Estimate
    word: str
    note: str

    @property
    def passes(self) -> bool:
        return self.word in PASSES


@dataclass(frozen=True)
class Split:
    """What a method gains over the plain one, and how much of it a control that only takes its step size gains."""

    row: str
    method: str
    plain: str
    control: str
    gain: Estimate
    step: Estimate
    direction: Estimate
    note: str


def verdicts(board: Board) -> list[Verdict]:
    """Every claim in every row (and column) that it is about."""
    result = []
    for claim in board.table.claims:
        for row in board.rows if claim.row is None else [claim.row]:
            if claim.than is not None:
                result.append(_direction(board, claim, row))
            else:
                columns = board.columns if claim.column is None else [claim.column]
                result += [_bounds(board, claim, row, column) for column in columns]
    return result


def _direction(board: Board, claim: Claim, row: str) -> Verdict:
    """By the sign that the paper's own values have in this row, where it gives both; else by the claim's."""
    assert claim.column is not None
    assert claim.than is not None
    metric = claim.metric or board.metric
    paper = board.table.value(row, claim.column, metric) - board.table.value(row, claim.than, metric)
    sign = -1 if metric in LOWER_IS_BETTER else 1
    notes = []
    if not math.isnan(paper) and paper * sign < 0:
        sign = -sign
        notes.append("the paper's values have the other sign here")
    pairs = together(board, row, (claim.column, claim.than), metric)
    notes += pairs.notes
    ours = estimate([a - b for a, b in pairs.values.values()])
    if not ours.n and pairs.otherwise_split:
        ours = difference(*(_values(board, row, column, metric) for column in (claim.column, claim.than)))
        notes = ["not paired: the two divide the data differently (Welch's test)"]
    if not math.isnan(paper) and abs(paper) < ROUNDING:
        word = NOT_CLAIMED
    elif not ours.n:
        word = _without(pairs)
    elif abs(ours.mean) < ROUNDING:
        word = EQUAL
    else:
        word = judged(ours, *((claim.low, claim.high) if sign > 0 else (-claim.high, -claim.low)))
    return Verdict(row, claim.column, claim.than, claim.text, metric, paper, ours, word, "; ".join(notes))


def _bounds(board: Board, claim: Claim, row: str, column: str) -> Verdict:
    metric = claim.metric or board.metric
    ours = estimate(_values(board, row, column, metric))
    text = f"{column} {claim.text}"
    word = judged(ours, claim.low, claim.high) if ours.n else MISSING
    paper = board.table.value(row, column, metric)
    return Verdict(row, column, "", text, metric, paper, ours, word, board.state(row, column))


def judged(ours: Estimate, low: float, high: float) -> str:
    """Whether the mean lies between the bounds, and whether its whole interval is on the same side."""
    inside = low <= ours.mean <= high
    if ours.n < 2:
        return AGREES_ONE if inside else CONTRADICTS_ONE
    if inside:
        return AGREES if low <= ours.low and ours.high <= high else AGREES_NOISE
    return CONTRADICTS if ours.high < low or ours.low > high else CONTRADICTS_NOISE


def _without(pairs: Together) -> str:
    return INCOMPARABLE if any("not the same partition" in note for note in pairs.notes) else MISSING


def _values(board: Board, row: str, column: str, metric: str) -> list[float]:
    values = (run.value(metric, board.pick) for run in board.runs(row, column))
    return [value for value in values if math.isfinite(value)]


def splits(board: Board) -> list[Split]:
    """Step size and direction, for each column that is another's control and each row that has all three."""
    plain_of: dict[str | None, str] = {}
    for claim in board.table.claims:
        if claim.than is not None:
            plain_of.setdefault(claim.column, claim.than)  # the first claim about a method is the one on the plain one
    result = []
    for control, method in board.table.controls.items():
        plain = plain_of.get(method)
        if plain is None:
            continue
        for row in board.rows:
            three = together(board, row, (plain, control, method), board.metric)
            p, c, m = zip(*three.values.values(), strict=True) if three.values else ((), (), ())
            gain, step, direction = (
                estimate([x - y for x, y in zip(*pair, strict=True)]) for pair in ((m, p), (c, p), (m, c))
            )
            result.append(Split(row, method, plain, control, gain, step, direction, "; ".join(three.notes)))
    return result


def failures(board: Board) -> Iterator[str]:
    """Why --check fails; at scale=smoke nothing is looked at."""
    if board.smoke:
        return
    for row in board.rows:
        for column in board.columns:
            rounds = board.rounds(row, column)
            if wrong := board.state(row, column):
                yield f"{row}, {column}: {wrong}" + (f" ({rounds} rounds)" if rounds != "-" else "")
    for verdict in verdicts(board):
        if not verdict.passes:
            ours = shown(verdict.ours.mean, verdict.metric, signed=bool(verdict.than))
            yield f"{verdict.row}: {verdict.claim}: {verdict.word} ({ours})"
    if board.scale == "full" and board.table.tolerance is not None:
        if board.table.numbers is None:
            yield "no published numbers to compare with"
        yield from _far(board, board.table.tolerance)


def states_something(board: Board) -> bool:
    """Whether a table that passes shows more than that its runs are finished."""
    cells = [(row, column, metric) for row in board.rows for column in board.columns for metric in board.table.metrics]
    valued = any(not math.isnan(board.table.value(*cell)) for cell in cells)
    return bool(board.table.claims) or (board.scale == "full" and board.table.tolerance is not None and valued)


def _far(board: Board, tolerance: float) -> Iterator[str]:
    for metric in board.table.metrics:
        for row in board.rows:
            for column in board.columns:
                paper, ours = board.table.value(row, column, metric), board.ours(row, column, metric)
                if ours.n and abs(ours.mean - paper) > tolerance:
                    by = shown(ours.mean - paper, metric, signed=True)
                    yield (
                        f"{row}, {column}: {metric} {shown(ours.mean, metric)}, the paper has {shown(paper, metric)}: "
                        f"{by}, tolerance {tolerance:g}"
                    )
