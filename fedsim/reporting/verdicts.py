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
EQUAL, MISSING, INCOMPARABLE, DIVERGED = "equal", "missing", "not comparable", "diverged"
NOT_CLAIMED, NOT_YET = "not claimed", "not at this scale"

LEGEND = {
    AGREES: "ours has the paper's direction (or lies within the claim's bounds), and so does the whole 95 % interval",
    AGREES_NOISE: "the mean does, the 95 % interval also has the opposite: more seeds would tell",
    AGREES_ONE: "it does for the one seed there is; no interval",
    CONTRADICTS: "ours has the other direction (or lies outside the bounds), and so does the whole 95 % interval",
    CONTRADICTS_NOISE: "the mean has the other direction, the 95 % interval also has the paper's",
    CONTRADICTS_ONE: "it has the other direction for the one seed there is; no interval",
    EQUAL: "no difference at all, where the paper has one",
    MISSING: "no seed has all the runs that are needed",
    DIVERGED: "a run of one of the two diverged; those that did not are no fair sample",
    INCOMPARABLE: "the runs have the same settings but not the same partition: their data were not the same",
    NOT_CLAIMED: "the paper's own values are equal here",
    NOT_YET: "a value after all of the paper's rounds, in its setting: not to be expected of this table",
}
PASSES = (AGREES, AGREES_NOISE, AGREES_ONE, NOT_CLAIMED, NOT_YET)

OF_ALL_ROUNDS = ("test accuracy", "train accuracy", "personal accuracy", "loss")
"""Metrics that depend on how many rounds there were."""
GROUPS = ("aggregator", "server_optimizer", "client", "client_optimizer", "schedule")


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
    """What a method gains over the plain one, how much of it the plain one gains with nothing but a number of the
    method's (its mean step length, say) as its rate, and what the method has beyond that."""

    row: str
    metric: str
    method: str
    plain: str
    control: str
    gain: Estimate
    shared: Estimate
    own: Estimate
    unlike: tuple[str, ...]
    """In what else than its rate the control differs from the plain method."""
    notes: tuple[str, ...]

    @property
    def note(self) -> str:
        return "; ".join((*self.unlike, *self.notes))

    @property
    def share(self) -> float:
        """Of the gain that the rate alone has; NaN where the gain is not surely one, or not the rate's alone."""
        sure = self.gain.n > 1 and (self.gain.low > 0 or self.gain.high < 0)
        return self.shared.mean / self.gain.mean if sure and not self.unlike else math.nan


def verdicts(board: Board) -> list[Verdict]:
    """Every claim in every row that it is about and that was begun. At scale=smoke there is nothing to judge."""
    judge = (_bounds, _direction)
    return [
        judge[claim.compares](board, claim, row)
        for claim in board.table.claims
        for row in (board.rows if claim.row is None else [claim.row])
        if row in board.begun and not board.smoke
    ]


def _direction(board: Board, claim: Claim, row: str) -> Verdict:
    """By the sign that the paper's own values have here, where it gives both; else by the claim's."""
    metric, column = claim.metric or board.metric, claim.columns[0]
    places = (row, column), (claim.than_row or row, claim.than or column)
    one, other = (board.table.value(*place, metric) for place in places)
    paper, sign = one - other, -1 if metric in LOWER_IS_BETTER and not claim.larger else 1
    notes = []
    if not math.isnan(paper) and paper * sign < 0:
        sign = -sign
        notes.append("the paper's values have the other sign here")
    pairs = together(board, places, metric)
    notes += pairs.notes
    ours = estimate([a - b for a, b in pairs.values.values()])
    if not ours.n and pairs.otherwise_split:
        ours = difference(*(board.values(*place, metric) for place in places))
        notes = ["not paired: the two divide the data differently" + (" (Welch's test)" if ours.n > 1 else "")]
        notes += [f"{column}: {state}" for r, column in places if (state := board.state(r, column))]
    if any(run.status == "diverged" for place in places for run in board.runs(*place)):
        word = DIVERGED
    elif not math.isnan(paper) and abs(paper) < ROUNDING:
        word = NOT_CLAIMED
    elif not ours.n:
        word = MISSING if pairs.otherwise_split else _without(pairs)
    elif abs(ours.mean) < ROUNDING and not ours.sd > 0:
        word = EQUAL
    else:
        word = judged(ours, *((claim.low, claim.high) if sign > 0 else (-claim.high, -claim.low)))
    return Verdict(row, column, claim.than or column, claim.text, metric, paper, ours, word, "; ".join(notes))


