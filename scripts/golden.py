"""Write the golden curves in tests/golden from the commands listed there, with the machine they came from."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch
import yaml

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""The instructions that curves are made with, so that a processor gives the same bits whatever else it offers."""


def machine() -> dict[str, str]:
    """What decides the last bits of a float32 result: the processor and the library build."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    first = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    wide = ["avx2"] if "avx2" in first.get("flags", "").split() else []
    kind = [first.get(key, "") for key in ("model name", "cpu family", "model", "stepping", "cache size")]
    return {"cpu": " / ".join([platform.machine(), *kind, *wide]), "torch": torch.__version__}


def curve(arguments: list[str]) -> pd.DataFrame:
    """metrics.csv of a fresh run, as text, without the column that no two runs share."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedsim", *arguments, "engine=sequential", "device=cpu"]
        subprocess.run(command, cwd=folder, env=os.environ | AVX2, check=True)
        (file,) = Path(folder).glob("outputs/*/metrics.csv")
        return pd.read_csv(file, dtype=str, keep_default_na=False).drop(columns="time/round_s")


if __name__ == "__main__":
    for name, arguments in yaml.safe_load((GOLDEN / "commands.yaml").read_text()).items():
        curve(arguments).to_csv(GOLDEN / f"{name}.csv", index=False)
    (GOLDEN / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")
