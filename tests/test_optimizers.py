"""Client optimizers against torch's own, FedAvgM against the supplement, schedules against their formulas."""

import math

import numpy as np
import pytest
import torch
from conftest import experiment, play, small
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.client_optimizer.adagrad import Adagrad
from fedsim.client_optimizer.adam import Adam
from fedsim.client_optimizer.rmsprop import RMSprop
from fedsim.client_optimizer.sgd import Sgd
from fedsim.schedule import Constant, Cosine, Step, TimeDecay
from fedsim.server_optimizer.adaptive import FedAdagrad, FedAdam, FedYogi
from fedsim.server_optimizer.fedavgm import FedAvgM
from fedsim.server_optimizer.sgd import Sgd as ServerSgd

KEPT = {"persist_state": False}
PAIRS = {
    "sgd": (
        lambda wd: Sgd(lr=0.1, weight_decay=wd, momentum=0.0, nesterov=False, **KEPT),
        lambda p, wd: torch.optim.SGD(p, 0.1, weight_decay=wd),
    ),
    "momentum": (
        lambda wd: Sgd(lr=0.1, weight_decay=wd, momentum=0.9, nesterov=False, **KEPT),
        lambda p, wd: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=wd),
    ),
    "nesterov": (
        lambda wd: Sgd(lr=0.1, weight_decay=wd, momentum=0.9, nesterov=True, **KEPT),
        lambda p, wd: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=wd),
    ),
    "adagrad": (
        lambda wd: Adagrad(lr=0.1, weight_decay=wd, initial_accumulator=0.1, eps=1e-7, **KEPT),
        lambda p, wd: torch.optim.Adagrad(p, 0.1, weight_decay=wd, initial_accumulator_value=0.1, eps=1e-7),
    ),
    "rmsprop": (
        lambda wd: RMSprop(lr=0.01, weight_decay=wd, rho=0.9, eps=1e-7, **KEPT),
        lambda p, wd: torch.optim.RMSprop(p, 0.01, alpha=0.9, eps=1e-7, weight_decay=wd),
    ),
    "adam": (
        lambda wd: Adam(lr=0.01, weight_decay=wd, beta1=0.9, beta2=0.999, eps=1e-7, **KEPT),
        lambda p, wd: torch.optim.Adam(p, 0.01, betas=(0.9, 0.999), eps=1e-7, weight_decay=wd),
    ),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("name", PAIRS)
