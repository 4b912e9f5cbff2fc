"""A paper's table at one scale with the runs that fill it, and pairs of them that may be compared."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsim.overrides import no_longer
from fedsim.reporting.experiment import PaperTable, paper_table
from fedsim.reporting.runs import Run
from fedsim.reporting.statistics import Estimate, estimate


@dataclass(frozen=True)
class Board:
    """Cells by row and column; a cell is the runs of one or several seeds."""

    table: PaperTable
    scale: str
    """full, short or smoke, and after it what was changed (`short, rounds=60`)."""
    pick: str
    cells: Mapping[tuple[str, str], Sequence[Run]]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys([*self.table.rows, *(row for row, _ in self.cells)]))

    @property
    def begun(self) -> list[str]:
        """Rows of which there is a run."""
        return [row for row in self.rows if any(self.runs(row, column) for column in self.columns)]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self.table.columns, *(column for _, column in self.cells)]))

    @property
    def name(self) -> str:
        return f"{self.table.experiment}, scale={self.scale}"

    @property
    def slug(self) -> str:
        return no_longer(slug(f"{self.table.experiment}_{self.scale}"))

    @property
    def smoke(self) -> bool:
        """Whether it only shows that the table runs."""
        return self.scale.startswith("smoke")

    @property
    def full(self) -> bool:
        """Whether it is the paper's own setting."""
        return self.scale == "full"

    @property
    def metric(self) -> str:
        """The one that claims are about."""
        return self.table.metrics[0]

    def runs(self, row: str, column: str) -> Sequence[Run]:
        return self.cells.get((row, column), ())

    def values(self, row: str, column: str, metric: str, pick: str | None = None) -> list[float]:
        """Of the seeds that are finished; where none is, of all, after the last round that all have."""
        runs = self.runs(row, column)
        finished = [run for run in runs if complete(run)]
        upto = None if finished else min((run.rounds for run in runs), default=None)
        values = (run.value(metric, pick or self.pick, upto) for run in finished or runs)
        return [value for value in values if math.isfinite(value)]

    def ours(self, row: str, column: str, metric: str, pick: str | None = None) -> Estimate:
        return estimate(self.values(row, column, metric, pick))

    def state(self, row: str, column: str) -> str:
        """What is wrong with a cell: missing, unfinished, diverged, of several settings ...; empty: nothing."""
        runs = self.runs(row, column)
        return ", ".join(filter(None, [state(runs), unlike(runs, self.table.taken.get(column))]))

    def rounds(self, row: str, column: str) -> str:
        return rounds(self.runs(row, column))


Place = tuple[str, str]
"""A cell's row and column."""


@dataclass(frozen=True)
class Together:
    """The values of several cells, seed by seed, and why seeds are not among them."""

    values: Mapping[int, tuple[float, ...]]
    notes: tuple[str, ...]
    otherwise_split: bool
    """The cells' settings divide the data otherwise: nothing to pair, on purpose."""


def together(board: Board, places: Sequence[Place], metric: str) -> Together:
    """Seeds that all cells have finished, on the same data and partition. Where no seed is finished, all are read off
    after the last round that all have."""
    names = [column if len({r for r, _ in places}) == 1 else f"{row}, {column}" for row, column in places]
    by_place = [{run.seed: run for run in board.runs(*place)} for place in places]
    why: dict[str, list[int]] = {}
    design = False
    found: dict[int, list[Run]] = {}
    for seed in sorted({s for runs in by_place for s in runs if s is not None}):
        absent = [name for name, runs in zip(names, by_place, strict=True) if seed not in runs]
        if absent:
            why.setdefault(f"no {', '.join(absent)}", []).append(seed)
            continue
        runs = [by_seed[seed] for by_seed in by_place]
        if len({run.data for run in runs}) == 1 and runs[0].data is not None:
            found[seed] = runs
            continue
        design = design or any(run.split != runs[0].split for run in runs)
        prints = ", ".join(sorted({str(run.about.get("partition_fingerprint")) for run in runs}))
        why.setdefault(f"not the same partition ({prints}), so not paired", []).append(seed)
    values = {}
    finished = {seed: runs for seed, runs in found.items() if all(complete(run) for run in runs)}
    upto = None if finished else min((run.rounds for runs in found.values() for run in runs), default=None)
    for seed, runs in found.items():
        status = ", ".join(f"{n} {r.status}" for n, r in zip(names, runs, strict=True) if not complete(r))
        if finished and seed not in finished:
            why.setdefault(f"left out, {status}", []).append(seed)
            continue
        if len({run.asked for run in runs}) > 1 and not finished:
            why.setdefault("not all are finished, and they go for different numbers of rounds", []).append(seed)
            continue
        row_values = tuple(run.value(metric, board.pick, upto) for run in runs)
        if not all(map(math.isfinite, row_values)):
            why.setdefault(f"no value ({status})", []).append(seed)
            continue
        if not finished:
            why.setdefault(f"after round {upto}, the last that all have", []).append(seed)
        values[seed] = row_values
    notes = (f"seed{'s' * (len(s) > 1)} {', '.join(map(str, s))}: {reason}" for reason, s in why.items())
    return Together(values, tuple(notes), design)


def boards(runs: Iterable[Run], pick: str) -> list[Board]:
    """One for each experiment and scale among the runs."""
    found: dict[tuple[str, str], dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        if "experiment" in run.about:
            cells = found.setdefault((run.about["experiment"], run.about["scale"]), {})
            runs_of_cell = cells.setdefault((run.about["row"], run.about["column"]), [])
            if run.status != "preview":
                runs_of_cell.append(run)
    tables = {experiment: paper_table(experiment) for experiment, _ in found}
    return [Board(tables[name], scale, pick, cells) for (name, scale), cells in sorted(found.items())]


def state(runs: Sequence[Run]) -> str:
    """What is wrong with runs that belong together."""
    if not runs:
        return "missing"
    wrong = Counter(run.status if run.status != "finished" else "unfinished" for run in runs if not complete(run))
    return ", ".join(status if n == len(runs) else f"{n} of {len(runs)} {status}" for status, n in wrong.items())


def unlike(runs: Sequence[Run], by_design: str | None) -> str:
    """Settings in which the seeds of one cell differ; only what is taken from a paired run may."""
    found = []
    for key in sorted({key for run in runs for key in run.settings if key != by_design}):
        # A key that some do not have is younger than they are.
        values = list(dict.fromkeys(str(run.settings[key]) for run in runs if key in run.settings))
        found += [f"{key} {', '.join(values)}"] if len(values) > 1 else []
    return f"of different settings ({'; '.join(found)})" if found else ""


def complete(run: Run) -> bool:
    return run.status == "finished" and run.rounds >= run.asked


def rounds(runs: Sequence[Run]) -> str:
    """Done/asked; a range where seeds got to different rounds."""
    if not runs:
        return "-"
    done, asked = sorted({run.rounds for run in runs}), sorted({run.asked for run in runs})
    low_high = (f"{v[0]}" if len(v) == 1 else f"{v[0]}-{v[-1]}" for v in (done, asked))
    return "/".join(low_high)


def slug(name: str) -> str:
    """A name for files, that every system and LaTeX takes."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in name)
