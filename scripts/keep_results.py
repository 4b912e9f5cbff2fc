"""Copy what a report needs from runs into docs/results: python scripts/keep_results.py OUTPUTS...

Configs, metrics and summaries, and who holds what where a table is about it; no pictures, checkpoints or layers. Where
the data lay on this machine is nobody's business, and decides nothing."""

import shutil
import sys
from pathlib import Path

import yaml

KEPT = Path(__file__).resolve().parents[1] / "docs" / "results"
FEW = 100
"""Clients whose table is small enough to keep."""


def keep(run: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    for section in (config, config["dataset"]):
        section |= {key: "" for key in ("data_dir", "cache_dir") if key in section}
    (to / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    for name in ("metrics.csv", "summary.json"):
        shutil.copyfile(run / name, to / name)
    clients = run / "clients.csv"
    if len(clients.read_text(encoding="utf-8").splitlines()) <= FEW:
        shutil.copyfile(clients, to / "clients.csv")


if __name__ == "__main__":
    for outputs in map(Path, sys.argv[1:]):
        for summary in sorted(outputs.rglob("summary.json")):
            keep(summary.parent, KEPT / summary.parent.relative_to(outputs))
