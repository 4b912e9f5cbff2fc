"""A figure as numbers, whoever draws it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """A line; `low` and `high` are its band, where there is one."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    colour: int = 0
    """Lines of one method have the same colour."""
    style: str = "line"
    """line | paper (dashed: a published value) | second (dotted: a second quantity of the same method)"""


@dataclass(frozen=True)
class Panel:
    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Chart:
    name: str
    """Of its file."""
    title: str
    x: str
    y: str
    panels: tuple[Panel, ...]
    log: str = ""
    """Axes that are logarithmic: x, y or xy."""
    ticks: tuple[str, ...] = ()
    """What x = 0, 1, 2 ... stand for, where they are no numbers."""
    across: int = 3
    """Panels beside each other."""
    heat: bool = False
    """Panels are grids: a series is a row, its y are the colours."""