def test_against_torch(name: str, weight_decay: float) -> None:
    """The same gradients for 30 steps, the rate changed half way."""
    ours, theirs = (make for make in PAIRS[name])
    torch.manual_seed(0)
    start = {"a": torch.randn(4, 3), "b": torch.randn(5)}
    leaves = {n: t.clone().requires_grad_() for n, t in start.items()}
    rule, peer = ours(weight_decay), theirs(list(leaves.values()), weight_decay)
    params, state, lr = start, rule.init(start), rule.lr
    before = {n: t.clone() for n, t in start.items()}
    for i in range(30):
        if i == 15:
            lr *= 0.3
            peer.param_groups[0]["lr"] *= 0.3
        grads = {n: torch.randn_like(t) for n, t in start.items()}
        for n, leaf in leaves.items():
            leaf.grad = grads[n].clone()
        params, state = rule.step(params, grads, state, lr)
        peer.step()
    for n, leaf in leaves.items():
        torch.testing.assert_close(params[n], leaf.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(start[n], before[n]), "pure: the first parameters are untouched"


def test_fedavgm_against_the_supplement() -> None:
    """m <- mu m + (1 - mu) d ; theta <- theta - eta m, from m = 0. By hand for one round, NumPy for six."""
    rule = FedAvgM(lr=0.5, momentum=0.9, form="ema", nesterov=False)
    theta = {"w": torch.tensor([1.0])}
    new, state = rule.step(theta, {"w": torch.tensor([2.0])}, rule.init(theta), rule.lr)
    assert state["m"]["w"].item() == pytest.approx(0.2)
    assert new["w"].item() == pytest.approx(0.9)

    directions = np.random.default_rng(0).normal(size=(6, 3))
    x, m = np.zeros(3), np.zeros(3)
    params, state = {"w": torch.zeros(3)}, rule.init({"w": torch.zeros(3)})
    for d in directions:
        m = 0.9 * m + 0.1 * d
        x = x - 0.5 * m
        params, state = rule.step(params, {"w": torch.tensor(d, dtype=torch.float32)}, state, rule.lr)
    assert np.allclose(params["w"], x, atol=1e-6)


def test_fedavgm_without_momentum_is_the_plain_step() -> None:
    theta, d = {"w": torch.randn(4)}, {"w": torch.randn(4)}
    rule = FedAvgM(lr=0.7, momentum=0.0, form="ema", nesterov=False)
    assert torch.equal(
        rule.step(theta, d, rule.init(theta), 0.7)[0]["w"], ServerSgd(lr=0.7).step(theta, d, {}, 0.7)[0]["w"]
    )


def test_state_is_kept_or_reset_between_rounds() -> None:
    """Reset: every round starts as the first. Kept: a client goes on with its own state, and only clients that took
    part have any."""
    exp = small("client_optimizer=adam", "rounds=3")
    assert play(exp)[0].clients == {}
    kept = small("client_optimizer=adam", "client_optimizer.persist_state=true", "rounds=3")
    state, _ = play(kept)
    seen = {k for r in range(3) for k in kept.participation.draw(0, r, 6)}
    assert set(state.clients) == seen
    steps = {k: sum(k in kept.participation.draw(0, r, 6) for r in range(3)) for k in seen}
    for k, times in steps.items():
        batches = math.ceil(len(kept.data.split.training(k)) / kept.client.batch_size)
        assert state.clients[k]["optimizer/t"]["t"].item() == times * batches


def test_kept_state_of_a_lone_client_is_one_long_optimization() -> None:
    """One client, all rounds, server rate 1, state kept: the rounds are seams that nothing shows through."""
    shared = ("partition.num_clients=1", "participation.clients_per_round=1", "aggregator=fedavg")
    exp = small("client_optimizer=adam", "client_optimizer.persist_state=true", "rounds=4", *shared)
    state, _ = play(exp)
    model = torch.nn.Linear(20, 10)
    initial = exp.task.initial_model().params
    model.load_state_dict({"weight": initial["layers.0.weight"], "bias": initial["layers.0.bias"]})
    peer = torch.optim.Adam(model.parameters(), 0.001, eps=1e-7)
    for r in range(4):
        for x, y in exp.data.client(0, r, 10).batches(1):
            peer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            peer.step()
    torch.testing.assert_close(state.model.params["layers.0.weight"], model.weight.detach(), rtol=1e-4, atol=1e-6)


def directions(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    return [{"w": torch.randn(5) * scale} for scale in np.linspace(0.1, 2, count)]


def server_steps(optimizer, start: torch.Tensor, moves: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    params, state, places = {"w": start}, optimizer.init({"w": start}), []
    for move in moves:
        params, state = optimizer.step(params, move, state, optimizer.lr)
        places.append(params["w"])
    return places


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_heavy_ball_is_torchs_momentum(nesterov: bool) -> None:
    peer_w = torch.nn.Parameter(torch.arange(5.0))
    peer = torch.optim.SGD([peer_w], lr=0.3, momentum=0.8, nesterov=nesterov)
    ours = FedAvgM(lr=0.3, momentum=0.8, form="heavy_ball", nesterov=nesterov)
    for place, move in zip(server_steps(ours, torch.arange(5.0), directions(6)), directions(6), strict=True):
        peer_w.grad = move["w"]
        peer.step()
        torch.testing.assert_close(place, peer_w.detach())


def test_fedavgm_forms_differ_by_the_rate_alone() -> None:
    ema = FedAvgM(lr=1.0, momentum=0.9, form="ema", nesterov=False)
    ball = FedAvgM(lr=0.1, momentum=0.9, form="heavy_ball", nesterov=False)
    start = torch.zeros(5)
    for a, b in zip(server_steps(ema, start, directions(4)), server_steps(ball, start, directions(4)), strict=True):
        torch.testing.assert_close(a, b)


def test_fedadagrad_is_torchs_adagrad() -> None:
    """v starts at tau^2, which is torch's initial accumulator; without momentum the two rules are one."""
    peer_w = torch.nn.Parameter(torch.arange(5.0))
    peer = torch.optim.Adagrad([peer_w], lr=0.2, initial_accumulator_value=0.01**2, eps=0.01)
    ours = FedAdagrad(lr=0.2, beta1=0.0, tau=0.01)
    for place, move in zip(server_steps(ours, torch.arange(5.0), directions(6)), directions(6), strict=True):
        peer_w.grad = move["w"]
        peer.step()
        torch.testing.assert_close(place, peer_w.detach())


def test_fedadam_is_torchs_adam_without_its_bias_correction() -> None:
    """torch divides m by 1 - beta1^t and sqrt(v) by sqrt(1 - beta2^t): here a rate and an eps that undo both."""
    beta1, beta2, tau, lr = 0.9, 0.99, 0.001, 0.05
    peer_w = torch.nn.Parameter(torch.arange(5.0))
    peer = torch.optim.Adam([peer_w], betas=(beta1, beta2))
    zero, small_v = torch.zeros(5), torch.full((5,), tau**2)
    peer.state[peer_w] = {"step": torch.tensor(0.0), "exp_avg": zero, "exp_avg_sq": small_v}
    ours = FedAdam(lr=lr, beta1=beta1, tau=tau, beta2=beta2)
    places = server_steps(ours, torch.arange(5.0), directions(6))
    for t, (place, move) in enumerate(zip(places, directions(6), strict=True), start=1):
        root = math.sqrt(1 - beta2**t)
        peer.param_groups[0].update(lr=lr * (1 - beta1**t) / root, eps=tau / root)
        peer_w.grad = move["w"]
        peer.step()
        torch.testing.assert_close(place, peer_w.detach(), rtol=1e-5, atol=1e-6)


def test_fedyogi_by_hand() -> None:
    """tau = 0.1, so v = 0.01. D = 1: D^2 > v, v <- 0.01 + 0.5 = 0.51, m = 0.5; theta <- -0.5 / (sqrt(0.51) + 0.1).
    D = 0.2: D^2 = 0.04 < v, v <- 0.51 - 0.02 = 0.49, m = 0.35; theta <- theta - 0.35 / 0.8."""
    ours = FedYogi(lr=1.0, beta1=0.5, tau=0.1, beta2=0.5)
    moves = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([0.2])}]
    first, second = server_steps(ours, torch.zeros(1), moves)
    assert first.item() == pytest.approx(-0.5 / (math.sqrt(0.51) + 0.1))
    assert second.item() == pytest.approx(first.item() - 0.35 / 0.8)


@pytest.mark.parametrize(
    "server",
    [
        ("server_optimizer=sgd",),
        ("server_optimizer=fedavgm",),
        ("server_optimizer=fedavgm", "server_optimizer.form=heavy_ball", "server_optimizer.lr=0.1"),
        ("server_optimizer=fedavgm", "server_optimizer.nesterov=true"),
        ("server_optimizer=fedadagrad", "server_optimizer.lr=0.5"),
        ("server_optimizer=fedadam", "server_optimizer.lr=0.02"),
        ("server_optimizer=fedyogi", "server_optimizer.lr=0.02"),
        ("aggregator=elastic",),
        ("aggregator=momentum", "aggregator.gamma=0.5"),
        ("aggregator=fedasync",),
    ],
    ids=" ".join,
)
def test_every_server_finds_the_optimum_of_the_quadratic(server: tuple[str, ...]) -> None:
    """f1 + f2 = m x^2: with one full-batch step on each client (no drift) all of them must end at 0. FedYogi and
    FedAdam hover within about a step of it."""
    aggregator = () if any(s.startswith("aggregator=") for s in server) else ("aggregator=fedavg",)
    exp = experiment("dataset=quadratic", "client=fedsgd", "rounds=400", *aggregator, *server)
    state, _ = play(exp)
    (x,) = state.model.params.values()
    start = next(iter(exp.task.initial_model().params.values()))
    assert abs(start.item()) > 0.5
    assert abs(x.item()) < 0.02


def test_schedules_by_hand() -> None:
    assert Constant()(0.1, 999) == 0.1
    cosine = Cosine(rounds=100, factor=0.5)
    assert [cosine(0.1, r) for r in (0, 50, 100, 150)] == pytest.approx([0.1, 0.05, 0.0, 0.0])
    assert Cosine(rounds=100, factor=1.0)(0.1, 0) == 0.2, "as printed in the paper"
    assert cosine(0.1, 25) == pytest.approx(0.05 * (1 + math.sqrt(0.5)))
    decay = TimeDecay(rounds=30, phi=None)
    assert decay(0.1, 0) == 0.1
    assert decay(0.1, 30) == pytest.approx(0.1 / 1.1), "phi = eta_0 / max t"
    assert TimeDecay(rounds=30, phi=0.5)(0.1, 4) == pytest.approx(0.1 / 3)
    assert [Step(every=10, gamma=0.1)(1.0, r) for r in (0, 9, 10, 25)] == pytest.approx([1, 1, 0.1, 0.01])


@given(r=st.integers(0, 500), rounds=st.integers(1, 400), lr=st.floats(1e-5, 10))
@settings(max_examples=50, deadline=None)
def test_schedules_never_rise_above_the_initial_rate(r: int, rounds: int, lr: float) -> None:
    for schedule in (Constant(), Cosine(rounds, 0.5), TimeDecay(rounds, None), Step(7, 0.5)):
        assert 0 <= schedule(lr, r) <= lr


def test_a_run_follows_its_schedule() -> None:
    _, rows = play(small("schedule=cosine", "rounds=4"))
    assert [row["client_lr"] for row in rows] == pytest.approx(
        [0.05 * (1 + math.cos(math.pi * r / 4)) for r in range(4)]
    )
