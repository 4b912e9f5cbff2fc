"""The client rules against their papers: whole rounds in NumPy, closed forms on quadratics, identities, bookkeeping.

Karimireddy et al. 2020 (SCAFFOLD), Fallah et al. 2020 (Per-FedAvg), T Dinh et al. 2020 (pFedMe), Huang et al. 2020
(LoAdaBoost), Li et al. 2020 (FedProx), McMahan et al. 2017 (FedSGD). The linear softmax model of `reference`, and the
two-client quadratic  f1 = m x^2 + G x , f2 = -G x  where an answer can be worked by hand.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from conftest import config, experiment, play, small, work_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Params, loss_gradient
from torch import Tensor, nn

from fedsim import check, checkpoint, local, personal
from fedsim.client.loadaboost import LoAdaBoost
from fedsim.client.perfedavg import PerFedAvg
from fedsim.client.pfedme import PFedMe
from fedsim.client.scaffold import Scaffold
from fedsim.data import Dataset
from fedsim.runner import Experiment, RunState, initial_state
from fedsim.schedule import Cosine, Step
from fedsim.task import Task
from fedsim.types import Context, Finished, Model, Tree, Work

RULES = ["sgd", "fedsgd", "fedprox", "scaffold", "perfedavg", "pfedme", "loadaboost", "local"]
UNEQUAL = ("aggregator=fedavg", "partition.sigma=0.6", "partition.alpha=0.5")
"""Naive aggregation of clients with unequal sizes and label mixes."""
ALL = "participation.clients_per_round=1.0"
EVERYONE = {"clients_per_round": 1.0}
BLIND = {"personal": False}

Parts = dict[str, Any]
Batches = list[tuple[np.ndarray, np.ndarray]]


# Experiments. Composing a configuration costs more than its rounds, so each is composed once and varied.


@cache
def built(*overrides: str) -> Experiment:
    return small(*UNEQUAL, *overrides)


def unequal(*groups: str, **parts: Any) -> Experiment:
    """Batches of 4."""
    fedsgd = "client=fedsgd" in groups
    return vary(built(*groups) if fedsgd else built("client.batch_size=4", *groups), **parts)


def vary(exp: Experiment, **parts: Any) -> Experiment:
    """With other values: vary(exp, rounds=3, client={"option": 1})."""
    changed = {k: replace(getattr(exp, k), **v) if isinstance(v, dict) else v for k, v in parts.items()}
    return replace(exp, **changed)


def history(exp: Experiment) -> list[RunState]:
    """The state after every round, the initial one first."""
    states = [initial_state(exp)]
    for r in range(exp.rounds):
        states.append(play(replace(exp, rounds=r + 1), states[-1])[0])
    return states


def same(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


# NumPy's side: parameters as {"W", "b"} in float64, batches as the data module deals them.


def numpy(t: Tensor) -> np.ndarray:
    return t.numpy().astype(float)


def arrays(tree: Tree) -> Params:
    return {"W": numpy(tree["layers.0.weight"]), "b": numpy(tree["layers.0.bias"])}


def combine(*terms: tuple[float, Params]) -> Params:
    """sum_j a_j p_j."""
    return {n: sum(a * p[n] for a, p in terms) for n in terms[0][1]}


def zeros(p: Params) -> Params:
    return {n: np.zeros_like(v) for n, v in p.items()}


def as_numpy(batches: Iterator[tuple[Tensor, Tensor]]) -> Batches:
    return [(numpy(x), y.numpy()) for x, y in batches]


def dealt(exp: Experiment, client: int, round: int, epochs: int) -> Batches:
    return as_numpy(exp.data.client(client, round, exp.client.batch_size).batches(epochs))


def held(exp: Experiment, client: int) -> tuple[np.ndarray, np.ndarray]:
    """D_k."""
    index = exp.data.split.training(client)
    return numpy(exp.data.dataset.train_x[index]), exp.data.dataset.train_y[index].numpy()


def everything(exp: Experiment) -> tuple[np.ndarray, np.ndarray]:
    """All D_k."""
    x, y = zip(*(held(exp, k) for k in range(exp.data.num_clients)), strict=True)
    return np.concatenate(x), np.concatenate(y)


def cohort(exp: Experiment, round: int) -> list[int]:
    return exp.participation.draw(exp.seed, round, exp.data.num_clients)


def average(exp: Experiment, clients: list[int], models: list[Params]) -> Params:
    """Weighted by |D_k|."""
    sizes = np.array([len(exp.data.split.training(k)) for k in clients], dtype=float)
    assert len(clients) == 1 or sizes.std() > 0, "these tests are about unequal clients"
    return combine(*zip(sizes / sizes.sum(), models, strict=True))


def mean_loss(p: Params, x: np.ndarray, y: np.ndarray) -> float:
    return float(-np.log(reference.softmax(x @ p["W"].T + p["b"])[np.arange(len(y)), y]).mean())


def close(found: Tree, expected: Params, atol: float = 3e-6) -> None:
    for name, value in arrays(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=atol, err_msg=name)


# The quadratic's side.


@cache
def quadratic_built(*overrides: str) -> Experiment:
    return experiment("dataset=quadratic", "aggregator=fedavg", *overrides)


def quadratic(*overrides: str, **parts: Any) -> Experiment:
    """m = G = 1, ten steps of rate 0.1 an epoch from x = 1."""
    return vary(quadratic_built(*overrides), **parts)


def at(state: RunState) -> float:
    return state.model.params["x"].item()


def pair(exp: Experiment) -> tuple[int, int]:
    """(whose loss is m x^2 + G x, whose is -G x)."""
    first = int(exp.data.dataset.train_y[exp.data.split.training(0)][0])
    return (0, 1) if first == 0 else (1, 0)


def balance(slope: float, offset: float, pull: float, rate: float, steps: int) -> float:
    """Where two clients' averaged models stay: one descends slope x + offset, the other a constant -pull.

    K steps of rate eta take x to x* + A (x - x*), A = (1 - eta slope)^K, x* = -offset/slope, and to x + K eta pull.
    Their mean is x again where  (1 - A)(x - x*) = K eta pull."""
    return -offset / slope + steps * rate * pull / (1 - (1 - rate * slope) ** steps)


# FedSGD


def test_fedsgd_is_gradient_descent_on_everybodys_data() -> None:
    """Everyone takes part, server rate 1: w <- w - eta grad f(w), f the mean over all D_k together."""
    exp = unequal("client=fedsgd", participation=EVERYONE, rounds=4)
    w = arrays(initial_state(exp).model.params)
    x, y = everything(exp)
    assert len(y) < 240, "the B_k stay out of it"
    for state in history(exp)[1:]:
        w = combine((1, w), (-0.1, loss_gradient(w, x, y)))
        close(state.model.params, w)


def test_fedsgd_is_fedavg_with_one_epoch_of_one_batch() -> None:
    """E = 1, B = infinity, bit for bit; and a batch larger than any client is the same."""
    fedsgd = play(unequal("client=fedsgd", rounds=3))[0]
    for size in (None, 1000):
        fedavg = play(unequal(client={"batch_size": size, "epochs": 1}, rounds=3))[0]
        assert same(fedsgd.model.params, fedavg.model.params)


def test_fedsgd_reaches_the_optimum() -> None:
    """One step a round does not drift."""
    final, _ = play(quadratic("client=fedsgd", client_optimizer={"lr": 0.4}, rounds=40))
    assert abs(at(final)) < 1e-6


@pytest.mark.parametrize("dataset", ["mnist5k", "mnist", "fashion_mnist", "cifar10", "synthetic", "quadratic"])
def test_fedsgd_keeps_its_batch_whatever_the_dataset_says(dataset: str) -> None:
    client = config("client=fedsgd", f"dataset={dataset}")["client"]
    assert client["batch_size"] is None
    assert client["epochs"] == 1


def test_a_typed_batch_wins_over_fedsgds() -> None:
    assert config("client=fedsgd", "dataset=mnist", "client.batch_size=7")["client"]["batch_size"] == 7


@pytest.mark.parametrize("rule", [r for r in RULES if r != "fedsgd"])
def test_other_rules_take_the_datasets_batch(rule: str) -> None:
    assert config(f"client={rule}", "dataset=mnist")["client"]["batch_size"] == 100


# FedProx


def test_fedprox_rounds_against_numpy() -> None:
    """Each round's anchor is the model as it was broadcast in that round."""
    exp = unequal("client=fedprox", client={"mu": 1.3, "epochs": 2}, rounds=4)
    theta = arrays(initial_state(exp).model.params)
    for r, state in enumerate(history(exp)[1:]):
        clients = cohort(exp, r)
        theta = average(exp, clients, [reference.sgd(theta, dealt(exp, k, r, 2), 0.1, prox=1.3) for k in clients])
        close(state.model.params, theta)


