"""From folders to a report, and from a report to files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedsim import check, results
from fedsim.reporting import draw, ordinary, sections, tables
from fedsim.reporting.board import Board, boards
from fedsim.reporting.document import Document, Section, sheet
from fedsim.reporting.html import html
from fedsim.reporting.latex import latex
from fedsim.reporting.markdown import markdown
from fedsim.reporting.runs import all_runs
from fedsim.reporting.verdicts import LEGEND
from fedsim.results import Results


@dataclass(frozen=True)
class Report:
    document: Document
    boards: Sequence[Board]
    found: Results

    @property
    def tables(self) -> Document:
        """The papers' tables alone, without what a reader of many wants beside them."""
        names = [board.name for board in self.boards]
        return replace(self.document, sections=tuple(s for s in self.document.sections if s.title in names))


def read(folders: Sequence[str], pick: str) -> Report:
    """Everything that can be said of the runs in these folders."""
    found = results.load(*folders, layers=False)
    runs = all_runs(found)
    filled = boards(runs, pick)
    others = [run for run in runs if "experiment" not in run.about]
    parts = [sections.section(board) for board in filled] + ordinary.sections(others)
    if filled:
        legend = sheet("What the words mean", ("verdict", "meaning"), [[word, text] for word, text in LEGEND.items()])
        parts = [
            Section("Overview", (), (sections.overview(filled),), ()),
            *parts,
            Section("Legend", (), (legend,), ()),
        ]
    lines = (f"{len(runs)} runs; accuracy of a run: {pick.replace('_', ' ')}.", *found.damaged, *found.notes)
    return Report(Document("fedsim report", lines, tuple(parts)), filled, found)


def write(report: Report, out: Path) -> list[str]:
    """All formats; the names of the files, pictures counted."""
    charts = [chart for section in report.document.sections for chart in section.charts]
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_text(html(report.document), encoding="utf-8")
        (out / "report.md").write_text(markdown(report.document), encoding="utf-8")
        (out / "report.tex").write_text(latex(report.document), encoding="utf-8")
        report.found.runs.to_csv(out / "runs.csv", index=False)
        csv = tables.write(report.boards, out)
        for chart in charts:
            draw.png(chart, out / f"{chart.name}.png")
    except OSError as error:
        raise check.InputError(
            f"{out} cannot be written to: {error.strerror or error}; choose another --out"
        ) from error
    names = [
        "report.html",
        "report.md",
        "report.tex",
        "runs.csv",
        *(["verdicts.csv", f"{len(csv) - 1} table_*.csv"] if csv else []),
    ]
    return [*names, f"{len(charts)} PNG"] if charts else names
