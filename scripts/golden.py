"""Write the golden curves in tests/golden from the commands listed there, with the machine they came from."""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch
import yaml

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"


def machine() -> dict[str, str]:
    """What decides the last bits of a float32 result: the processor and the library build."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    first = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in first.get("flags", "").split()]
    kind = [first.get(key, "") for key in ("model name", "cpu family", "model", "stepping", "cache size")]
    return {"cpu": " / ".join([platform.machine(), *kind, *wide]), "torch": torch.__version__}


def curve(arguments: list[str]) -> pd.DataFrame:
    """metrics.csv of a fresh run, as text, without the column that no two runs share."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "fedsim", *arguments, "engine=sequential", "device=cpu"], cwd=folder, check=True
        )
        (file,) = Path(folder).glob("outputs/*/metrics.csv")
        return pd.read_csv(file, dtype=str, keep_default_na=False).drop(columns="time/round_s")


if __name__ == "__main__":
    for name, arguments in yaml.safe_load((GOLDEN / "commands.yaml").read_text()).items():
        curve(arguments).to_csv(GOLDEN / f"{name}.csv", index=False)
    (GOLDEN / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")