@pytest.mark.parametrize("mu", [0.5, 4.0])
def test_fedprox_drifts_less_the_larger_mu(mu: float) -> None:
    """By hand, with A = 1 - eta (2m + mu), A' = 1 - eta mu: the first client ends at p + A^K (x - p),
    p = (mu x - G)/(2m + mu), the second at x + (G/mu)(1 - A'^K); x is their mean where
    (1 - A^K)(2 m x + G)/(2m + mu) = (G/mu)(1 - A'^K). For K -> infinity that is G/mu."""
    m, G, rate, K = 1.0, 1.0, 0.1, 10
    first, second = 1 - (1 - rate * (2 * m + mu)) ** K, 1 - (1 - rate * mu) ** K
    expected = ((2 * m + mu) * G / mu * second / first - G) / (2 * m)
    final, _ = play(quadratic("client=fedprox", client={"mu": mu}, rounds=80))
    assert at(final) == pytest.approx(expected, rel=1e-4)
    assert 0 < expected < balance(2 * m, G, G, rate, K), "nearer the optimum, 0, than FedAvg"


# SCAFFOLD


def scaffold(exp: Experiment, option: int, epochs: int) -> Iterator[tuple[Params, Params, dict[int, Params]]]:
    """Karimireddy et al., Algorithm 1, round after round: (x, c, {i: c_i}), the model weighted by |D_i|."""
    x, N = arrays(initial_state(exp).model.params), exp.data.num_clients
    c, own = zeros(x), {}
    for r in range(exp.rounds):
        eta, S = exp.schedule(exp.client_optimizer.lr, r), cohort(exp, r)
        ends, changes = [], []
        for i in S:
            y, c_i = x, own.get(i, zeros(x))
            batches = dealt(exp, i, r, epochs)
            K = len(batches)
            for batch in batches:
                y = combine((1, y), (-eta, loss_gradient(y, *batch)), (eta, c_i), (-eta, c))
            if option == 1:
                own[i] = loss_gradient(x, *held(exp, i))
            else:
                own[i] = combine((1, c_i), (-1, c), (1 / (K * eta), x), (-1 / (K * eta), y))
            ends.append(y)
            changes.append(combine((1, own[i]), (-1, c_i)))
        step = combine((1, average(exp, S, ends)), (-1, x))
        mean = combine(*((1 / len(S), change) for change in changes))
        x = combine((1, x), (exp.server_optimizer.lr, step))
        c = combine((1, c), (len(S) / N, mean))
        yield x, c, dict(own)


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        (1, {}),
        (2, {}),
        (2, {"participation": EVERYONE}),
        (2, {"schedule": Cosine(rounds=6, factor=0.5), "server_optimizer": {"lr": 0.7}}),
        (1, {"schedule": Step(every=2, gamma=0.3), "server_optimizer": {"lr": 1.2}}),
    ],
)
def test_scaffold_against_numpy(option: int, parts: Parts) -> None:
    """Six rounds of three of six unequal clients, three epochs: x, c and every c_i in every round."""
    exp = unequal("client=scaffold", client={"option": option, "epochs": 3}, rounds=6, **parts)
    assert len({len(dealt(exp, k, 0, 3)) for k in range(6)}) > 2, "clients take different numbers of steps"
    for state, (x, c, own) in zip(history(exp)[1:], scaffold(exp, option, epochs=3), strict=True):
        close(state.model.params, x, atol=1e-5)
        close(state.rule["c"], c, atol=2e-5)
        assert state.clients.keys() == own.keys()
        for k, c_i in own.items():
            assert state.clients[k].keys() == {"c"}
            close(state.clients[k]["c"], c_i, atol=2e-5)


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("participation", [{}, EVERYONE, {"dropout": 0.4}, {"stragglers": 0.5}])
def test_c_is_the_mean_of_all_c_i(option: int, participation: Parts) -> None:
    """(1/N) sum_i c_i, with zero for those that never took part, whoever is sampled and whoever answers."""
    parts: Parts = {"client": {"option": option, "epochs": 2}, "participation": participation, "rounds": 4}
    for state in history(unequal("client=scaffold", **parts)):
        for name, c in state.rule["c"].items():
            total = sum((own["c"][name] for own in state.clients.values()), torch.zeros_like(c))
            torch.testing.assert_close(c, total / 6, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("option", [1, 2])
def test_c_i_is_written_back_and_used(option: int) -> None:
    """FL-bench's never is. A client's c_i moves in every round it takes part in, and in no other; and a client that
    has one trains otherwise than one that has none."""
    exp = unequal("client=scaffold", client={"option": option}, rounds=6)
    returned = 0
    for r, (before, after) in enumerate(pairwise(history(exp))):
        for k in range(6):
            if k not in cohort(exp, r):
                assert after.clients.get(k) is before.clients.get(k)
            elif k in before.clients:
                returned += 1
                assert not same(before.clients[k]["c"], after.clients[k]["c"])
                forgetful = work_of(exp, replace(before, clients={}), r)
                assert not same(local.train(work_of(exp, before, r), k).params, local.train(forgetful, k).params)
    assert returned > 2


def test_scaffold_starts_at_zero() -> None:
    """NIID-Bench drew c at random."""
    state = initial_state(unequal("client=scaffold"))
    assert state.clients == {}
    assert state.rule.keys() == {"c"}
    assert same(state.rule["c"], {n: torch.zeros_like(p) for n, p in state.model.params.items()})


@pytest.mark.parametrize("option", [1, 2])
def test_only_scaffolds_first_round_is_fedavgs(option: int) -> None:
    for rounds, equal in ((1, True), (2, False)):
        plain = play(unequal(client={"epochs": 3}, rounds=rounds))[0]
        corrected = play(unequal("client=scaffold", client={"epochs": 3, "option": option}, rounds=rounds))[0]
        assert same(plain.model.params, corrected.model.params) == equal


def test_scaffold_with_variates_held_at_zero_is_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = play(unequal(client={"epochs": 2}, rounds=5))[0]

    def finish(self: Scaffold, model: Model, steps: int, context: Context) -> Finished:
        nothing = {n: torch.zeros_like(t) for n, t in model.params.items()}
        return Finished(model, kept={"c": nothing}, sent=nothing)

    monkeypatch.setattr(Scaffold, "finish", finish)
    uncorrected = play(unequal("client=scaffold", client={"epochs": 2}, rounds=5))[0]
    assert same(uncorrected.model.params, plain.model.params)


def test_the_sign_of_the_correction_by_hand() -> None:
    """g - c_i + c (Fed-BioMed had it the other way): x = 1 on x^2 + x gives 3 - 0.5 + 0.25 = 2.75."""
    exp = quadratic("client=scaffold")
    model, batch = initial_state(exp).model, sample(1.0, 1.0)
    c, c_i = {"c": scalar(0.25)}, {"c": scalar(0.5)}
    for own, expected in ((c_i, 2.75), ({}, 3.25)):
        context = Context(exp.task, model, c, own, exp.data.client(0, 0, 1), 0.1)
        g, loss = exp.client.gradient(exp.task, model.params, {}, batch, context)
        assert g["x"].item() == expected
        assert loss.item() == 2.0, "of the client's own function, uncorrected"


def test_k_is_epochs_times_batches_by_hand() -> None:
    """PFLlib divided by the batches of one epoch. Three epochs of ten steps of rate 0.1 from x = 1:

    f2' = -1 all along, so c_2 = -1; f1' = 2x + 1, so y = -0.5 + 1.5 * 0.8^30 and c_1 = (1 - y)/(30 * 0.1)."""
    exp = quadratic("client=scaffold", client={"epochs": 3}, rounds=1)
    state, _ = play(exp)
    one, two = pair(exp)
    c_1 = (1.5 - 1.5 * 0.8**30) / 3
    assert state.clients[two]["c"]["x"].item() == pytest.approx(-1, rel=1e-5)
    assert state.clients[one]["c"]["x"].item() == pytest.approx(c_1, rel=1e-5)
    assert state.rule["c"]["x"].item() == pytest.approx((c_1 - 1) / 2, rel=1e-5)


def test_k_counts_the_steps_that_a_straggler_really_takes() -> None:
    """Whatever their number, the mean of f2' = -G is -G."""
    stragglers = {"stragglers": 1.0, "least_effort": 0.0}
    exp = quadratic("client=scaffold", client={"epochs": 2}, rounds=6, participation=stragglers)
    _, two = pair(exp)
    for state in history(exp)[1:]:
        assert state.clients[two]["c"]["x"].item() == pytest.approx(-1, rel=1e-5)


def test_the_change_of_c_i_is_sent_not_c_i() -> None:
    """Plato sent c_i, whose sum grows with the rounds: c_2 stays -1 here, so its part of c must stay -1/2."""
    exp = quadratic("client=scaffold", rounds=8)
    one, two = pair(exp)
    states = history(exp)
    for state in states[1:]:
        c_1, c_2 = (state.clients[k]["c"]["x"].item() for k in (one, two))
        assert c_2 == pytest.approx(-1, rel=1e-5)
        assert state.rule["c"]["x"].item() == pytest.approx((c_1 + c_2) / 2, abs=1e-5)
    again = local.train(work_of(exp, states[-1], 8), two)
    assert again.sent is not None
    assert again.sent["x"].item() == pytest.approx(0, abs=1e-5)


def test_option_1_is_the_gradient_of_all_own_data_at_the_broadcast_model() -> None:
    """Not at y, without B_k, in whatever batches; and with any optimizer."""
    groups = ("client=scaffold", "client.option=1", "client_optimizer=adam")
    exp = unequal(*groups, client={"epochs": 2, "batch_size": 7}, rounds=2)
    _, before, after = history(exp)
    for k in cohort(exp, 1):
        close(after.clients[k]["c"], loss_gradient(arrays(before.model.params), *held(exp, k)))


@pytest.mark.parametrize(
    "optimizer", ["momentum", "nesterov", "adam", "adagrad", "rmsprop", "sgd client_optimizer.momentum=0.5"]
)
def test_option_2_is_refused_where_steps_are_not_gradients(optimizer: str) -> None:
    with pytest.raises(check.BadValue) as error:
        small("client=scaffold", *f"client_optimizer={optimizer}".split())
    message = str(error.value)
    assert message.startswith("client.option=2: ")
    assert "client_optimizer=sgd" in message
    assert "option=1" in message
    assert "\n" not in message


@pytest.mark.parametrize("option", [0, 3, "one", "true"])
def test_other_options_are_refused(option: object) -> None:
    with pytest.raises(check.BadValue, match=f"client.option=(?i:{option}): must be a whole number >= 1 and <= 2"):
        small("client=scaffold", f"client.option={option}")


def test_traffic_in_models() -> None:
    """210 numbers of 4 bytes, 3 clients: SCAFFOLD 2 down and 2 up, local none, all others 1 and 1; elastic's
    sensitivities are one more up."""
    model = 210 * 4 * 3
    times = {rule: (1, 1) for rule in RULES} | {"scaffold": (2, 2), "local": (0, 0)}
    for rule, (down, up) in times.items():
        for aggregator, extra in ((unequal().aggregator, 0), (unequal("aggregator=elastic").aggregator, 1)):
            _, (row,) = play(unequal(f"client={rule}", rounds=1, aggregator=aggregator, eval=BLIND))
            assert row["comm/down_bytes"] == down * model
            assert row["comm/up_bytes"] == (up + extra if up else 0) * model, (rule, extra)


def test_traffic_of_clients_that_never_answer() -> None:
    """They were sent x and c; nothing comes back."""
    _, rows = play(unequal("client=scaffold", rounds=8, participation={"dropout": 0.5}))
    assert {row["comm/down_bytes"] for row in rows} == {2 * 3 * 840}
    assert [row["comm/up_bytes"] for row in rows] == [2 * row["clients/arrived"] * 840 for row in rows]
    assert len({row["clients/arrived"] for row in rows}) > 1


@pytest.mark.parametrize(("m", "G", "rate", "epochs"), [(1.0, 1.0, 0.1, 1), (0.5, 3.0, 0.1, 2), (2.0, 1.0, 0.04, 3)])
def test_scaffold_reaches_the_optimum_that_fedavg_drifts_from(m: float, G: float, rate: float, epochs: int) -> None:
    functions = (f"dataset.m={m}", f"dataset.G={G}", "dataset.samples=6")
    exp = quadratic(*functions, client={"epochs": epochs}, client_optimizer={"lr": rate}, rounds=60)
    place = balance(2 * m, G, G, rate, 5 * epochs)
    assert place > 0.1
    assert at(play(exp)[0]) == pytest.approx(place, rel=1e-4)
    for option in (1, 2):
        corrected = vary(exp, client=Scaffold(epochs=epochs, batch_size=1, option=option))
        assert abs(at(play(corrected)[0])) < 1e-5


def test_scaffold_reaches_the_optimum_of_a_convex_problem() -> None:
    """Four one-class clients, five full-batch steps of rate 0.3, loss plus 0.15 ||w||^2: the minimum found by gradient
    descent in NumPy. FedAvg is elsewhere."""
    exp = experiment(
        *("dataset=synthetic", "dataset.train_samples=80", "dataset.test_samples=20", "dataset.features=4"),
        *("dataset.num_classes=4", "partition=one_class", "partition.num_clients=4", ALL, "aggregator=fedavg"),
        *("client.epochs=5", "client.batch_size=null", "client_optimizer.weight_decay=0.3", "client_optimizer.lr=0.3"),
        *("dataset.separation=2.0", "rounds=40", "eval.every=40"),
    )
    x, y = everything(exp)
    w = arrays(initial_state(exp).model.params)
    for _ in range(500):
        w = combine((1 - 0.3 * 0.3, w), (-0.3, loss_gradient(w, x, y)))
    assert reference.norm(combine((1, loss_gradient(w, x, y)), (0.3, w))) < 1e-9
    for option in (1, 2):
        corrected = play(vary(exp, client=Scaffold(epochs=5, batch_size=None, option=option)))[0]
        close(corrected.model.params, w)
    naive = arrays(play(exp)[0].model.params)
    assert reference.norm(combine((1, naive), (-1, w))) > 0.1


def test_scaffolds_objective_is_the_plain_mean_over_clients() -> None:
    """Paper's Eq. 1: f = (1/N) sum_i f_i, whatever the models' weights. Two to one in size, one full-batch step a
    round: FedAvg by size solves 2 (2 m x + G) = G, x = -G/(4m); SCAFFOLD's x is 0, where the c_i cancel."""
    ends = {}
    for rule in ("sgd", "scaffold"):
        exp = quadratic(f"client={rule}", client={"batch_size": None}, client_optimizer={"lr": 0.3}, rounds=80)
        one, _ = pair(exp)
        kept_back = np.array([1, 6] if one == 0 else [6, 1])  # of 11
        exp = replace(exp, data=replace(exp.data, split=replace(exp.data.split, held=kept_back)))
        assert exp.data.sizes[one] == 10
        ends[rule] = at(play(exp)[0])
    assert ends["sgd"] == pytest.approx(-0.25, abs=1e-5)
    assert ends["scaffold"] == pytest.approx(0, abs=1e-5)


def test_scaffold_survives_a_rate_of_zero() -> None:
    """Past the end of a cosine nobody moves; (x - y)/(K eta) is 0/0 there and must not reach the model."""
    exp = unequal("client=scaffold", schedule=Cosine(rounds=2, factor=0.5), rounds=5)
    end = play(vary(exp, rounds=2))[0]
    state, rows = play(exp)
    assert len(rows) == 5, "it did not diverge"
    assert same(state.model.params, end.model.params)
    assert all(torch.isfinite(c).all() for c in state.rule["c"].values())


# Per-FedAvg

VARIANTS = ["first_order", "hessian_free"]


def meta_gradient(w: Params, three: Batches, alpha: float, variant: str, delta: float) -> Params:
    """Fallah et al.: D adapts, D' gives the gradient there, D'' the Hessian (Sec. 5: dropped, or a difference)."""
    D, D1, D2 = three
    g = loss_gradient(combine((1, w), (-alpha, loss_gradient(w, *D))), *D1)
    if variant == "first_order":
        return g
    up, down = (loss_gradient(combine((1, w), (sign * delta, g)), *D2) for sign in (1, -1))
    return combine((1, g), (-alpha / (2 * delta), up), (alpha / (2 * delta), down))


def exact_meta_gradient(w: Params, three: Batches, alpha: float) -> Params:
    """(I - alpha H(w; D'')) grad f(w - alpha grad f(w; D); D') with the Hessian of softmax regression written out:
    the mean over samples of (diag(p) - p p') x z z', where z = (x, 1)."""
    D, D1, (x, _) = three
    g = loss_gradient(combine((1, w), (-alpha, loss_gradient(w, *D))), *D1)
    p, z = reference.softmax(x @ w["W"].T + w["b"]), np.c_[x, np.ones(len(x))]
    curvature = np.einsum("nc,cd->ncd", p, np.eye(p.shape[1])) - np.einsum("nc,nd->ncd", p, p)
    hessian = np.einsum("ncd,ni,nj->cidj", curvature, z, z) / len(x)
    product = np.einsum("cidj,dj->ci", hessian, np.c_[g["W"], g["b"]])
    return combine((1, g), (-alpha, {"W": product[:, :-1], "b": product[:, -1]}))


def softmax_problem(seed: int) -> tuple[Task, Model, Batches]:
    """A linear model in float64, and three batches."""
    torch.manual_seed(seed)
    task = Task(nn.Linear(4, 3).double(), Dataset(*[torch.zeros(1)] * 4, 3, torch.ones(1), torch.zeros(1)))
    generator = np.random.default_rng(seed)
    return task, task.initial_model(), [(generator.normal(size=(5, 4)), generator.integers(0, 3, 5)) for _ in "123"]


def found_meta_gradient(task: Task, model: Model, three: Batches, **values: Any) -> Params:
    D, D1, D2 = ((torch.tensor(x), torch.tensor(y)) for x, y in three)
    rule = PerFedAvg(epochs=1, batch_size=5, adaptation_steps=1, **values)
    data: Any = SimpleNamespace(extra=iter([D, D2]))
    g, _ = rule.gradient(task, model.params, {}, D1, Context(task, model, {}, {}, data, 0.1))
    return {"W": numpy(g["weight"]), "b": numpy(g["bias"])}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_meta_gradients_against_numpy(variant: str, seed: int) -> None:
    task, model, three = softmax_problem(seed)
    w = {"W": numpy(model.params["weight"]), "b": numpy(model.params["bias"])}
    for alpha, delta in ((0.3, 0.1), (1.0, 0.01)):
        found = found_meta_gradient(task, model, three, alpha=alpha, variant=variant, delta=delta)
        for name, value in meta_gradient(w, three, alpha, variant, delta).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_hessian_free_gradient_is_exact_to_second_order_in_delta(seed: int) -> None:
    task, model, three = softmax_problem(seed)
    w = {"W": numpy(model.params["weight"]), "b": numpy(model.params["bias"])}
    exact = exact_meta_gradient(w, three, alpha=0.5)

    def error(variant: str, delta: float) -> float:
        found = found_meta_gradient(task, model, three, alpha=0.5, variant=variant, delta=delta)
        return reference.norm(combine((1, found), (-1, exact)))

    errors = [error("hessian_free", delta) for delta in (0.4, 0.2, 0.1, 0.05)]
    assert [a / b for a, b in pairwise(errors)] == pytest.approx([4, 4, 4], rel=0.1)
    assert error("hessian_free", 1e-4) < 1e-8
    assert error("first_order", 1e-4) > 1e-2, "which drops alpha H g"


@pytest.mark.parametrize("variant", VARIANTS)
def test_perfedavg_without_an_inner_step_is_fedavg(variant: str) -> None:
    plain = play(unequal(client={"epochs": 2}, rounds=3))[0]
    for alpha, equal in ((0.0, True), (0.1, False)):
        values = {"epochs": 2, "alpha": alpha, "variant": variant}
        meta = play(unequal("client=perfedavg", client=values, rounds=3, eval=BLIND))[0]
        assert same(meta.model.params, plain.model.params) == equal


def test_perfedavg_without_an_inner_step_can_be_evaluated() -> None:
    """alpha = 0 is allowed: then the personal model is the global one."""
    _, rows = play(unequal("client=perfedavg", client={"alpha": 0.0}, rounds=1))
    assert rows[0]["personal/accuracy_after"] == rows[0]["personal/accuracy_before"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_perfedavg_rounds_against_numpy(variant: str) -> None:
    """D' is the batch that plain training would take; D and D'' are drawn beside it, in this order."""
    values = {"epochs": 2, "alpha": 0.3, "delta": 0.1, "variant": variant}
    exp = unequal("client=perfedavg", client=values, rounds=3, eval=BLIND)
    theta = arrays(initial_state(exp).model.params)
    for r, state in enumerate(history(exp)[1:]):
        ends = []
        for k in cohort(exp, r):
            w, more = theta, exp.data.client(k, r, 4).extra
            for batch in dealt(exp, k, r, 2):
                D = as_numpy(iter([next(more)]))[0]
                D2 = as_numpy(iter([next(more)]))[0] if variant == "hessian_free" else D
                w = combine((1, w), (-0.1, meta_gradient(w, [D, batch, D2], 0.3, variant, 0.1)))
            ends.append(w)
        theta = average(exp, cohort(exp, r), ends)
        close(state.model.params, theta)


def test_perfedavgs_batches_are_three_and_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step: w on D, w' on D', w + delta g and w - delta g on the same D''. Each of the client's own samples,
    of the batch size, and none of D, D', D'' the same set as another."""
    exp = unequal("client=perfedavg", client={"variant": "hessian_free", "epochs": 2})
    used: list[list[tuple[float, ...]]] = []
    gradient = exp.task.gradient

    def spy(params: Tree, buffers: Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tree, Tensor]:
        used.append(sorted(map(tuple, batch[0].tolist())))
        return gradient(params, buffers, batch)

    monkeypatch.setattr(exp.task, "gradient", spy)
    local.train(work_of(exp, initial_state(exp)), 1)
    own = set(map(tuple, exp.data.dataset.train_x[exp.data.split.training(1)].tolist()))
    assert len(used) == 4 * len(dealt(exp, 1, 0, 2))
    drawn = set()
    for inner, outer, up, down in zip(*[iter(used)] * 4, strict=True):
        assert up == down
        assert inner != outer != up != inner
        assert len(inner) == len(up) == len(set(inner)) == len(set(up)) == 4
        assert set(inner) | set(outer) | set(up) <= own
        drawn |= {tuple(inner), tuple(up)}
    assert len(drawn) > len(used) / 4, "new ones all the time"


@pytest.mark.parametrize(("variant", "power"), [("first_order", 1), ("hessian_free", 2)])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_perfedavg_reaches_the_minimum_of_its_objective(variant: str, power: int, alpha: float) -> None:
    """f1' = 2 m x + G. At w - alpha f1'(w) it is (1 - 2 m alpha) f1'(w), and times I - alpha H = 1 - 2 m alpha it is
    the derivative of f1(w - alpha f1'(w)); f2's is -G. They cancel where (1 - 2 m alpha)^2 (2 m w + G) = G, and with
    the Hessian dropped where (1 - 2 m alpha)(2 m w + G) = G. Ten local steps drift from there."""
    m, G, values = 1.0, 1.0, {"variant": variant, "alpha": alpha, "delta": 0.5}
    shrink = (1 - 2 * m * alpha) ** power
    alone: Parts = {"client": {**values, "batch_size": None}, "client_optimizer": {"lr": 0.4}, "rounds": 100}
    once, _ = play(quadratic("client=perfedavg", **alone))
    assert at(once) == pytest.approx(G * (1 / shrink - 1) / (2 * m), rel=1e-4)
    often, _ = play(quadratic("client=perfedavg", client=values, rounds=45))
    assert at(often) == pytest.approx(balance(2 * m * shrink, G * shrink, G, 0.1, 10), rel=1e-4)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_perfedavgs_personal_model_is_steps_of_rate_alpha(steps: int) -> None:
    """Plain ones on the client's own data, whatever the client optimizer and its rate; more than an epoch if asked."""
    values = {"alpha": 0.7, "adaptation_steps": steps, "batch_size": None}
    exp = unequal("client=perfedavg", client=values, client_optimizer={"momentum": 0.9, "weight_decay": 0.1})
    work = work_of(exp, initial_state(exp), 3)
    expected = arrays(work.model.params)
    for _ in range(steps):
        expected = combine((1, expected), (-0.7, loss_gradient(expected, *held(exp, 2))))
    close(local.personal(work, 2).params, expected)


# pFedMe


def pfedme(**values: Any) -> PFedMe:
    return PFedMe(epochs=1, batch_size=None, beta=1.0, **{"tolerance": 0.0, **values})


def sample(a: float, b: float) -> tuple[Tensor, Tensor]:
    """A batch whose loss is a x^2 + b x."""
    return torch.tensor([[a, b]]), torch.zeros(1, dtype=torch.long)


def scalar(x: float) -> Tree:
    return {"x": torch.tensor([x])}


@settings(max_examples=40, deadline=None)
@given(
    a=st.floats(0, 3),
    b=st.floats(-3, 3),
    w=st.floats(-3, 3),
    lambda_=st.floats(1, 30),
    steps=st.sampled_from([1, 3, 25]),
)
def test_the_inner_problem_against_its_closed_form(a: float, b: float, w: float, lambda_: float, steps: int) -> None:
    """a x^2 + b x + (lambda/2)(x - w)^2 is least at theta* = (lambda w - b)/(2a + lambda); K steps of rate eta leave
    (1 - eta (2a + lambda))^K of the distance. The envelope's gradient is lambda (w - theta*)."""
    task, rate = quadratic().task, 0.6 / (2 * a + lambda_)
    rule = pfedme(lambda_=lambda_, inner_lr=rate, inner_steps=steps)
    best = (lambda_ * w - b) / (2 * a + lambda_)
    theta, loss = rule.inner(task, scalar(w), {}, sample(a, b))
    assert theta["x"].item() == pytest.approx(best + 0.4**steps * (w - best), rel=1e-5, abs=1e-6)
    assert loss.item() == pytest.approx(a * w * w + b * w, rel=1e-5, abs=1e-5), "of w, where the step is taken"
    context: Any = None
    g, _ = rule.gradient(task, scalar(w), {}, sample(a, b), context)
    assert g["x"].item() == pytest.approx(lambda_ * (w - theta["x"].item()), rel=1e-5, abs=3e-5)
    if steps == 25:
        slope = lambda_ * (2 * a * w + b) / (2 * a + lambda_)
        assert g["x"].item() == pytest.approx(slope, rel=1e-5, abs=3e-5), "dF/dw, F(w) = min over theta"


@pytest.mark.parametrize(
    ("tolerance", "theta"),
    [(0.0, 0.25 + 0.75 / 2**10), (0.5, 0.34375), (0.375, 0.34375), (3.0, 1.0), (2.9, 0.625)],
)
def test_the_inner_solver_stops_at_its_tolerance(tolerance: float, theta: float) -> None:
    """x^2 + x from w = 1, lambda = 2, rate 1/8: the gradient halves from 3 to 1.5, 0.75, 0.375 ..., and theta goes
    from 1 half way to 0.25 each time, until the gradient is short enough: from then on it stays where it is."""
    rule = pfedme(lambda_=2.0, inner_lr=0.125, inner_steps=10, tolerance=tolerance)
    found, _ = rule.inner(quadratic().task, scalar(1.0), {}, sample(1.0, 1.0))
    assert found["x"].item() == theta


def pfedme_round(exp: Experiment, w: Params, r: int, beta: float, tolerance: float) -> tuple[Params, int]:
    """T Dinh et al., Algorithm 1, with lambda = 5, 4 inner steps of rate 0.08 and eta = 0.1; the model weighted by
    |D_i|. And how often the inner solver stopped early."""
    ends, early = [], 0
    for k in cohort(exp, r):
        w_i = w
        for batch in dealt(exp, k, r, 2):
            theta = w_i
            for _ in range(4):
                g = combine((1, loss_gradient(theta, *batch)), (5, theta), (-5, w_i))
                if reference.norm(g) <= tolerance:
                    early += 1
                    break
                theta = combine((1, theta), (-0.08, g))
            w_i = combine((1, w_i), (-0.1 * 5, w_i), (0.1 * 5, theta))
        ends.append(w_i)
    return combine((1 - beta, w), (beta, average(exp, cohort(exp, r), ends))), early


@pytest.mark.parametrize(("beta", "tolerance"), [(1.0, 0.0), (0.6, 0.0), (1.7, 0.4)])
def test_pfedme_rounds_against_numpy(beta: float, tolerance: float) -> None:
    values = {"lambda_": 5.0, "inner_steps": 4, "inner_lr": 0.08, "beta": beta, "tolerance": tolerance, "epochs": 2}
    exp = unequal("client=pfedme", client=values, rounds=3, eval=BLIND)
    w = arrays(initial_state(exp).model.params)
    stops = 0
    for r, state in enumerate(history(exp)[1:]):
        w, early = pfedme_round(exp, w, r, beta, tolerance)
        stops += early
        close(state.model.params, w)
    assert (stops > 20) == (tolerance > 0)


def test_mixing_with_beta_is_a_server_rate_of_beta() -> None:
    exp = unequal("client=pfedme", rounds=4, eval=BLIND, client_optimizer={"lr": 0.05})
    mixed, scaled, neither = (
        play(e)[0].model.params for e in (vary(exp, client={"beta": 0.3}), vary(exp, server_optimizer={"lr": 0.3}), exp)
    )
    for name, p in mixed.items():
        torch.testing.assert_close(p, scaled[name], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(p, neither[name], atol=1e-3)


@pytest.mark.parametrize("lambda_", [4.0, 15.0])
def test_pfedme_reaches_the_minimum_of_the_envelopes(lambda_: float) -> None:
    """F1' = lambda (2 m w + G)/(2 m + lambda), F2' = -G: they cancel at w = G/lambda. With ten local steps w drifts to
    the place that these two slopes give."""
    m, G = 1.0, 1.0
    values = {"lambda_": lambda_, "inner_lr": 1 / (lambda_ + 1), "inner_steps": 9}
    alone: Parts = {"client": {**values, "batch_size": None}, "client_optimizer": {"lr": 0.4}, "rounds": 50}
    assert at(play(quadratic("client=pfedme", **alone))[0]) == pytest.approx(G / lambda_, rel=1e-4)
    often, _ = play(quadratic("client=pfedme", client=values, rounds=30))
    part = lambda_ / (2 * m + lambda_)
    assert at(often) == pytest.approx(balance(2 * m * part, G * part, G, 0.1, 10), rel=1e-4)


def test_pfedmes_personal_model_solves_the_inner_problem() -> None:
    """On all of the client's data, from w, at the inner rate: enough epochs end at argmin f + (lambda/2)||. - w||^2."""
    values = {"lambda_": 4.0, "inner_lr": 0.2, "inner_steps": 60, "epochs": 60, "batch_size": None}
    exp = unequal("client=pfedme", client=values, client_optimizer={"momentum": 0.9})
    work = work_of(exp, initial_state(exp), 2)
    w = arrays(work.model.params)
    theta = w
    for _ in range(1000):
        theta = combine((0.8, theta), (0.2, w), (-0.05, loss_gradient(theta, *held(exp, 3))))
    close(local.personal(work, 3).params, theta)


def test_pfedmes_personal_model_is_no_worse_solved_than_in_training() -> None:
    """One epoch of one batch: the inner solver takes its K steps on it in training, and no fewer for evaluation."""
    values = {"lambda_": 4.0, "inner_lr": 0.05, "inner_steps": 5, "epochs": 1, "batch_size": None}
    exp = unequal("client=pfedme", client=values)
    work = work_of(exp, initial_state(exp), 2)
    w = arrays(work.model.params)
    theta = w
    for _ in range(5):
        theta = combine((0.8, theta), (0.2, w), (-0.05, loss_gradient(theta, *held(exp, 3))))
    close(local.personal(work, 3).params, theta)


# LoAdaBoost


def plan(epochs: int, median: float, losses: list[float]) -> list[int]:
    """Blocks of epochs, where the loss after each is the next of these (the last one stays)."""
    told = iter(losses + losses[-1:] * epochs)
    context: Any = SimpleNamespace(shared={"median": {"loss": torch.tensor(median)}})
    return list(LoAdaBoost(epochs=epochs, batch_size=10).plan(context, lambda: next(told)))


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(2, [1, 1]), (4, [2, 2, 1]), (6, [3, 3, 2, 1]), (8, [4, 4, 3, 1]), (10, [5, 5, 4, 1]), (20, [10, 10, 9, 1])],
)
def test_loadaboosts_schedule_by_hand(epochs: int, expected: list[int]) -> None:
    """E/2; then E/2 - r + 1 for r = 1, 2 ..., while that is something and until 3E/2 in all."""
    assert plan(epochs, 1.0, [2.0]) == expected
    assert plan(epochs, 1.0, [1.0]) == expected[:1], "at most the median: enough"
    assert plan(epochs, 1.0, [3.0, 1.0]) == expected[:2]
    assert plan(epochs, math.inf, [1e9]) == expected[:1], "no median yet"


@given(half=st.integers(1, 60), losses=st.lists(st.floats(0, 2), min_size=1, max_size=20))
def test_loadaboost_never_trains_longer_than_it_may(half: int, losses: list[float]) -> None:
    blocks = plan(2 * half, 1.0, losses)
    assert half == blocks[0] <= sum(blocks) <= 3 * half
    assert all(0 < b <= half - r + 1 for r, b in enumerate(blocks[1:], 1))
    enough = next((i for i, loss in enumerate(losses) if loss <= 1.0), len(losses) + half)
    assert len(blocks) <= enough + 1, "it stops as soon as the loss is low enough"
    if len(blocks) < enough + 1:
        assert sum(blocks) == 3 * half or blocks[-1] == 1, "and not before"


def loadaboost(exp: Experiment, E: int) -> Iterator[tuple[Params, float, dict[int, int]]]:
    """As the slides state it: (model, median, epochs that each client trained) of every round."""
    theta, median = arrays(initial_state(exp).model.params), math.inf
    for r in range(exp.rounds):
        ends, losses, trained = [], [], {}
        for k in cohort(exp, r):
            data = exp.data.client(k, r, 4)
            w = reference.sgd(theta, as_numpy(data.batches(E // 2)), 0.1)
            total, repetition = E // 2, 1
            while mean_loss(w, *held(exp, k)) > median and total < 3 * E // 2 and E // 2 - repetition + 1 > 0:
                more = min(E // 2 - repetition + 1, 3 * E // 2 - total)
                w = reference.sgd(w, as_numpy(data.batches(more)), 0.1)
                total, repetition = total + more, repetition + 1
            ends.append(w)
            losses.append(mean_loss(w, *held(exp, k)))
            trained[k] = total
        theta, median = average(exp, cohort(exp, r), ends), float(np.median(losses))
        yield theta, median, trained


@pytest.mark.parametrize("clients", [3, 4])
def test_loadaboost_against_numpy(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rounds with E = 4: the model, the median that goes out, and how long each client trains."""
    E = 4
    exp = unequal("client=loadaboost", client={"epochs": E}, rounds=5, participation={"clients_per_round": clients})
    asked: list[object] = []
    gradient = exp.task.gradient
    monkeypatch.setattr(exp.task, "gradient", lambda *args: asked.append(args) or gradient(*args))
    state, lengths = initial_state(exp), set()
    assert state.rule["median"]["loss"].item() == math.inf
    for r, (theta, median, trained) in enumerate(loadaboost(exp, E)):
        asked.clear()
        state, _ = play(replace(exp, rounds=r + 1), state)
        close(state.model.params, theta, atol=1e-5)
        assert state.rule["median"]["loss"].item() == pytest.approx(median, rel=1e-5)
        assert len(asked) == sum(n * len(dealt(exp, k, r, 1)) for k, n in trained.items())
        lengths |= set(trained.values())
    assert lengths == {2, 4, 5}, "some stop, some go on, some all the way"


def test_loadaboosts_first_round_is_half_of_fedavgs() -> None:
    boosted = play(unequal("client=loadaboost", client={"epochs": 6}, rounds=1))[0]
    plain = play(unequal(client={"epochs": 3}, rounds=1))[0]
    assert same(boosted.model.params, plain.model.params)


def test_loadaboost_goes_on_with_fresh_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A median nobody can reach: 3 + 3 + 2 + 1 epochs, each all of D_k, no two in the same order."""
    exp = unequal("client=loadaboost", client={"epochs": 6})
    work = work_of(exp, replace(initial_state(exp), rule={"median": {"loss": torch.tensor(-1.0)}}))
    seen: list[float] = []
    gradient = exp.task.gradient

    def spy(params: Tree, buffers: Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tree, Tensor]:
        seen.extend(batch[0][:, 0].tolist())
        return gradient(params, buffers, batch)

    monkeypatch.setattr(exp.task, "gradient", spy)
    local.train(work, 2)
    own = sorted(held(exp, 2)[0][:, 0].tolist())
    assert len(set(own)) == len(own)
    orders = [tuple(seen[i : i + len(own)]) for i in range(0, len(seen), len(own))]
    assert len(orders) == 9
    assert all(sorted(order) == own for order in orders)
    assert len(set(orders)) == 9


def test_loadaboosts_median_waits_for_someone_to_answer() -> None:
    """A round that nobody answers leaves it; the median is over those who do."""
    exp = unequal("client=loadaboost", client={"epochs": 2}, rounds=12, participation={"dropout": 0.8})
    silent = lone = 0
    for r, (before, after) in enumerate(pairwise(history(exp))):
        arrived = exp.participation(exp.seed, r, exp.steps, {"now": 0.0}).clients
        if not arrived:
            silent += 1
            assert torch.equal(before.rule["median"]["loss"], after.rule["median"]["loss"])
        elif len(arrived) == 1:
            lone += 1
            end = local.train(work_of(exp, before, r), arrived[0]).params
            loss = mean_loss(arrays(end), *held(exp, arrived[0]))
            assert after.rule["median"]["loss"].item() == pytest.approx(loss, rel=1e-5)
    assert silent > 0
    assert lone > 0


def test_loadaboost_wants_an_even_number_of_epochs() -> None:
    with pytest.raises(check.BadValue, match=r"client\.epochs=5: must be even"):
        small("client=loadaboost", "client.epochs=5")


# Local training


def test_local_models_never_mix() -> None:
    """Each client's own model is what it would have become alone, trained in the rounds it was sampled in; the global
    one stays as it was drawn, and nothing travels."""
    exp = unequal("client=local", client={"epochs": 2}, rounds=4, participation={"clients_per_round": 2})
    start = initial_state(exp)
    state, rows = play(exp, start)
    assert same(state.model.params, start.model.params)
    assert {row["comm/down_bytes"] for row in rows} == {row["comm/up_bytes"] for row in rows} == {0}
    assert all(row["norm/N_server"] == row["norm/N"] == row["norm/E"] == 0 for row in rows)
    assert len({row["test/accuracy"] for row in rows}) == len({row["personal/accuracy_before"] for row in rows}) == 1
    times = {k: [r for r in range(4) if k in cohort(exp, r)] for k in range(6)}
    assert {len(rounds) for rounds in times.values()} == {0, 1, 2}
    assert state.clients.keys() == {k for k, rounds in times.items() if rounds}
    for k, rounds in times.items():
        alone = arrays(start.model.params)
        for r in rounds:
            alone = reference.sgd(alone, dealt(exp, k, r, 2), 0.1)
        if rounds:
            close(state.clients[k]["params"], alone, atol=1e-5)
        close(local.personal(work_of(exp, state, 4), k).params, alone, atol=1e-5)


@pytest.mark.parametrize("aggregator", ["elastic", "fednnnn", "momentum"])
def test_local_leaves_the_global_model_to_no_aggregator(aggregator: str) -> None:
    state, _ = play(unequal("client=local", f"aggregator={aggregator}", rounds=2))
    plain, _ = play(unequal("client=local", rounds=2))
    assert same(state.model.params, plain.model.params)
    assert len(plain.clients) > 2
    for k, kept in plain.clients.items():
        assert same(kept["params"], state.clients[k]["params"])


def test_local_keeps_velocity_where_it_is_asked_to() -> None:
    """persist_state: three rounds of one client are one long optimization by torch's own momentum."""
    optimizer = {"momentum": 0.9, "persist_state": True}
    exp = unequal("client=local", client_optimizer=optimizer, participation=EVERYONE, rounds=3, eval=BLIND)
    state, _ = play(exp)
    module = nn.Linear(20, 10)
    initial = exp.task.initial_model().params
    module.load_state_dict({"weight": initial["layers.0.weight"], "bias": initial["layers.0.bias"]})
    peer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for r in range(3):
        for x, y in exp.data.client(4, r, 4).batches(1):
            peer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            peer.step()
    own = state.clients[4]["params"]["layers.0.weight"]
    torch.testing.assert_close(own, module.weight.detach(), rtol=1e-4, atol=1e-5)


def test_local_batch_norm_statistics_are_the_clients_own() -> None:
    exp = experiment(
        *("dataset=mnist5k", "model=cnn_cifar", "client=local", "aggregator=fedavg", "rounds=2", "eval.train=false"),
        *("partition.num_clients=400", "participation.clients_per_round=1", "eval.personal=false", "eval.every=9"),
    )
    few = replace(exp.data.dataset, test_x=exp.data.dataset.test_x[:10], test_y=exp.data.dataset.test_y[:10])
    exp = replace(exp, data=replace(exp.data, dataset=few))
    start = initial_state(exp)
    state, _ = play(exp, start)
    assert same(state.model.buffers, start.model.buffers)
    (k,) = cohort(exp, 1)
    kept = state.clients[k]
    assert not same(kept["buffers"], start.model.buffers)
    own = local.personal(work_of(exp, state, 2), k)
    assert same(own.buffers, kept["buffers"])
    assert same(own.params, kept["params"])


# Personalised evaluation

PERSONAL = [f"personal/accuracy_{moment}{kind}" for moment in ("before", "after") for kind in ("", "_uniform", "_std")]


@pytest.mark.parametrize(("clients", "count"), [(1.0, 6), (0.5, 3), (4, 4), (1, 1)])
def test_personal_accuracy_against_numpy(clients: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuning by a round of local training: before and after, over all clients or a sample of them."""
    made: dict[int, tuple[int, Model]] = {}
    real = local.personal

    def spy(work: Work, client: int) -> Model:
        made[client] = (work.round, real(work, client))
        return made[client][1]

    monkeypatch.setattr(local, "personal", spy)
    exp = unequal(eval={"personal": True, "personal_clients": clients}, rounds=2, client={"epochs": 2})
    state, rows = play(exp)
    chosen = personal.sample(exp.data, exp.eval.personal_clients)
    assert len(chosen) == len(set(chosen)) == count
    assert set(made) == set(chosen)
    w = arrays(state.model.params)
    found = []
    for k in chosen:
        index = personal.test_samples(exp.data, k, personal.test_pools(exp.data))
        x, y = numpy(exp.data.dataset.test_x[index]), exp.data.dataset.test_y[index].numpy()
        round, model = made[k]
        own = reference.sgd(w, as_numpy(exp.data.client(k, round, 4, "adaptation").batches(2)), 0.1)
        close(model.params, own)
        found.append([((x @ p["W"].T + p["b"]).argmax(1) == y).mean() for p in (w, own)])
    sizes = np.array([len(exp.data.split.training(k)) for k in chosen], dtype=float)
    for place, moment in enumerate(("before", "after")):
        values = np.array(found)[:, place]
        mean = (sizes * values).sum() / sizes.sum()
        spread = np.sqrt(((values - values.mean()) ** 2).mean())
        assert rows[-1][f"personal/accuracy_{moment}"] == pytest.approx(mean, rel=1e-5)
        assert rows[-1][f"personal/accuracy_{moment}_uniform"] == pytest.approx(values.mean(), rel=1e-5)
        assert rows[-1][f"personal/accuracy_{moment}_std"] == pytest.approx(spread, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("rule", ["scaffold", "local", "loadaboost", "pfedme"])
def test_fine_tuning_leaves_no_trace(rule: str) -> None:
    """Evaluated or not, training goes the same way, and everyone keeps what it kept."""
    exp = unequal(f"client={rule}", client={"epochs": 2}, client_optimizer={"lr": 0.05}, rounds=3)
    looked, blind = (play(vary(exp, eval={"personal": value}))[0] for value in (True, False))
    assert equal(looked, blind)


def test_every_method_is_judged_on_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in every round."""
    drawn: list[tuple[int, tuple[int, ...]]] = []
    real = personal.test_samples

    def spy(data: Any, client: int, pools: list[np.ndarray]) -> np.ndarray:
        index = real(data, client, pools)
        drawn.append((client, tuple(index.tolist())))
        return index

    monkeypatch.setattr(personal, "test_samples", spy)
    seen = set()
    for method in ((), ("client=perfedavg",), ("client=local", "aggregator=fednnnn")):
        drawn.clear()
        play(unequal(*method, rounds=2, eval={"personal": True, "personal_clients": 4}))
        assert drawn[:4] == drawn[4:]
        seen.add(tuple(drawn[:4]))
    assert len(seen) == 1


def test_the_test_samples_have_the_clients_label_mix() -> None:
    """As many as the client's share of the data, 20 at least; each class's part to within one; nobody twice."""
    exp = experiment(
        *("dataset=synthetic", "dataset.train_samples=3000", "dataset.test_samples=3000", "partition.num_clients=12"),
        *("partition.alpha=0.3", "partition.sigma=1.0"),
    )
    labels, split, sizes = exp.data.dataset.train_y.numpy(), exp.data.split, set()
    for k in range(12):
        own = split.indices[split.offsets[k] : split.offsets[k + 1]]
        index = personal.test_samples(exp.data, k, personal.test_pools(exp.data))
        assert len(set(index.tolist())) == len(index) == max(len(own), 20)
        mix = np.bincount(labels[own], minlength=10) / len(own)
        found = np.bincount(exp.data.dataset.test_y.numpy()[index], minlength=10)
        assert np.abs(found - mix * len(index)).max() <= 1
        sizes.add(len(index))
    assert len(sizes) > 5


def test_a_one_class_client_is_tested_on_its_class() -> None:
    exp = small("partition=one_class", "partition.num_clients=10", "dataset.test_samples=400")
    for k in range(10):
        index = personal.test_samples(exp.data, k, personal.test_pools(exp.data))
        assert set(exp.data.dataset.test_y[index].tolist()) == {k}
        assert len(index) == 40


def test_the_sample_of_clients_is_the_same_in_every_run() -> None:
    exp, other = unequal(), unequal("client=scaffold")
    assert personal.sample(exp.data, 3) == personal.sample(other.data, 3)
    assert personal.sample(exp.data, 100) == personal.sample(exp.data, 1.0) == list(range(6))
    assert len(personal.sample(exp.data, 1)) == len(personal.sample(exp.data, 0.01)) == 1
    assert len({tuple(personal.sample(replace(exp.data, seed=seed), 3)) for seed in range(9)}) > 3


SKEWED = ("partition=one_class", "partition.num_clients=10", ALL, "aggregator=fedavg", "rounds=2", "eval.personal=true")


@pytest.mark.parametrize(
    "method",
    [
        ["client=sgd"],
        ["client=fedprox"],
        ["client=perfedavg", "client.alpha=0.1"],
        ["client=perfedavg", "client.alpha=0.1", "client.variant=hessian_free"],
        ["client=pfedme"],
        ["client=local"],
        ["client=loadaboost", "client.epochs=2"],
    ],
)
def test_adaptation_helps_where_clients_differ(method: list[str]) -> None:
    _, rows = play(small(*SKEWED, *method))
    assert rows[-1]["personal/accuracy_after"] > rows[-1]["personal/accuracy_before"] + 0.1
    assert rows[-1]["personal/accuracy_after"] > rows[-1]["test/accuracy"]


def test_adaptation_helps_under_a_cosine_too() -> None:
    """Whose rate after the last round is zero: the last, reported, evaluation must not fine-tune with that."""
    _, rows = play(small(*SKEWED, "schedule=cosine"))
    assert rows[-1]["personal/accuracy_after"] > rows[-1]["personal/accuracy_before"] + 0.1


def test_scaffolds_personal_model_is_the_clients_own() -> None:
    """At the optimum x = 0 the variates cancel every client's pull, c_1 = G, c_2 = -G: corrected steps go nowhere.
    Fine-tuning is on the client's own function: ten steps of 2 x + 1 end at -0.5 + 0.5 * 0.8^10, ten of -1 at 1."""
    exp = quadratic("client=scaffold", rounds=60)
    state, _ = play(exp)
    assert abs(at(state)) < 1e-5
    one, two = pair(exp)
    work = work_of(exp, state, 60)
    assert local.personal(work, one).params["x"].item() == pytest.approx(-0.5 + 0.5 * 0.8**10, abs=1e-4)
    assert local.personal(work, two).params["x"].item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_when_personal_accuracy_is_measured(rule: str) -> None:
    """Where the method is about it, unless one says otherwise."""
    about = rule in ("perfedavg", "pfedme", "local")
    for value, expected in ((None, about), (True, True), (False, False)):
        _, (row,) = play(unequal(f"client={rule}", rounds=1, eval={"personal": value, "personal_clients": 1}))
        assert [name in row for name in PERSONAL] == [expected] * 6, value


def test_personal_accuracy_is_measured_on_evaluation_rounds_where_there_are_classes() -> None:
    _, rows = play(unequal("client=local", rounds=5, eval={"every": 2}))
    assert ["personal/accuracy_after" in row for row in rows] == [False, True, False, True, True]
    _, (row,) = play(quadratic("client=local", rounds=1))
    assert not any(name.startswith("personal/") for name in row)


# What is kept


@pytest.mark.parametrize("rule", RULES)
def test_only_clients_that_took_part_keep_anything_and_no_more_than_they_must(rule: str) -> None:
    exp = unequal(f"client={rule}", rounds=3, participation={"clients_per_round": 1}, eval={"personal_clients": 1})
    assert initial_state(exp).clients == {}
    state, _ = play(exp)
    sampled = {k for r in range(3) for k in cohort(exp, r)}
    assert 1 <= len(sampled) <= 3
    parts = {"scaffold": {"c"}, "local": {"params", "buffers"}}.get(rule)
    assert set(state.clients) == (sampled if parts else set())
    for kept in state.clients.values():
        assert set(kept) == parts
        tensors = [t for tree in kept.values() for t in tree.values()]
        assert sum(t.untyped_storage().nbytes() for t in tensors) == 210 * 4, "one model's worth"
        assert not any(t.requires_grad for t in tensors)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_changed_in_place_and_a_checkpoint_resumes_exactly(rule: str, tmp_path: Path) -> None:
    client = {"epochs": 4} if rule == "loadaboost" else {}
    exp = unequal(f"client={rule}", rounds=5, client_optimizer={"lr": 0.05}, client=client)
    start = initial_state(exp)
    half, _ = play(vary(exp, rounds=2), start)
    copies = [checkpointed(state, tmp_path) for state in (start, half)]
    whole, rows = play(exp, start)
    resumed, last = play(exp, copies[1])
    assert equal(resumed, whole)
    assert equal(play(exp, half)[0], whole)
    timeless = [{k: v for k, v in row.items() if k != "time/round_s"} for row in (*last, *rows[2:])]
    assert timeless[:3] == timeless[3:]
    for state, copy in zip((start, half), copies, strict=True):
        assert equal(state, copy)


def checkpointed(state: RunState, folder: Path) -> RunState:
    checkpoint.save(folder / "checkpoint.pt", state, elapsed_s=0.0)
    return checkpoint.load(folder / "checkpoint.pt", torch.device("cpu"))[0]


def equal(a: RunState, b: RunState) -> bool:
    def flat(state: RunState) -> Tree:
        states = {"rule": state.rule} | {f"client {k}": kept for k, kept in state.clients.items()}
        trees = {f"{name}/{part}": tree for name, kept in states.items() for part, tree in kept.items()}
        trees |= {"params": state.model.params, "buffers": state.model.buffers}
        return {f"{name}/{n}": t for name, tree in trees.items() for n, t in tree.items()}

    return a.round == b.round and same(flat(a), flat(b))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_learns(rule: str) -> None:
    """The global and the personal models end far above chance, 0.1."""
    parts: Parts = {"fedsgd": {"client_optimizer": {"lr": 1.0}}, "loadaboost": {"client": {"epochs": 2}}}.get(rule, {})
    _, rows = play(unequal(f"client={rule}", rounds=12, eval={"personal": True, "every": 12}, **parts))
    assert rows[-1]["personal/accuracy_after"] > 0.5
    assert rule == "local" or rows[-1]["test/accuracy"] > 0.4