def _bounds(board: Board, claim: Claim, row: str) -> Verdict:
    metric = claim.metric or board.metric
    sign = -1 if metric in LOWER_IS_BETTER else 1
    found = {column: board.ours(row, column, metric) for column in claim.columns}
    column = max(claim.columns, key=lambda c: sign * found[c].mean if found[c].n else -math.inf)
    ours, notes = found[column], [board.state(row, c) and f"{c}: {board.state(row, c)}" for c in claim.columns]
    if len(claim.columns) > 1 and ours.n:
        notes.insert(0, column)
    word = judged(ours, claim.low, claim.high) if ours.n else MISSING
    if ours.n and not board.full and metric in OF_ALL_ROUNDS:
        word = NOT_YET
    paper = board.table.value(row, column, metric)
    return Verdict(row, column, "", claim.text, metric, paper, ours, word, "; ".join(filter(None, notes)))


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


def splits(board: Board) -> list[Split]:
    """For each column that is another's control and each row that has all three."""
    result = []
    for control, method in board.table.controls.items():
        for row in board.begun:
            claim = _gain(board, method, row)
            if claim is None or claim.than is None or board.smoke:
                continue
            metric, plain = claim.metric or board.metric, claim.than
            three = together(board, [(row, column) for column in (plain, control, method)], metric)
            p, c, m = zip(*three.values.values(), strict=True) if three.values else ((), (), ())
            gain, shared, own = (
                estimate([x - y for x, y in zip(*pair, strict=True)]) for pair in ((m, p), (c, p), (m, c))
            )
            unlike = _unlike(board, row, plain, control)
            result.append(Split(row, metric, method, plain, control, gain, shared, own, unlike, three.notes))
    return result


def _gain(board: Board, method: str, row: str) -> Claim | None:
    """The first claim about a method is the one on the plain one."""
    about = (c for c in board.table.claims if c.than and c.columns == (method,) and c.row in (None, row))
    return next(about, None)


def _unlike(board: Board, row: str, plain: str, control: str) -> tuple[str, ...]:
    """A control is the plain method with another server rate; where it is more than that, in what."""
    one, other = (board.runs(row, column)[:1] for column in (plain, control))
    if not one or not other:
        return ()
    groups = [k for k in GROUPS if one[0].about.get(k) != other[0].about.get(k)]
    return tuple(f"{control} also has {k}={other[0].about.get(k)}, {plain} {k}={one[0].about.get(k)}" for k in groups)


def failures(board: Board) -> Iterator[str]:
    """Why --check fails; at scale=smoke nothing is looked at, and rows that nobody has begun are not."""
    if board.smoke:
        return
    if not board.table.readable:
        yield "its file cannot be read, so nothing it claims could be checked"
    for row in board.begun:
        for column in board.columns:
            rounds = board.rounds(row, column)
            if wrong := board.state(row, column):
                yield f"{row}, {column}: {wrong}" + (f" ({rounds} rounds)" if rounds != "-" else "")
    for verdict in verdicts(board):
        if not verdict.passes:
            ours = shown(verdict.ours.mean, verdict.metric, signed=bool(verdict.than))
            yield f"{verdict.row}: {verdict.claim}: {verdict.word} ({ours})"
    if board.full and board.table.tolerance is not None:
        if board.table.numbers is None:
            yield "no published numbers to compare with"
        yield from _far(board, board.table.tolerance)


def states_something(board: Board) -> bool:
    """Whether a table that passes shows more than that its runs are finished."""
    cells = [(row, column, metric) for row in board.rows for column in board.columns for metric in board.table.metrics]
    valued = any(not math.isnan(board.table.value(*cell)) for cell in cells)
    return bool(board.table.claims) or (board.full and board.table.tolerance is not None and valued)


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
