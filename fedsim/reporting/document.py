"""The report before it has a format: sections of sheets, charts and notes."""

from dataclasses import dataclass

from fedsim.reporting.charts import Chart

GOOD, WEAK, BAD, FAINT = "good", "weak", "bad", "faint"


@dataclass(frozen=True)
class Cell:
    """Text, of several lines perhaps (the first is the one that matters), and its colour."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Sheet:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    detail: bool = False
    """For whoever looks closer: folded on the page, not printed, not in LaTeX."""


@dataclass(frozen=True)
class Section:
    title: str
    lines: tuple[str, ...]
    sheets: tuple[Sheet, ...]
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Document:
    title: str
    lines: tuple[str, ...]
    sections: tuple[Section, ...]


def sheet(
    title: str, header: tuple[str, ...], rows: list[list[str | Cell]], note: str = "", detail: bool = False
) -> Sheet:
    """Plain text becomes cells."""
    cells = tuple(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)
    return Sheet(title, header, cells, note, detail)
