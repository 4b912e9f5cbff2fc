"""One suite over every client rule x aggregator x server optimizer x client optimizer. A new method costs one row."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import experiment, play, small

from fedsim import check, checkpoint
from fedsim.runner import RunState, initial_state

CLIENTS = ["sgd", "fedprox", "fedsgd", "scaffold", "perfedavg", "pfedme", "loadaboost", "local"]
AGGREGATORS = ["fedavg", "elastic", "norm_norm", "momentum", "fednnnn", "pfnm", "fedasync"]
SERVER_OPTIMIZERS = ["sgd", "fedavgm", "fedadagrad", "fedadam", "fedyogi"]
CLIENT_OPTIMIZERS = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam"]
PARTICIPATIONS = ["uniform", "async"]
PRIVACIES = ["none", "gaussian", "masked"]

NEEDS = {
    "client=loadaboost": ("client.epochs=2",),
    "client=perfedavg": ("client.variant=hessian_free",),
    "privacy=gaussian": ("aggregator.weighting=uniform", "privacy.clip=10", "privacy.noise_multiplier=0.01"),
}
REFUSED = [
    ("aggregator=pfnm", "participation=async"),
    ("aggregator=pfnm", "privacy=gaussian"),
    ("aggregator=pfnm", "privacy=masked"),
    ("client=loadaboost", "privacy=gaussian"),
    ("client=loadaboost", "privacy=masked"),
    ("participation=async", "privacy=masked"),
    ("client=local", "privacy=gaussian"),
    ("client=local", "privacy=masked"),
]

EVERY_COMBINATION = [
    *product(
        (f"client={c}" for c in CLIENTS),
        (f"aggregator={a}" for a in AGGREGATORS),
        (f"server_optimizer={s}" for s in SERVER_OPTIMIZERS),
    ),
    *product((f"client={c}" for c in CLIENTS), (f"client_optimizer={o}" for o in CLIENT_OPTIMIZERS)),
    *product(
        (f"client={c}" for c in CLIENTS),
        (f"aggregator={a}" for a in AGGREGATORS),
        ("participation=async", "privacy=gaussian", "privacy=masked"),
    ),
    ("shared_data=global", "client=scaffold"),
    ("participation.dropout=0.4", "participation.stragglers=0.5", "client=scaffold", "privacy=masked"),
    ("aggregator=pfnm", "aggregator.tau=0.5", "client=scaffold", "server_optimizer=fedyogi"),
    ("aggregator=pfnm", "aggregator.sigma2=0.001", "client=scaffold", "server_optimizer=fedadam"),
]
ACCEPTED = [m for m in EVERY_COMBINATION if not any(set(pair) <= set(m) for pair in REFUSED)]


def tensors(state: RunState) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def walk(prefix: str, node: object) -> None:
        if isinstance(node, torch.Tensor):
            found[prefix] = node
        elif isinstance(node, Mapping):
            for key, value in node.items():
                walk(f"{prefix}/{key}", value)

    for name in ("aggregator", "server", "rule", "clients"):
        walk(name, getattr(state, name))
    walk("params", state.model.params)
    walk("buffers", state.model.buffers)
    return found


@pytest.mark.parametrize("methods", ACCEPTED, ids=" ".join)
def test_runs_is_pure_learns_and_resumes_exactly(methods: tuple[str, ...], tmp_path: Path) -> None:
    shared = ["model=mlp", "model.hidden=[8]", "client_optimizer.persist_state=true", "client_optimizer.lr=0.05"]
    shared += ["participation.clients_per_round=5", *(o for m in methods for o in NEEDS.get(m, ()))]
    if "client=scaffold" in methods and any(f"client_optimizer={o}" in methods for o in CLIENT_OPTIMIZERS[1:]):
        shared.append("client.option=1")  # option 2 is for plain SGD
    exp = small(*methods, *shared, "rounds=4", "eval.personal_clients=2")
    start = initial_state(exp)
    before = {name: t.clone() for name, t in tensors(start).items()}
    whole, rows = play(exp, start)
    for name, t in tensors(start).items():
        assert torch.equal(t, before[name]), f"{name} was changed in place"
    assert all(math.isfinite(row.get("client/loss", 0.0)) for row in rows)
    data = exp.data.dataset
    untrained = exp.task.evaluate(start.model, data, data.test_x, data.test_y, batch_size=100)
    if "client=local" in methods:  # nothing is exchanged
        assert all(torch.equal(p, start.model.params[n]) for n, p in whole.model.params.items())
        assert all("params" in kept for kept in whole.clients.values())
    else:
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
    assert choices("participation") == set(PARTICIPATIONS)
    assert choices("privacy") == set(PRIVACIES)


@pytest.mark.parametrize("pair", REFUSED, ids=" ".join)
def test_what_cannot_be_promised_together_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(check.InputError):
        small(*pair, *(o for m in pair for o in NEEDS.get(m, ())))


@pytest.mark.parametrize("client", CLIENTS)
def test_an_experiment_leaves_the_client_rule_to_the_user(client: str) -> None:
    for name in ("fedasync", "centralized"):
        assert experiment(
            f"experiment={name}", "dataset=synthetic", f"client={client}", *NEEDS.get(f"client={client}", ())
        )
