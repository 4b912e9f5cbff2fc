"""Where a run's numbers go. The run folder's CSV files are always among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedsim.runner import LayerRows, Row


@dataclass(frozen=True)
class RunInfo:
    """What a logger may want to know of a run."""

    folder: Path
    name: str
    id: str
    """Random, kept in the folder: the same when the run is continued, another when it is started again."""
    config: Mapping[str, Any]
    rounds: int
    start: int
    """Rounds already done when this process took over."""


class Logger(Protocol):
    def open(self, run: RunInfo) -> None: ...
    def log(self, row: Row, layers: LayerRows) -> None: ...
    def close(self) -> None: ...
