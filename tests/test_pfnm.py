"""PFNM as an aggregator: what the round does with matched networks, and elastic on top of it."""

import pytest
import torch
from conftest import experiment, play, small
from torch import Tensor

from fedsim import check, growth
from fedsim.aggregator.elastic import Elastic
from fedsim.aggregator.pfnm import Pfnm
from fedsim.cohort import Cohort, Member
from fedsim.runner import initial_state
from fedsim.types import Model

MLP = ("model=mlp", "model.hidden=[8]", "aggregator=pfnm", "client_optimizer.lr=0.05")


def pfnm(**changes) -> Pfnm:
    elastic = {"tau": None, "mu": 0.95, "sensitivity": "momentum", "layer": "tensor", "batch_norm": "running"}
    prior = {"sigma2": 1.0, "sigma02": 1.0, "gamma0": 1.0, "iterations": 3}
    return Pfnm(**{"weighting": "samples", "evaluate": "sent", "batch_size": None, **elastic, **prior, **changes})


def mlp(seed: int, width: int = 3, scale: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {"0.weight": (width, 4), "0.bias": (width,), "1.weight": (2, width), "1.bias": (2,)}
    return {name: scale * torch.randn(shape) for name, shape in shapes.items()}


def permuted(params: dict[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    w, b, v, c = params.values()
    return dict(zip(params, (w[order], b[order], v[:, order], c), strict=True))


def cohort(server: dict[str, Tensor], members: list[Member]) -> Cohort:
    delta = {n: sum(m.weight * (p - m.params[n]) for m in members) for n, p in server.items()}
    nothing = torch.zeros(5)
    return Cohort(Model(server, {}), delta, {}, None, nothing, nothing, torch.zeros(()), {}, members=members)


def test_identical_clients_are_returned_whatever_the_order_of_their_units() -> None:
    """theta - direction is the clients' network itself, in theta's own order."""
    theta = mlp(0)
    trained = {n: p + 0.01 for n, p in theta.items()}
    orders = [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
    found = pfnm().direction(cohort(theta, [Member(1 / 3, permuted(trained, o), None) for o in orders]), {})
    assert found.origin is not None
    assert found.metrics["pfnm/units"].item() == 3
    for name, p in trained.items():
        torch.testing.assert_close(found.origin[name] - found.tree[name], p, rtol=1e-5, atol=1e-6)


def test_the_model_grows_where_clients_have_nothing_in_common() -> None:
    theta, far = mlp(0, scale=20.0), mlp(1, scale=20.0)
    found = pfnm(sigma2=0.01, sigma02=100.0).direction(
        cohort(theta, [Member(0.5, theta, None), Member(0.5, far, None)]), {}
    )
    assert found.metrics["pfnm/units"].item() == 6
    assert found.origin is not None
    assert found.origin["0.weight"].shape == (6, 4)
    torch.testing.assert_close(found.origin["0.weight"][:3], theta["0.weight"])
    assert not found.origin["0.weight"][3:].any(), "the server's own function is unchanged: new units are zero"
    grown = {n: o - found.tree[n] for n, o in found.origin.items()}
    torch.testing.assert_close(grown["0.weight"][:3], theta["0.weight"], rtol=1e-5, atol=1e-5)
    found_units = {tuple(row) for row in (grown["0.weight"][3:] * 1e3).round().tolist()}
    assert found_units == {tuple(row) for row in (far["0.weight"] * 1e3).round().tolist()}


def test_close_clients_give_the_naive_average() -> None:
    theta = mlp(0, scale=5.0)
    clients = [{n: p + 0.01 * torch.randn_like(p) for n, p in theta.items()} for _ in range(4)]
    members = [Member(w, c, None) for w, c in zip((0.1, 0.2, 0.3, 0.4), clients, strict=True)]
    given = cohort(theta, members)
    found = pfnm().direction(given, {})
    for name, d in given.delta.items():
        torch.testing.assert_close(found.tree[name], d, rtol=1e-4, atol=1e-5)


def test_elastic_follows_the_matching() -> None:
    """Clients whose units are permuted send sensitivities permuted alike: the result is that of aligned clients."""
    theta = mlp(0, scale=5.0)
    trained = [{n: p + 0.1 * (k + 1) for n, p in theta.items()} for k in range(2)]
    torch.manual_seed(7)
    omega = [{n: torch.rand_like(p) for n, p in theta.items()} for _ in range(2)]
    weights, order = (0.25, 0.75), [2, 0, 1]
    members = [
        Member(weights[0], trained[0], omega[0]),
        Member(weights[1], permuted(trained[1], order), permuted(omega[1], order)),
    ]
    found = pfnm(tau=0.5).direction(cohort(theta, members), {})
    keys = {"mu": 0.95, "sensitivity": "momentum", "layer": "tensor", "batch_norm": "running", "batch_size": None}
    elastic = Elastic("samples", "sent", tau=0.5, **keys)
    mean_omega = {n: weights[0] * omega[0][n] + weights[1] * omega[1][n] for n in theta}
    zeta = {n: 1.5 - o / o.max() for n, o in mean_omega.items()}
    delta = {n: -(weights[0] * 0.1 + weights[1] * 0.2) * torch.ones_like(p) for n, p in theta.items()}
    for name, z in zeta.items():
        torch.testing.assert_close(elastic.zeta(mean_omega)[name], z)
        torch.testing.assert_close(found.tree[name], z * delta[name], rtol=1e-4, atol=1e-5)
    boosted = sum((z > 1).sum().item() for z in zeta.values()) / sum(z.numel() for z in zeta.values())
    assert found.metrics["elastic/boosted_fraction"].item() == pytest.approx(boosted)


def test_tau_null_measures_and_sends_nothing_more() -> None:
    assert pfnm().probe is None
    assert pfnm().extra_uploads == 0
    assert pfnm(tau=0.5).probe is not None
    assert pfnm(tau=0.5).extra_uploads == 1


def test_a_grown_model_trains_on_and_keeps_its_memories() -> None:
    """With almost no variance allowed nothing matches and every round adds units; memories of all kinds keep up."""
    methods = ("client=scaffold", "server_optimizer=fedadam", "aggregator.sigma2=1e-6", "rounds=3")
    exp = small(*MLP, *methods, "client_optimizer.persist_state=true")
    state, rows = play(exp)
    units = [row["pfnm/units"] for row in rows]
    assert units[0] > 8
    assert units == sorted(units)
    width = int(units[-1])
    assert state.model.params["layers.0.weight"].shape == (width, 20)
    assert state.server["v"]["layers.0.weight"].shape == (width, 20)
    assert state.rule["c"]["layers.1.weight"].shape == (10, width)
    assert all(torch.isfinite(p).all() for p in state.model.params.values())


def test_what_is_kept_for_a_smaller_network_fits_the_larger_one() -> None:
    old, like = {"w": torch.tensor([[1.0, 2.0]]), "t": torch.tensor(3.0)}, {"w": torch.zeros(2, 3)}
    assert growth.padded(old, like)["w"].tolist() == [[1, 2, 0], [0, 0, 0]]
    assert growth.padded(old, like)["t"].item() == 3
    fresh = {"v": {"w": torch.full((2, 3), 9.0), "t": torch.tensor(0.0)}}
    assert growth.overlaid({"v": old}, fresh)["v"]["w"].tolist() == [[1, 2, 9], [9, 9, 9]]


def test_other_networks_are_refused_and_a_diverged_client_is_not_matched() -> None:
    exp = experiment("aggregator=pfnm", "model=cnn_mnist")
    with pytest.raises(check.InputError, match="fully connected"):
        initial_state(exp)
    broken = {n: p * torch.nan for n, p in mlp(0).items()}
    found = pfnm().direction(cohort(mlp(0), [Member(1.0, broken, None)]), {})
    assert all(t.isnan().all() for t in found.tree.values())
    assert found.origin is None
