"""What one sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

from statistics import fmean

from rich.console import Console as Terminal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedsim.logger.base import RunInfo
from fedsim.runner import LayerRows, Row

PLAIN_LINES = 20  # about so many for a whole run


class Console:
    def __init__(self) -> None:
        self._terminal = Terminal(stderr=True)
        self._progress: Progress | None = None

    def open(self, run: RunInfo) -> None:
        self._rounds = run.rounds
        # Of the rounds since the last line: one with an evaluation in it says little of the others.
        self._seconds: list[float] = []
        self._accuracy: float | None = None
        self._personal: float | None = None
        again = f", going on after round {run.start}" if run.start else ""
        self._terminal.print(f"{run.name}: {run.rounds} rounds{again}", markup=False, soft_wrap=True)
        if not self._terminal.is_terminal:
            return
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._terminal,
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=run.rounds, completed=run.start, shown="")

    def log(self, row: Row, layers: LayerRows) -> None:
        shown = self._describe(row)
        if self._progress is not None:
            self._progress.update(self._task, completed=row["round"], shown=shown)
            return
        self._seconds.append(row["time/round_s"])
        step = max(1, self._rounds // PLAIN_LINES)
        if row["round"] % step == 0 or row["round"] == self._rounds:
            plain = f"round {row['round']:.0f}/{self._rounds}  {shown}  {fmean(self._seconds):.3g} s/round"
            self._terminal.print(plain, markup=False, highlight=False, soft_wrap=True)
            self._seconds.clear()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _describe(self, row: Row) -> str:
        self._accuracy = row.get("test/accuracy", self._accuracy)
        self._personal = row.get("personal/accuracy_after", self._personal)
        parts = [f"accuracy {100 * self._accuracy:.1f} %"] if self._accuracy is not None else []
        if self._personal is not None:
            parts.append(f"personal {100 * self._personal:.1f} %")
        parts.append(f"loss {row['client/loss']:.3f}" if "client/loss" in row else "void: too few answered")
        if "norm/N_over_E" in row:
            parts.append(f"N/E {row['norm/N_over_E']:.2f}")
        if "elastic/boosted_fraction" in row:
            parts.append(f"boosted {100 * row['elastic/boosted_fraction']:.0f} %")
        if "privacy/epsilon" in row:
            parts.append(f"epsilon {row['privacy/epsilon']:.1f}")
        return "  ".join(parts)
