"""Runs and sweeps that belong to no paper's table: what they differ in, and what they gave."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.folder import VOLATILE, VOLATILE_KEYS
from fedsim.reporting.board import rounds, slug, state
from fedsim.reporting.document import WEAK, Cell, Section, sheet
from fedsim.reporting.figures import run_curves
from fedsim.reporting.runs import PICKS, Run, shown
from fedsim.reporting.statistics import estimate

MOST_LINES = 12
"""Of a figure; more cannot be told apart."""

OWN = (
    *("run", "status", "rounds", "seed", "id", "name", "device", "wall_time_s", "comm_bytes"),
    *("partition_fingerprint", "data_fingerprint"),
)
"""What runs with the same settings differ in."""


def sections(runs: Sequence[Run]) -> list[Section]:
    """One for each folder that holds runs: a sweep, or the place of all single runs."""
    found: dict[Path, list[Run]] = {}
    for run in runs:
        found.setdefault(Path(run.about["run"]).parent, []).append(run)
    return [_section(name, _once(found[folder])) for folder, name in names(list(found)).items()]


def names(folders: Sequence[Path]) -> dict[Path, str]:
    """As much of each path as tells it from the others."""
    whole = {folder: folder.resolve() for folder in folders}
    result = {}
    for folder, path in whole.items():
        others = [p for f, p in whole.items() if f != folder]
        depth = next((d for d in range(1, len(path.parts)) if all(p.parts[-d:] != path.parts[-d:] for p in others)), 0)
        result[folder] = "/".join(path.parts[-depth:]) or str(path)
    return result


def _once(runs: Sequence[Run]) -> list[Run]:
    """A copy of a run is no second seed; the one that got further counts."""
    best: dict[Any, Run] = {}
    for run in runs:
        settings = {k: _shown(v) for k, v in run.about.items() if _setting(k)}
        key = json.dumps([run.seed, settings], sort_keys=True)
        if key not in best or run.rounds > best[key].rounds:
            best[key] = run
    return list(best.values())


def _section(name: str, runs: Sequence[Run]) -> Section:
    keys = differing(runs)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        labels = tuple(_shown(run.about.get(key)) for key in keys) or (Path(run.about["run"]).name,)
        groups.setdefault(labels, []).append(run)
    rows: list[list[str | Cell]] = []
    for labels, pooled in groups.items():
        picks = [_over_seeds(pooled, "test accuracy", pick) for pick in PICKS]
        others = [_over_seeds(pooled, metric) for metric in ("personal accuracy", "loss")]
        wrong = state(pooled)
        seeds = ", ".join(str(run.seed) for run in pooled)
        rows.append([*labels, *picks, *others, seeds, rounds(pooled), Cell(wrong or "finished", WEAK if wrong else "")])
    picked = (f"accuracy, {pick.replace('_', ' ')}" for pick in PICKS)
    header = (*(keys or ["run"]), *picked, "personal", "loss", "seeds", "rounds", "state")
    note = "Accuracies in %; mean ± standard deviation over seeds. Rows are the settings in which the runs differ."
    number = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    lines = [f"{number} below {name}; no paper's table has them, so nothing is judged."]
    shown_groups = {", ".join(labels): pooled for labels, pooled in list(groups.items())[:MOST_LINES]}
    if len(groups) > MOST_LINES:
        lines.append(f"The figure has the first {MOST_LINES} of {len(groups)}.")
    file = f"{slug(f'runs_{name}')[:80]}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    chart = run_curves(file, name, shown_groups)
    charts = (chart,) if chart.panels[0].series else ()
    return Section(f"Runs in {name}", tuple(lines), (sheet("Runs", header, rows, note),), charts)


def differing(runs: Sequence[Run]) -> list[str]:
    """Settings that two runs both have and do not share. A key that only one method has says no more than its name."""
    keys = dict.fromkeys(key for run in runs for key in run.about)
    return [
        key for key in keys if _setting(key) and len({_shown(run.about[key]) for run in runs if key in run.about}) > 1
    ]


def _setting(key: str) -> bool:
    """Not a result, not where it ran, not the class behind a choice's name."""
    if key in OWN or key.endswith(("_target_", "_dir", ".seed")) or key in VOLATILE_KEYS:
        return False
    result = "_accuracy_" in key or key.startswith(("time_", "test_", "privacy_", "sent_", "personal_"))
    return not result and (key.partition(".")[0] not in VOLATILE) and key != "parameters"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value, default=str)


def _over_seeds(runs: Sequence[Run], metric: str, pick: str = "last") -> str:
    ours = estimate([value for run in runs if not math.isnan(value := run.value(metric, pick))])
    return shown(ours.mean, metric) + (f" ± {shown(ours.sd, metric)}" if ours.n > 1 else "")
