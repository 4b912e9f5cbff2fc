"""A run's process is asked to end: nothing that was computed is lost."""

import json
import os
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import small

from fedsim.folder import RunFolder
from fedsim.logger.base import RunInfo
from fedsim.runner import LayerRows, Row
from fedsim.session import Request, Session, terminable

CONFIG = {"checkpoint": {"every": 100}}


class Ending:
    """Asks for the end while a round is told, before it stands in metrics.csv."""

    def __init__(self, at: int, times: int) -> None:
        self._at, self._times = at, times

    def open(self, run: RunInfo) -> None: ...

    def log(self, row: Row, layers: LayerRows) -> None:
        for _ in range(self._times if row["round"] == self._at else 0):
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None: ...


@pytest.mark.parametrize(("times", "told"), [(1, 3), (2, 2)], ids=["asked once", "at once"])
def test_a_round_that_is_half_told_is_told(times: int, told: int, tmp_path: Path) -> None:
    request = Request(tmp_path, "", CONFIG, {"partition": "iid"}, [], torch.device("cpu"))
    exp = small("engine=sequential", "rounds=9")
    with RunFolder(tmp_path) as folder, terminable() as signals:
        summary = Session(request, folder, exp, [Ending(3, times)], signals).play()
    assert (summary["status"], summary["signal"], summary["rounds"]) == ("interrupted", "SIGTERM", told)
    assert list(pd.read_csv(tmp_path / "metrics.csv")["round"]) == list(range(1, told + 1))
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == told
