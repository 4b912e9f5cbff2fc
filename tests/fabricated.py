"""Run folders and paper's tables written by hand: what `fedsim` leaves behind, without the training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedsim.metrics import METRICS

TABLE: dict[str, Any] = {
    "paper": "made_up",
    "table": "table3",
    "metrics": ["test accuracy"],
    "seeds": [0, 1, 2],
    "rows": {"MNIST": ["dataset=mnist"]},
    "columns": {"naive": ["aggregator=fedavg"], "elastic": ["aggregator=elastic"]},
    "claims": [{"better": "elastic", "than": "naive"}],
    "tolerance": 3.0,
    "figures": ["curves"],
}
PAPER = "table,row,column,metric,value,unit,where,assumed\n"


def run(
    folder: Path,
    accuracy: float | Sequence[float],
    *,
    seed: int = 0,
    cell: tuple[str, str] | None = None,
    experiment: str = "made/table3",
    scale: str = "full",
    rounds: int = 4,
    asked: int | None = None,
    status: str = "finished",
    fingerprint: str | None = None,
    config: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
    parameters: int = 100,
    choices: Mapping[str, str] | None = None,
    data: str = "images",
) -> Path:
    """A run whose accuracy rises to a value over its rounds, or has the given one in each round."""
    folder.mkdir(parents=True)
    curve = np.linspace(accuracy / 2, accuracy, rounds) if isinstance(accuracy, float) else np.array(accuracy)
    metrics = pd.DataFrame({"round": range(1, len(curve) + 1), "test/accuracy": curve, "test/loss": 1 - curve})
    metrics = metrics.assign(**(columns or {})).reindex(columns=list(METRICS))
    metrics.to_csv(folder / "metrics.csv", index=False)
    pd.DataFrame({"client": [0, 1], "samples": [5, 5], "classes": [1, 2], "emd": [0.4, 0.8]}).to_csv(
        folder / "clients.csv", index=False
    )
    known = {"seed": seed, "rounds": asked or len(curve), "partition": {"alpha": 0.5}, **(config or {})}
    (folder / "config.yaml").write_text(yaml.safe_dump(known))
    summary = {
        "status": status,
        "rounds": len(curve),
        "seed": seed,
        "name": folder.name,
        "choices": {"experiment": None, "dataset": "synthetic", **(choices or {})},
        "partition_fingerprint": fingerprint or f"print{seed}",
        "partition": {"fingerprint": fingerprint or f"print{seed}", "data": data},
        "parameters": parameters,
        "wall_time_s": 1.0,
    }
    if cell:
        summary["table"] = {"experiment": experiment, "row": cell[0], "column": cell[1], "scale": scale}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def cells(root: Path, values: Mapping[tuple[str, str], Sequence[float]], **options: Any) -> Path:
    """A run for each row, column and seed: {(row, column): [accuracy of seed 0, of seed 1 ...]}."""
    for (row, column), accuracies in values.items():
        for seed, accuracy in enumerate(accuracies):
            name = f"row={row},column={column},seed={seed}".replace(" ", "-")
            run(root / name, accuracy, seed=seed, cell=(row, column), **options)
    return root
