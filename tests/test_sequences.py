"""Every client rule on sequences with natural clients: a target at every position, padding that counts nowhere."""

import pytest
import torch
from conftest import experiment, play
from test_contract import CLIENTS, NEEDS

from fedsim.check import InputError
from fedsim.runner import Experiment

SEQUENCES = (
    *("dataset=custom", "dataset.load=sequences.counting", "rounds=6", "participation.clients_per_round=1.0"),
    *("model=lstm_shakespeare", "model.embedding=4", "model.hidden=12", "model.layers=1", "client_optimizer.lr=0.5"),
)


def sequences(*overrides: str) -> Experiment:
    return experiment(*SEQUENCES, *overrides)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_rule_learns_sequences(client: str) -> None:
    slow = ("client_optimizer.lr=0.05",) if client == "pfedme" else ()  # its step is lr * lambda, 15
    _, rows = play(sequences(f"client={client}", *NEEDS.get(f"client={client}", ()), *slow, "rounds=12"))
    assert rows[-1]["client/loss"] < rows[0]["client/loss"]
    assert 0 <= rows[-1]["test/accuracy"] <= 1
    if client in ("perfedavg", "pfedme", "local"):
        assert 0 <= rows[-1]["personal/accuracy_after"] <= 1


def test_a_personal_model_is_judged_on_its_own_clients_sequences() -> None:
    """Clients count in different steps: one model cannot please both, a model of one's own can."""
    exp = sequences("client=local", "rounds=60", "client_optimizer.lr=1.0", "aggregator=fedavg")
    _, rows = play(exp)
    assert rows[-1]["personal/accuracy_after"] > rows[-1]["personal/accuracy_before"] + 0.2


@pytest.mark.parametrize("aggregator", ["elastic", "norm_norm", "fednnnn"])
def test_aggregators_take_them(aggregator: str) -> None:
    _, rows = play(sequences(f"aggregator={aggregator}"))
    assert rows[-1]["client/loss"] < rows[0]["client/loss"]


def test_longer_padding_changes_nothing() -> None:
    """The same sequences with five more positions of padding: the same losses, accuracies and sensitivities."""
    short, long = (
        play(sequences(f"dataset.arguments={{padding: {p}}}", "dataset.load=sequences.padded")) for p in (0, 5)
    )
    for name in ("client/loss", "test/accuracy", "test/loss", "norm/N", "elastic/mean_zeta"):
        assert short[1][-1][name] == pytest.approx(long[1][-1][name], rel=1e-4), name
    for name, p in short[0].model.params.items():
        torch.testing.assert_close(p, long[0].model.params[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("partition=dirichlet", "partition.num_clients=3"), "has a target at every position"),
        (("shared_data=global",), "sequences have no label"),
        (("model=mlp",), "cannot take this dataset's tokens"),
        (("aggregator=pfnm",), "pfnm"),
    ],
)
def test_what_does_not_go_with_sequences(overrides: tuple[str, ...], said: str) -> None:
    keys = [o for o in SEQUENCES if not (o.startswith("model") and any("model" in v for v in overrides))]
    with pytest.raises(InputError, match=said):
        play(experiment(*keys, *overrides))
