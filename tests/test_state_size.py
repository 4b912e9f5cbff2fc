"""What clients keep between rounds is compact and lazy: 10,000 clients of a logistic model and 1,000 of ResNet-20, with
control variates and Adam's moments for every one of them, stay below 4 GB."""

import torch
from conftest import config, experiment

from fedsim import local
from fedsim.runner import assign, initial_state
from fedsim.types import State, Turn

KEPT = ("client=scaffold", "client.option=1", "client_optimizer=adam", "client_optimizer.persist_state=true")


def kept_bytes(state: State) -> int:
    return sum(t.untyped_storage().nbytes() for tree in state.values() for t in tree.values())


def one_client(*overrides: str) -> State:
    exp = experiment(*overrides, *KEPT)
    state = initial_state(exp)
    assert state.clients == {}, "a client never seen costs nothing"
    result = local.train(assign(exp, state, Turn([0], [0], {}, 0, {}, 1)), 0)
    assert result.state is not None
    return result.state


def test_ten_thousand_logistic_clients() -> None:
    assert 10_000 * kept_bytes(one_client("model=logistic", "partition.num_clients=1000")) < 1e9


def test_a_thousand_resnets() -> None:
    size = ("dataset=mnist5k", "model=resnet20", "partition.num_clients=1000", "aggregator=fedavg")
    state = one_client(*size)
    parameters = sum(t.numel() for t in state["c"].values())
    assert parameters == 269_722 - 288, "one input channel"
    assert kept_bytes(state) <= 3 * 4 * parameters + 100, "c_i, m and v, and nothing beside them"
    assert 1_000 * kept_bytes(state) < 4e9
    assert config(*size)["partition"]["num_clients"] == 1000
    storages = {t.untyped_storage().data_ptr() for tree in state.values() for t in tree.values()}
    assert len(storages) == sum(len(tree) for tree in state.values()), "no tensor holds another's memory alive"
    assert all(t.dtype == torch.float32 for t in state["c"].values())
