"""One suite over every client rule x aggregator x server optimizer x client optimizer. A new method costs one row."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import play, small

from fedsim import checkpoint
from fedsim.runner import RunState, initial_state

CLIENTS = ["sgd", "fedprox"]
AGGREGATORS = ["fedavg", "elastic", "norm_norm", "momentum", "fednnnn"]
SERVER_OPTIMIZERS = ["sgd", "fedavgm"]
CLIENT_OPTIMIZERS = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam"]

EVERY_COMBINATION = [
    (f"client={c}", f"aggregator={a}", f"server_optimizer={s}", f"client_optimizer={o}")
    for c in CLIENTS
    for a in AGGREGATORS
    for s in SERVER_OPTIMIZERS
    for o in CLIENT_OPTIMIZERS
]


def tensors(state: RunState) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def walk(prefix: str, node: object) -> None:
        if isinstance(node, torch.Tensor):
            found[prefix] = node
        elif isinstance(node, dict):
            for key, value in node.items():
                walk(f"{prefix}/{key}", value)

    for name in ("aggregator", "server", "clients"):
        walk(name, getattr(state, name))
    walk("params", state.model.params)
    walk("buffers", state.model.buffers)
    return found


@pytest.mark.parametrize("methods", EVERY_COMBINATION, ids=lambda m: " ".join(o.partition("=")[2] for o in m))
def test_runs_is_pure_learns_and_resumes_exactly(methods: tuple[str, ...], tmp_path: Path) -> None:
    shared = ("client_optimizer.persist_state=true", "client_optimizer.lr=0.05", "participation.clients_per_round=5")
    exp = small(*methods, *shared, "rounds=4")
    start = initial_state(exp)
    before = {name: t.clone() for name, t in tensors(start).items()}
    whole, rows = play(exp, start)
    for name, t in tensors(start).items():
        assert torch.equal(t, before[name]), f"{name} was changed in place"
    assert all(math.isfinite(row["client/loss"]) for row in rows)
    data = exp.data.dataset
    untrained = exp.task.evaluate(start.model, data, data.test_x, data.test_y, batch_size=100)
    assert rows[-1]["test/loss"] < untrained.loss_sum / untrained.count

    half, first_rows = play(replace(exp, rounds=2))
    checkpoint.save(tmp_path / "checkpoint.pt", half, elapsed_s=1.0)
    torch.manual_seed(hash(methods) % 1000)
    restored, _ = checkpoint.load(tmp_path / "checkpoint.pt", torch.device("cpu"))
    resumed, last_rows = play(exp, restored)
    assert tensors(resumed).keys() == tensors(whole).keys()
    for name, t in tensors(whole).items():
        assert torch.equal(t, tensors(resumed)[name]), name
    timeless = [{k: v for k, v in row.items() if k != "time/round_s"} for row in rows]
    assert [{k: v for k, v in row.items() if k != "time/round_s"} for row in first_rows + last_rows] == timeless


def test_the_table_lists_every_choice() -> None:
    from fedsim.overrides import CONF

    def choices(group: str) -> set[str]:
        return {p.stem for p in (CONF / group).glob("*.yaml")}

    assert choices("client") == set(CLIENTS)
    assert choices("aggregator") == set(AGGREGATORS)
    assert choices("server_optimizer") == set(SERVER_OPTIMIZERS)
    assert choices("client_optimizer") == set(CLIENT_OPTIMIZERS)
