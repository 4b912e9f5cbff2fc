"""Golden curves: results that must not change by accident.

On the machine and torch build that made them (tests/golden/machine.json) they must be reproduced bit for bit. Elsewhere
the last bits differ: forcing that machine to SSE instructions moved them by at most 5e-7 (relative), and batch norm's
by 1.3e-3, since it divides by small variances. The bounds below leave room above that, far below any real change.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from golden import GOLDEN, curve, machine

ELSEWHERE = {"batch_norm": 2e-2}
COMMANDS = yaml.safe_load((GOLDEN / "commands.yaml").read_text())


@pytest.mark.parametrize("name", COMMANDS)
def test_golden_curve(name: str) -> None:
    expected = pd.read_csv(GOLDEN / f"{name}.csv", dtype=str, keep_default_na=False)
    found = curve(COMMANDS[name])
    if machine() == json.loads((GOLDEN / "machine.json").read_text()):
        pd.testing.assert_frame_equal(found, expected)
        return
    assert list(found.columns) == list(expected.columns)
    for column in expected:
        a, b = (pd.to_numeric(t[column]).to_numpy() for t in (found, expected))
        samples = 0.003 if "accuracy" in column else 0.0  # three of a thousand test images on the fence
        np.testing.assert_allclose(a, b, rtol=ELSEWHERE.get(name, 1e-4), atol=samples, err_msg=column)
