"""Who takes part, how much they do and how long it takes: synchronous rounds with failures and stragglers, the virtual
clock, and asynchronous training, against plain loops and numbers worked by hand."""

import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from conftest import config, experiment, metrics, play, small
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsim import checkpoint, local, rng
from fedsim.aggregator.fedasync import FedAsync
from fedsim.check import BadValue
from fedsim.client.sgd import Sgd
from fedsim.cohort import Cohort
from fedsim.participation.asynchronous import Asynchronous
from fedsim.participation.uniform import Uniform
from fedsim.runner import Experiment, Row, RunState, assign, initial_state, run
from fedsim.task import Task
from fedsim.types import Batch, Clock, Context, Model, Tree, Turn

PLAIN = {"dropout": 0.0, "stragglers": 0.0, "least_effort": 0.1, "speed": 1.0, "speed_sigma": 0.0, "delay": 0.0}


def uniform(count: int | float, **changes: float) -> Uniform:
    return Uniform(clients_per_round=count, **{**PLAIN, "delay_sigma": 0.0, **changes})


def asynchronous(count: int | float, max_staleness: int | None = None, **changes: float) -> Asynchronous:
    return Asynchronous(count, **{**PLAIN, "delay_sigma": 0.0, **changes}, max_staleness=max_staleness)


def leaves(node: object, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a state, whatever holds it."""
    if isinstance(node, torch.Tensor):
        return {path: node}
    if isinstance(node, Mapping):
        children = {str(k): v for k, v in node.items()}
    elif is_dataclass(node):
        children = {f.name: getattr(node, f.name) for f in fields(node)}
    else:
        return {}
    return {name: t for key, child in children.items() for name, t in leaves(child, f"{path}/{key}").items()}


def assert_same(one: object, two: object) -> None:
    first, second = leaves(one), leaves(two)
    assert first.keys() == second.keys()
    for name, t in first.items():
        assert torch.equal(t, second[name]), name


def timeless(rows: Sequence[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if k != "time/round_s"} for row in rows]


def turns(exp: Experiment, rounds: int) -> list[Turn]:
    """Who takes part in each round, without any training."""
    found: list[Turn] = []
    clock: Clock = {"now": 0.0}
    for r in range(rounds):
        found.append(exp.participation(exp.seed, r, exp.steps, clock))
        clock = found[-1].clock
    return found


def history(exp: Experiment) -> tuple[list[RunState], list[Row]]:
    """The state before every round and after the last, and every round's row."""
    states, rows = [initial_state(exp)], []

    def remember(state: RunState, row: Row, layers: object) -> None:
        states.append(state)
        rows.append(row)

    run(exp, states[0], remember)
    return states, rows


def linear(params: Tree) -> reference.Params:
    return {"W": params["layers.0.weight"].numpy().astype(float), "b": params["layers.0.bias"].numpy().astype(float)}


def trained(exp: Experiment, start: reference.Params, client: int, round: int, steps: int | None = None) -> dict:
    """A client's local SGD in NumPy, over the first `steps` of its batches."""
    drawn = exp.data.client(client, round, exp.client.batch_size).batches(exp.client.epochs)
    batches = [(x.numpy().astype(float), y.numpy()) for x, y in drawn]
    return reference.sgd(start, batches[:steps], lr=exp.client_optimizer.lr)


def assert_close(found: Tree, expected: reference.Params, atol: float = 1e-5) -> None:
    for name, value in linear(found).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=atol)


# ---------------------------------------------------------------- synchronous rounds: clients that never answer


def test_the_same_clients_fail_for_every_method() -> None:
    shared = ("participation.dropout=0.4", "participation.stragglers=0.5", "rounds=8")
    methods = [
        ("aggregator=fedavg",),
        ("aggregator=elastic", "client=fedprox"),
        ("aggregator=momentum", "client=scaffold", "server_optimizer=fedavgm"),
        ("aggregator=fedavg", "participation.speed_sigma=1.0", "participation.delay=3.0"),
    ]
    first = None
    for m in methods:
        exp = small(*m, *shared)
        found = [(t.sampled, t.clients, t.effort) for t in turns(exp, 8)]
        first = first or found
        assert found == first
        assert [row["clients/arrived"] for row in play(exp)[1]] == [len(clients) for _, clients, _ in found]
    assert first is not None
    assert len({len(clients) for _, clients, _ in first}) > 1
    other = [(t.sampled, t.clients) for t in turns(small(*shared, "seed=1"), 8)]
    assert other != [(sampled, clients) for sampled, clients, _ in first]


def test_failures_come_on_top_of_the_same_sample() -> None:
    whole, part = uniform(5), uniform(5, dropout=0.5)
    for r in range(20):
        one, two = (p(3, r, [1] * 9, {"now": 0.0}) for p in (whole, part))
        assert one.sampled == two.sampled == one.clients
        assert set(two.clients) <= set(two.sampled)
        assert list(two.clients) == sorted(two.clients)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_a_client_fails_with_the_given_probability_in_every_round_afresh(dropout: float) -> None:
    p, n = uniform(1.0, dropout=dropout), 100
    answered = np.array([np.isin(np.arange(n), p(0, r, [1] * n, {"now": 0.0}).clients) for r in range(60)])
    spread = math.sqrt(dropout * (1 - dropout))
    assert abs((~answered).mean() - dropout) < 4 * spread / math.sqrt(answered.size)
    for axis, other in ((0, 60), (1, n)):  # neither clients nor rounds have luck of their own
        means = (~answered).mean(axis)
        assert means.std() == pytest.approx(spread / math.sqrt(other), rel=0.35)


def test_weights_are_shared_out_among_the_survivors() -> None:
    """theta = sum over survivors of |D_k| / sum |D_k| theta_k, in NumPy; sizes differ, so equal weights would show."""
    exp = small("aggregator=fedavg", "participation.dropout=0.5", "rounds=4", "partition.sigma=0.8", "seed=2")
    states, rows = history(exp)
    partial = 0
    for r, turn in enumerate(turns(exp, 4)):
        if not turn.clients:
            continue
        partial += 1 < len(turn.clients) < len(turn.sampled)
        start, sizes = linear(states[r].model.params), {k: len(exp.data.split.training(k)) for k in turn.clients}
        ends = {k: trained(exp, start, k, r) for k in turn.clients}
        total = sum(sizes.values())
        expected = {n: sum(sizes[k] / total * ends[k][n] for k in ends) for n in start}
        assert_close(states[r + 1].model.params, expected)
        deltas = {k: {n: start[n] - ends[k][n] for n in start} for k in ends}
        assert rows[r]["norm/E"] == pytest.approx(sum(sizes[k] / total * reference.norm(deltas[k]) for k in ends), 1e-4)
    assert partial, "some round has lost some of its clients, with survivors of different sizes"


def test_uniform_weights_are_one_over_the_survivors() -> None:
    exp = small("aggregator=fedavg", "aggregator.weighting=uniform", "participation.dropout=0.5", "rounds=3", "seed=2")
    states, _ = history(exp)
    for r, turn in enumerate(turns(exp, 3)):
        start = linear(states[r].model.params)
        ends = [trained(exp, start, k, r) for k in turn.clients]
        expected = {n: np.mean([e[n] for e in ends], axis=0) if ends else start[n] for n in start}
        assert_close(states[r + 1].model.params, expected)


SILENT = ("participation.dropout=0.8", "participation.clients_per_round=2", "rounds=12")


@pytest.mark.parametrize(
    "methods",
    [
        ("aggregator=momentum", "server_optimizer=fedavgm", "client=scaffold"),
        ("aggregator=elastic", "client_optimizer=adam", "client_optimizer.persist_state=true"),
        ("aggregator=fednnnn", "server_optimizer=fedavgm"),
        ("aggregator=norm_norm", "server_optimizer=fedadam"),
        ("aggregator=pfnm", "model=mlp", "model.hidden=[12]", "server_optimizer=fedyogi"),
        ("aggregator=fedasync", "client=loadaboost", "client.epochs=2"),
    ],
    ids=lambda m: m[0].partition("=")[2],
)
def test_a_round_that_nobody_answers_changes_nothing(methods: tuple[str, ...]) -> None:
    exp = small(*methods, *SILENT)
    states, rows = history(exp)
    assert len(rows) == 12, "the run goes on"
    silent = [r for r, turn in enumerate(turns(exp, 12)) if not turn.clients]
    assert silent
    assert silent[-1] < 11
    for r, row in enumerate(rows):
        before, after = states[r], states[r + 1]
        assert all(math.isfinite(v) for v in row.values()), row
        assert (row["clients/arrived"] == 0) == (r in silent)
        assert after.round == r + 1
        if r in silent:
            for part in ("model", "aggregator", "server", "rule", "clients"):
                assert_same(getattr(before, part), getattr(after, part))
            assert row["norm/N"] == row["norm/E"] == row["norm/N_server"] == 0
            assert row["norm/N_integrated"] == before.norm_integrated
            assert row["comm/up_bytes"] == 0
            assert row["comm/down_bytes"] > 0
            assert "client/loss" not in row, "nobody has told"
            if r and exp.aggregator.evaluate == "sent":
                assert row["test/loss"] == rows[r - 1]["test/loss"]
        else:
            assert not torch.equal(before.model.params["layers.0.weight"], after.model.params["layers.0.weight"])


def test_a_silent_first_round_leaves_the_initial_model_and_statistics() -> None:
    """With batch norm: an average over nobody would be zeros."""
    seed = next(s for s in range(50) if not uniform(2, dropout=0.8)(s, 0, [1] * 6, {"now": 0.0}).clients)
    exp = with_batch_norm(small(*SILENT, "aggregator=fedavg", f"seed={seed}"))
    states, rows = history(replace(exp, rounds=1))
    assert rows[0]["clients/arrived"] == 0
    assert_same(states[1].model, exp.task.initial_model())
    assert math.isfinite(rows[0]["test/loss"])


def test_bytes_go_down_to_all_sampled_and_come_up_from_survivors() -> None:
    one = (20 * 10 + 10) * 4
    for methods, down, up in ((("aggregator=fedavg",), 1, 1), (("client=scaffold", "aggregator=elastic"), 2, 3)):
        exp = small(*methods, "participation.dropout=0.5", "rounds=6")
        for row, turn in zip(play(exp)[1], turns(exp, 6), strict=True):
            assert row["comm/down_bytes"] == 3 * down * one
            assert row["comm/up_bytes"] == len(turn.clients) * up * one
            assert row["clients/arrived"] == len(turn.clients)


def test_the_command_writes_rows_of_silent_rounds(
    fedsim: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    overrides = ("dataset=synthetic", "dataset.train_samples=240", "dataset.test_samples=60", "partition.num_clients=6")
    done = fedsim(*overrides, *SILENT, f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    table = metrics(tmp_path / "run")
    silent = table["clients/arrived"] == "0"
    assert len(table) == 12
    assert 0 < silent.sum() < 12
    assert set(table.loc[silent, "client/loss"]) == {""}
    assert "" not in set(table.loc[~silent, "client/loss"])
    assert not table.isin(["nan", "inf"]).any().any()


# ---------------------------------------------------------------- stragglers


@dataclass(frozen=True)
class Counting(Sgd):
    """Plain training that counts its gradients, client after client."""

    taken: list[int] = field(default_factory=list)

    def start(self, context: Context) -> Model:
        self.taken.append(0)
        return super().start(context)

    def gradient(self, task: Task, params: Tree, buffers: Tree, batch: Batch, context: Context) -> tuple[Tree, Tensor]:
        self.taken[-1] += 1
        return super().gradient(task, params, buffers, batch, context)


def steps_by_hand(exp: Experiment, client: int, round: int, least: float, stragglers: float) -> int:
    epoch = math.ceil(len(exp.data.split.training(client)) / 10)
    straggles, share = rng.generator(exp.seed, "straggles", round, client).random_sample(2)
    whole = exp.client.epochs * epoch
    return max(int((least + (1 - least) * share) * whole), 1) if straggles < stragglers else whole


@pytest.mark.parametrize("least", [0.0, 0.4, 1.0])
def test_stragglers_take_their_share_of_the_steps(least: float) -> None:
    exp = small(
        *("client.epochs=3", "partition.sigma=0.5", "rounds=4", "aggregator=fedavg"),
        *("participation.stragglers=0.6", f"participation.least_effort={least}", "participation.clients_per_round=5"),
    )
    counting = Counting(3, 10)
    play(replace(exp, client=counting))
    clients = [(r, k) for r, turn in enumerate(turns(exp, 4)) for k in turn.clients]
    expected = [steps_by_hand(exp, k, r, least, 0.6) for r, k in clients]
    assert counting.taken == expected
    whole = [exp.steps[k] for _, k in clients]
    assert all(max(int(least * w), 1) <= n <= w for n, w in zip(expected, whole, strict=True))
    assert (expected == whole) == (least == 1)


def test_a_stragglers_model_is_that_of_its_first_batches() -> None:
    exp = small("client.epochs=2", "participation.stragglers=1.0", "rounds=1", "aggregator=fedavg")
    (turn,), start = turns(exp, 1), linear(exp.task.initial_model().params)
    sizes = {k: len(exp.data.split.training(k)) for k in turn.clients}
    ends = {k: trained(exp, start, k, 0, steps_by_hand(exp, k, 0, 0.1, 1.0)) for k in turn.clients}
    expected = {n: sum(sizes[k] * ends[k][n] for k in ends) / sum(sizes.values()) for n in start}
    assert_close(play(exp)[0].model.params, expected)


@pytest.mark.parametrize("methods", [(), ("client=scaffold",), ("client=loadaboost", "client.epochs=4")])
def test_full_effort_is_plain_training_bit_for_bit(methods: tuple[str, ...]) -> None:
    shared = (*methods, "rounds=3", "aggregator=elastic")
    plain, plain_rows = play(small(*shared))
    full, full_rows = play(small(*shared, "participation.stragglers=1.0", "participation.least_effort=1.0"))
    assert_same(plain, full)
    lazy, _ = play(small(*shared, "participation.stragglers=1.0", "participation.least_effort=0.2"))
    assert not torch.equal(lazy.model.params["layers.0.weight"], plain.model.params["layers.0.weight"])
    assert timeless(plain_rows) == timeless(full_rows)


def test_shares_are_uniform_above_the_least_effort() -> None:
    p = uniform(1.0, stragglers=0.3, least_effort=0.25)
    draws = [p(5, r, [1] * 100, {"now": 0.0}).effort for r in range(60)]
    shares = np.array([s for d in draws for s in d.values()])
    assert abs(len(shares) / 6000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 6000)
    assert shares.min() >= 0.25
    assert shares.max() <= 1
    even = np.sort((shares - 0.25) / 0.75)
    distance = np.abs(even - (np.arange(len(even)) + 0.5) / len(even)).max()
    assert distance < 1.63 / math.sqrt(len(even)), "Kolmogorov-Smirnov at 1 %"
    assert {k for d in draws for k in d} == set(range(100)), "nobody straggles always or never"
    assert max(sum(k in d for d in draws) for k in range(100)) < 60


# ---------------------------------------------------------------- the virtual clock


def test_a_rounds_time_by_hand() -> None:
    """Three clients of 2, 3 and 8 steps, 4 steps a second, half a second of transfers: 0.5 + 8/4 for the slowest."""
    p = uniform(3, speed=4.0, delay=0.5)
    clock: Clock = {"now": 0.0}
    for r in range(3):
        clock = p(0, r, [2, 3, 8], clock).clock
        assert clock["now"] == pytest.approx((r + 1) * 2.5)


def test_virtual_seconds_of_a_run_by_hand() -> None:
    exp = small(
        *("rounds=6", "client.epochs=2", "partition.sigma=0.7", "participation.dropout=0.3"),
        *("participation.speed=2.0", "participation.delay=0.25"),
    )
    now = 0.0
    for row, turn in zip(play(exp)[1], turns(exp, 6), strict=True):
        steps = [2 * math.ceil(len(exp.data.split.training(k)) / 10) for k in turn.clients]
        now += max((0.25 + n / 2.0 for n in steps), default=0.0)
        assert row["time/virtual_s"] == pytest.approx(now)
    assert len(set(exp.steps)) > 1


def test_the_clock_runs_for_the_steps_that_stragglers_take() -> None:
    """`delay + steps / speed`, steps being those that are really taken: a whole number, and at least one."""
    exp = small("rounds=5", "participation.stragglers=1.0", "participation.least_effort=0.0", "participation.speed=2.0")
    now = 0.0
    for r, (row, turn) in enumerate(zip(play(exp)[1], turns(exp, 5), strict=True)):
        now += max(steps_by_hand(exp, k, r, 0.0, 1.0) / 2.0 for k in turn.clients)
        assert row["time/virtual_s"] == pytest.approx(now)


def test_one_step_a_round_without_batches() -> None:
    """FedSGD: one step, however much data a client has."""
    rows = play(small("client=fedsgd", "rounds=3", "participation.speed=4.0"))[1]
    assert [row["time/virtual_s"] for row in rows] == pytest.approx([0.25, 0.5, 0.75])


def test_speeds_are_log_normal_over_clients_and_each_clients_own() -> None:
    p, n = uniform(1, speed=3.0, speed_sigma=0.8), 4000
    speeds = np.array([1 / p.duration(0, 0, k, 1.0) for k in range(n)])
    logs = np.log(speeds)
    assert logs.mean() == pytest.approx(math.log(3), abs=4 * 0.8 / math.sqrt(n))
    assert logs.std() == pytest.approx(0.8, rel=4 / math.sqrt(2 * n))
    assert (np.abs(logs - math.log(3)) < 0.8).mean() == pytest.approx(0.6827, abs=0.03)
    for time in (1, 7, 1000):
        assert [1 / p.duration(0, time, k, 1.0) for k in range(50)] == speeds[:50].tolist()
    assert [1 / p.duration(1, 0, k, 1.0) for k in range(50)] != speeds[:50].tolist()
    assert p.duration(0, 0, 5, 30.0) == pytest.approx(30 / speeds[5])


def test_delays_are_log_normal_and_fresh_every_time() -> None:
    p, n = uniform(1, speed=1e12, delay=2.0, delay_sigma=0.5), 60
    delays = np.log([[p.duration(0, t, k, 1.0) for k in range(n)] for t in range(n)])
    assert delays.mean() == pytest.approx(math.log(2), abs=4 * 0.5 / n)
    assert delays.std() == pytest.approx(0.5, rel=4 / math.sqrt(2 * n * n))
    assert len(set(delays.ravel())) == n * n
    assert abs(np.corrcoef(delays[0], delays[1])[0, 1]) < 0.5


def test_the_slowest_survivor_decides_with_speeds_and_delays() -> None:
    exp = small(
        *("rounds=5", "participation.dropout=0.3", "participation.speed_sigma=1.0", "participation.delay=2.0"),
        *("participation.delay_sigma=1.0", "participation.clients_per_round=4"),
    )
    now = 0.0
    for r, (row, turn) in enumerate(zip(play(exp)[1], turns(exp, 5), strict=True)):
        times = []
        for k in turn.clients:
            speed = math.exp(rng.generator(0, "speed", k).standard_normal())
            delay = 2.0 * math.exp(rng.generator(0, "delay", r, k).standard_normal())
            times.append(delay + math.ceil(len(exp.data.split.training(k)) / 10) / speed)
        now += max(times, default=0.0)
        assert row["time/virtual_s"] == pytest.approx(now)


@pytest.mark.parametrize("key", ["speed_sigma", "delay_sigma"])
def test_an_absurd_spread_is_refused_or_survived(key: str) -> None:
    """exp(10^4 z) is no number: never a traceback."""
    try:
        p = uniform(20, delay=1.0, **{key: 1e4})
    except BadValue:
        return
    assert isinstance(p(0, 0, [5] * 20, {"now": 0.0}).clock["now"], float)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("participation.dropout=1.0", "participation.dropout=1.0"),
        ("participation.dropout=-0.1", "participation.dropout=-0.1"),
        ("participation.stragglers=1.5", "participation.stragglers=1.5"),
        ("participation.least_effort=2", "participation.least_effort=2"),
        ("participation.speed=0", "participation.speed=0"),
        ("participation.speed_sigma=-1", "participation.speed_sigma=-1"),
        ("participation.delay=-1", "participation.delay=-1"),
        ("participation.delay=inf", "participation.delay=inf"),
        ("participation.clients_per_round=7", "participation.clients_per_round=7"),
    ],
)
def test_bad_values_are_refused_in_one_line(override: str, key: str) -> None:
    with pytest.raises(BadValue) as error:
        small(override)
    assert str(error.value).startswith(f"{key}: must be")
    assert "\n" not in str(error.value)


def test_bad_staleness_is_refused() -> None:
    for value in ("-1", "1.5"):
        with pytest.raises(BadValue, match=f"^participation.max_staleness={value}: must be a whole number >= 0"):
            small("participation=async", f"participation.max_staleness={value}")


# ---------------------------------------------------------------- asynchronous: order, staleness, who is under way


def play_events(p: Asynchronous, seed: int, steps: Sequence[int], updates: int) -> list[Turn]:
    found: list[Turn] = []
    clock: Clock = {"now": 0.0}
    for r in range(updates):
        found.append(p(seed, r, steps, clock))
        clock = found[-1].clock
    return found


def running(turn: Turn) -> list[list[float]]:
    entries = turn.clock["running"]
    assert isinstance(entries, list)
    return entries


def test_three_clients_by_hand() -> None:
    """All three train at once, 1 step a second and half a second of transfers, so a client needs 2.5, 3.5 or 8.5 s and
    is sent the next model when it is done:  0 at 2.5, 5, 7.5, 10 ...;  1 at 3.5, 7, 10.5, 14;  2 at 8.5 and 17."""
    found = play_events(asynchronous(3, delay=0.5), 0, [2, 3, 8], 12)
    assert [(t.clock["now"], *t.clients, r - t.version) for r, t in enumerate(found)] == [
        (2.5, 0, 0),
        (3.5, 1, 1),  # 0's first came in between
        (5.0, 0, 1),
        (7.0, 1, 1),
        (7.5, 0, 1),
        (8.5, 2, 5),  # five updates since the very first model
        (10.0, 0, 1),
        (10.5, 1, 3),
        (12.5, 0, 1),
        (14.0, 1, 1),
        (15.0, 0, 1),
        (17.0, 2, 5),
    ]
    assert all(t.sampled == t.clients and not t.discarded and not t.effort for t in found)


def test_too_stale_updates_are_thrown_away_by_hand() -> None:
    """The same with max_staleness = 3: client 2's first update (staleness 5) is dropped at 8.5 s. It is sent the model
    of that moment, version 5, and comes back at 17 s, five updates later again."""
    found = play_events(asynchronous(3, max_staleness=3, delay=0.5), 0, [2, 3, 8], 10)
    assert [(t.clock["now"], *t.clients, r - t.version, t.discarded) for r, t in enumerate(found[:9])] == [
        (2.5, 0, 0, 0),
        (3.5, 1, 1, 0),
        (5.0, 0, 1, 0),
        (7.0, 1, 1, 0),
        (7.5, 0, 1, 0),
        (10.0, 0, 0, 1),
        (10.5, 1, 2, 0),
        (12.5, 0, 1, 0),
        (14.0, 1, 1, 0),
    ]
    assert sorted(running(found[5]))[-1][:3] == [17.0, 2, 5]
    assert found[9].discarded == 0
    assert found[9].clock["now"] == 15.0
    at_the_limit = play_events(asynchronous(3, max_staleness=5, delay=0.5), 0, [2, 3, 8], 12)
    assert not any(t.discarded for t in at_the_limit), "staler than 5 would be 6"
    assert at_the_limit[5].clients == [2]


@dataclass(frozen=True)
class Predictable(Asynchronous):
    """Whom an idle place goes to, by a rule that the plain loop below can follow."""

    def _idle(self, seed: int, dispatch: int, num_clients: int, busy: set[int]) -> int:
        return next_idle(dispatch, num_clients, busy)


def next_idle(dispatch: int, num_clients: int, busy: set[int]) -> int:
    return next(
        k % num_clients for k in range(5 * dispatch, 6 * dispatch + 2 * num_clients) if k % num_clients not in busy
    )


def simulated(p: Asynchronous, seed: int, steps: Sequence[int], updates: int) -> list[tuple]:
    """Asynchronous training once more: a list of who is on the way, searched from end to end for the next one done."""
    n = len(steps)
    away: list[dict] = []
    sent = 0
    log: list[tuple] = []

    def send(now: float, client: int, version: int) -> None:
        nonlocal sent
        number, sent = sent, sent + 1
        fails = bool(rng.generator(seed, "fails", number, client).random_sample() < p.dropout)
        speed = p.speed * math.exp(p.speed_sigma * rng.generator(seed, "speed", client).standard_normal())
        delay = p.delay * math.exp(p.delay_sigma * rng.generator(seed, "delay", number, client).standard_normal())
        away.append({"k": client, "v": version, "done": now + delay + steps[client] / speed, "fails": fails})

    for client in sorted(rng.sample(rng.generator(seed, "cohort", 0), n, p.count(n)).tolist()):
        send(0.0, client, 0)
    made, discarded = 0, 0
    while made < updates:
        first = away[0]
        for entry in away:
            if entry["done"] < first["done"]:
                first = entry
        away.remove(first)
        late = p.max_staleness is not None and made - first["v"] > p.max_staleness
        if first["fails"] or late:
            discarded += not first["fails"]
            send(first["done"], next_idle(sent, n, {e["k"] for e in away}), made)
            continue
        made += 1
        send(first["done"], next_idle(sent, n, {e["k"] for e in away}), made)
        on_the_way = sorted((e["k"], e["v"]) for e in away)
        log.append((first["done"], first["k"], first["v"], discarded, on_the_way))
        discarded = 0
    return log


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    steps=st.lists(st.integers(1, 20), min_size=3, max_size=9),
    share=st.floats(0.2, 1.0),
    dropout=st.sampled_from([0.0, 0.3, 0.7]),
    max_staleness=st.sampled_from([None, 0, 1, 3]),
)
def test_events_come_in_the_order_of_a_plain_loop(
    seed: int, steps: list[int], share: float, dropout: float, max_staleness: int | None
) -> None:
    p = Predictable(
        share, dropout, stragglers=0.0, least_effort=0.3, speed=2.0, speed_sigma=0.7, delay=0.4, delay_sigma=0.3,
        max_staleness=max_staleness,
    )  # fmt: skip
    found = play_events(p, seed, steps, 25)
    expected = simulated(p, seed, steps, 25)
    for r, (turn, (now, client, version, discarded, on_the_way)) in enumerate(zip(found, expected, strict=True)):
        assert turn.clock["now"] == pytest.approx(now, rel=1e-12), r
        assert (turn.clients, turn.version, turn.discarded) == ([client], version, discarded), r
        assert sorted((int(e[1]), int(e[2])) for e in running(turn)) == on_the_way


def test_stragglers_come_back_after_the_steps_they_take() -> None:
    """One client at a time, of 7 steps, 2 a second: the n-th to be sent a model takes its own share of them."""
    now = 0.0
    for r, turn in enumerate(play_events(asynchronous(1, stragglers=0.7, speed=2.0), 0, [7] * 5, 20)):
        (client,) = turn.clients
        straggles, share = rng.generator(0, "straggles", r, client).random_sample(2)
        effort = 0.1 + 0.9 * share if straggles < 0.7 else 1.0
        assert turn.effort.get(client, 1.0) == pytest.approx(effort)
        now += max(int(7 * effort), 1) / 2.0
        assert turn.clock["now"] == pytest.approx(now)


@pytest.mark.parametrize("count", [1, 4, 7, 10, 0.5])
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.6}, {"max_staleness": 1}])
def test_always_as_many_under_way_and_nobody_twice(count: int | float, changes: dict[str, float]) -> None:
    given_staleness = int(changes["max_staleness"]) if "max_staleness" in changes else None
    rest = {k: v for k, v in changes.items() if k != "max_staleness"}
    p = asynchronous(count, given_staleness, speed_sigma=0.9, **rest)
    expected, last = (5 if count == 0.5 else count), 0.0
    for r, turn in enumerate(play_events(p, 1, list(range(1, 11)), 80)):
        entries = running(turn)
        now = turn.clock["now"]
        assert isinstance(now, float)
        assert len(entries) == expected
        assert len({int(e[1]) for e in entries}) == expected, "no client is on its way twice"
        assert all(e[0] >= now for e in entries), "nobody is overdue"
        assert all(0 <= e[2] <= r + 1 for e in entries)
        assert r + 1 in {int(e[2]) for e in entries}, "the newest model has gone out"
        assert r >= turn.version
        assert now >= last
        last = now
        if given_staleness is not None:
            assert r - turn.version <= given_staleness


def test_idle_clients_are_chosen_evenly() -> None:
    for n, busy in ((10, {1, 2, 7}), (10, set(range(7)))):  # both ways of drawing
        drawn = [asynchronous(3)._idle(0, d, n, busy) for d in range(3000)]
        counts = np.bincount(drawn, minlength=n)
        free = sorted(set(range(n)) - busy)
        assert not counts[sorted(busy)].any()
        share = 1 / len(free)
        assert np.abs(counts[free] - 3000 * share).max() < 4.5 * math.sqrt(3000 * share * (1 - share))


def test_a_turn_is_a_function_of_its_clock() -> None:
    """Called twice with the same clock, it answers twice the same, and leaves the clock as it was."""
    p = asynchronous(3, speed_sigma=0.5, dropout=0.3)
    turn = play_events(p, 0, [3] * 8, 5)[-1]
    before = [list(e) for e in running(turn)]
    one, two = (p(0, 5, [3] * 8, turn.clock) for _ in range(2))
    assert one == two
    assert running(turn) == before


def test_an_asynchronous_run_with_failures_ends() -> None:
    exp = small("participation=async", "participation.dropout=0.9", "rounds=25", "aggregator=fedasync", "eval.every=25")
    _, rows = play(exp)
    assert len(rows) == 25
    assert all(row["clients/arrived"] == 1 for row in rows)
    assert all(math.isfinite(v) for row in rows for v in row.values())


def test_discarded_updates_have_been_sent_up_all_the_same() -> None:
    """`one up from each that answers`: 210 floats for the update that is used, and for each that came too late."""
    rows = play(small("participation=async", "participation.max_staleness=0", "rounds=10", "eval.every=10"))[1]
    rows = [{**row, "models": row["comm/up_bytes"] / 840 / 2} for row in rows]  # elastic sends two
    assert [row["models"] for row in rows] == [1 + row["async/discarded"] for row in rows]


ASYNC = ("participation=async", "participation.speed_sigma=1.0", "partition.sigma=0.5", "aggregator=fedasync")


def test_snapshots_are_the_versions_under_way() -> None:
    exp = small(
        *(*ASYNC, "client=scaffold", "rounds=20", "eval.every=20"),
        *("participation.dropout=0.2", "participation.max_staleness=3"),
    )
    states, rows = history(exp)
    stale = 0
    for r, state in enumerate(states[1:], start=1):
        entries = state.clock["running"]
        assert isinstance(entries, list)
        wanted = {int(e[2]) for e in entries}
        assert set(state.underway) == wanted
        for version, broadcast in state.underway.items():
            assert_same(broadcast.model, states[version].model)
            assert_same(broadcast.shared, states[version].rule)
            stale += version < r
    assert stale > 0
    assert any(row["async/staleness"] > 0 for row in rows)
    assert any(row["async/discarded"] > 0 for row in rows)


def test_synchronous_rounds_keep_no_snapshots() -> None:
    states, rows = history(small("rounds=3"))
    assert all(not s.underway for s in states)
    assert not any(row.get(name) for row in rows for name in ("async/staleness", "async/discarded"))


@pytest.mark.parametrize(
    "methods",
    [
        ("participation=async", "aggregator=fedasync", "client=fedprox"),
        ("participation=async", "participation.max_staleness=2", "participation.dropout=0.3", "aggregator=elastic"),
        ("participation=async", "client=scaffold", "participation.stragglers=0.5", "schedule=cosine"),
        ("participation=async", "aggregator=momentum", "client_optimizer=adam", "client_optimizer.persist_state=true"),
        ("participation=uniform", "participation.dropout=0.6", "client=scaffold", "participation.delay_sigma=0.5"),
        ("participation=uniform", "participation.dropout=0.3", "participation.stragglers=1.0", "aggregator=momentum"),
    ],
)
def test_killed_and_resumed_exactly(methods: tuple[str, ...], tmp_path: Path) -> None:
    exp = small(*methods, "participation.speed_sigma=1.0", "rounds=12")
    whole, rows = play(exp)
    half, first = play(replace(exp, rounds=5))
    checkpoint.save(tmp_path / "checkpoint.pt", half, elapsed_s=1.0)
    torch.manual_seed(7)
    restored, _ = checkpoint.load(tmp_path / "checkpoint.pt", torch.device("cpu"))
    assert_same(restored, half)
    assert restored.clock == half.clock
    resumed, last = play(small(*methods, "participation.speed_sigma=1.0", "rounds=12"), restored)
    assert_same(resumed, whole)
    assert (resumed.round, resumed.clock, resumed.norm_integrated) == (12, whole.clock, whole.norm_integrated)
    assert timeless(first[:4] + last) == timeless(rows[:4] + rows[5:])


# ---------------------------------------------------------------- FedAsync


def batch_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def with_batch_norm(exp: Experiment) -> Experiment:
    return replace(exp, task=Task(batch_normed(), exp.data.dataset))


def fed_async(alpha: float = 0.6, staleness: str = "polynomial", a: float = 0.5, b: int = 4) -> FedAsync:
    return FedAsync("samples", "sent", alpha, staleness, a, b)


@pytest.mark.parametrize(
    ("rule", "d", "expected"),
    [
        (fed_async(staleness="constant"), 0, 1.0),
        (fed_async(staleness="constant"), 9, 1.0),
        (fed_async(a=0.5), 0, 1.0),
        (fed_async(a=0.5), 3, 0.5),  # 4^-1/2
        (fed_async(a=2.0), 2, 1 / 9),
        (fed_async(staleness="hinge", a=0.5, b=4), 4, 1.0),
        (fed_async(staleness="hinge", a=0.5, b=4), 6, 0.5),  # 1 / (0.5 * 2 + 1)
        (fed_async(staleness="hinge", a=10.0, b=0), 3, 1 / 31),
    ],
)
def test_staleness_functions_and_the_mix_by_hand(rule: FedAsync, d: int, expected: float) -> None:
    """x = (1, 2) and x_new = (3, 6), statistics 10 and 20."""
    assert rule.s(d) == pytest.approx(expected)
    a_t = 0.6 * expected
    server = Model({"w": torch.tensor([1.0, 2.0])}, {"mean": torch.tensor([10.0]), "count": torch.tensor(4)})
    cohort = Cohort(
        server=server,
        delta={"w": torch.tensor([1.0 - 3.0, 2.0 - 6.0])},
        buffers={"mean": torch.tensor([20.0]), "count": torch.tensor(9)},
        measured=None,
        N=torch.zeros(2),
        E=torch.zeros(2),
        loss=torch.zeros(()),
        states={},
        count=1,
        staleness=d,
    )
    found = rule.direction(cohort, {})
    moved = server.params["w"] - found.tree["w"]
    mix = [(1 - a_t) * 1 + a_t * 3, (1 - a_t) * 2 + a_t * 6]
    assert moved.tolist() == pytest.approx(mix)
    assert found.buffers is not None
    assert found.buffers["mean"].item() == pytest.approx((1 - a_t) * 10 + a_t * 20)
    assert found.buffers["count"].dtype == torch.int64
    assert 4 <= found.buffers["count"].item() <= 9
    assert server.buffers["mean"].item() == 10.0, "nothing is changed in place"


def weight_of(exp: Experiment, d: int) -> float:
    """a_t, from the paper."""
    rule = exp.aggregator
    assert isinstance(rule, FedAsync)
    if rule.staleness == "polynomial":
        return rule.alpha * (d + 1) ** -rule.a
    return rule.alpha * (1.0 if rule.staleness == "constant" or d <= rule.b else 1 / (rule.a * (d - rule.b) + 1))


@pytest.mark.parametrize("staleness", ["constant", "polynomial", "hinge"])
def test_a_run_of_fedasync_in_numpy(staleness: str) -> None:
    """Every client trains from the model that it was sent, and is mixed into the model as it then is."""
    exp = small(*ASYNC, "rounds=20", "eval.every=20", f"aggregator.staleness={staleness}", "aggregator.b=1")
    states, rows = history(exp)
    versions = [linear(states[0].model.params)]
    clock: Clock = {"now": 0.0}
    seen = set()
    for r in range(20):
        turn = exp.participation(exp.seed, r, exp.steps, clock)
        clock, (client,) = turn.clock, turn.clients
        new = trained(exp, versions[turn.version], client, turn.version)
        a_t, x = weight_of(exp, r - turn.version), versions[-1]
        versions.append({n: (1 - a_t) * x[n] + a_t * new[n] for n in x})
        assert_close(states[r + 1].model.params, versions[-1], atol=1e-4)
        assert rows[r]["async/staleness"] == r - turn.version
        assert rows[r]["norm/E"] == pytest.approx(reference.norm({n: x[n] - new[n] for n in x}), rel=1e-3)
        assert rows[r]["time/virtual_s"] == clock["now"]
        seen.add(r - turn.version)
    assert len(seen) > 2, "of several stalenesses"


def test_statistics_are_mixed_as_the_parameters_are() -> None:
    exp = with_batch_norm(small(*ASYNC, "rounds=12", "eval.every=12", "partition.sigma=0"))
    states, _ = history(exp)
    clock: Clock = {"now": 0.0}
    seen = set()
    for r in range(12):
        turn = exp.participation(exp.seed, r, exp.steps, clock)
        clock, before = turn.clock, states[r]
        a_t = weight_of(exp, r - turn.version)
        seen.add(r - turn.version)
        sent = replace(before, model=states[turn.version].model, underway={}, round=turn.version)
        new = local.train(assign(exp, sent, Turn((), (), {}, turn.version, {}, 0)), turn.clients[0])
        for name, x in before.model.params.items():
            mixed = (1 - a_t) * x + a_t * new.params[name]
            torch.testing.assert_close(states[r + 1].model.params[name], mixed, rtol=1e-4, atol=1e-5)
        for name in ("1.running_mean", "1.running_var"):
            mixed = (1 - a_t) * before.model.buffers[name] + a_t * new.buffers[name]
            torch.testing.assert_close(states[r + 1].model.buffers[name], mixed, rtol=1e-4, atol=1e-5)
        assert states[r + 1].model.buffers["1.num_batches_tracked"].dtype == torch.int64
    assert len(seen) > 1


@pytest.mark.parametrize("staleness", ["constant", "polynomial", "hinge"])
def test_one_worker_with_full_weight_is_sequential_sgd(staleness: str) -> None:
    """Round after round the next client goes on with the last one's model."""
    exp = small(
        *("participation=async", "participation.clients_per_round=1", "aggregator=fedasync", "aggregator.alpha=1.0"),
        *(f"aggregator.staleness={staleness}", "client.epochs=2", "rounds=8"),
    )
    states, rows = history(exp)
    x, clock, clients = linear(states[0].model.params), {"now": 0.0}, []
    for r in range(8):
        turn = exp.participation(exp.seed, r, exp.steps, clock)
        clock = turn.clock
        assert turn.version == r
        clients += turn.clients
        x = trained(exp, x, turn.clients[0], r)
        assert_close(states[r + 1].model.params, x, atol=1e-4)
        assert rows[r]["async/staleness"] == 0
    assert len(set(clients)) > 2


def test_in_synchronous_rounds_alpha_is_a_server_rate() -> None:
    for alpha in (0.6, 1.0):
        shared = ("rounds=4", "partition.sigma=0.5")
        mixed, rows = play(small("aggregator=fedasync", f"aggregator.alpha={alpha}", *shared))
        rated, expected = play(small("aggregator=fedavg", f"server_optimizer.lr={alpha}", *shared))
        for name, p in rated.model.params.items():
            torch.testing.assert_close(mixed.model.params[name], p, rtol=1e-6, atol=1e-7)
        assert [r["client/loss"] for r in rows] == pytest.approx([r["client/loss"] for r in expected], rel=1e-5)


@pytest.mark.parametrize(
    "methods",
    [
        ("aggregator=elastic", "server_optimizer.lr=0.3"),  # zeta > 1 beyond a stale client's model is no descent
        ("aggregator=elastic", "client=fedprox", "server_optimizer=fedavgm"),
        ("aggregator=fedasync", "client=fedprox"),
        ("aggregator=fedasync", "client=scaffold"),
        ("aggregator=fedasync", "client=scaffold", "client.option=1"),
        ("aggregator=fedasync", "client=loadaboost", "client.epochs=4"),
        ("aggregator=fedasync", "client=pfedme"),
        ("aggregator=fedasync", "client=perfedavg"),
    ],
    ids=lambda m: " ".join(o.partition("=")[2] for o in m),
)
def test_every_method_learns_asynchronously(methods: tuple[str, ...]) -> None:
    exp = small("participation=async", *methods, "rounds=30", "eval.every=30")
    start = initial_state(exp)
    before = {name: t.clone() for name, t in leaves(start).items()}
    _, rows = play(exp, start)
    for name, t in leaves(start).items():
        assert torch.equal(t, before[name]), "changed in place"
    data = exp.data.dataset
    untrained = exp.task.evaluate(start.model, data, data.test_x, data.test_y, 100)
    assert rows[-1]["test/loss"] < untrained.loss_sum / untrained.count
    assert max(row["async/staleness"] for row in rows) > 0


def test_elastic_measures_at_the_model_that_was_sent() -> None:
    """Omega of an old model scales the distance from the present one, in NumPy."""
    exp = small(
        "participation=async", "aggregator=elastic", "participation.speed_sigma=1.0", "rounds=8", "eval.every=8"
    )
    states, _ = history(exp)
    clock: Clock = {"now": 0.0}
    stale = 0
    for r in range(8):
        turn = exp.participation(exp.seed, r, exp.steps, clock)
        clock, (client,) = turn.clock, turn.clients
        old, x = linear(states[turn.version].model.params), linear(states[r].model.params)
        held = exp.data.dataset.train_x[exp.data.split.sensitivity(client)].numpy().astype(float)
        omega = reference.sensitivity(old, [held[i : i + 10] for i in range(0, len(held), 10)], mu=0.95)
        zeta = {n: 1 + 0.5 - o / o.max() for n, o in omega.items()}
        new = trained(exp, old, client, turn.version)
        assert_close(states[r + 1].model.params, {n: x[n] - zeta[n] * (x[n] - new[n]) for n in x}, atol=1e-4)
        stale += r > turn.version
    assert stale


def test_scaffold_with_old_control_variates_in_numpy() -> None:
    """A client works with the model and the c that it was sent, and with its own c_i; c moves by 1/N of its change."""
    exp = small("participation=async", "client=scaffold", "aggregator=fedasync", "aggregator.alpha=0.5", "rounds=10")
    exp = replace(exp, eval=replace(exp.eval, every=10))
    states, _ = history(exp)
    zero = {n: np.zeros_like(v) for n, v in linear(states[0].model.params).items()}
    models, cs, own = [linear(states[0].model.params)], [zero], {}
    clock: Clock = {"now": 0.0}
    for r in range(10):
        turn = exp.participation(exp.seed, r, exp.steps, clock)
        clock, (k,) = turn.clock, turn.clients
        x, c, c_k = models[turn.version], cs[turn.version], own.get(k, zero)
        y, drawn = dict(x), list(exp.data.client(k, turn.version, 10).batches(1))
        for inputs, labels in drawn:
            g = reference.loss_gradient(y, inputs.numpy().astype(float), labels.numpy())
            y = {n: y[n] - 0.1 * (g[n] - c_k[n] + c[n]) for n in y}
        new = {n: c_k[n] - c[n] + (x[n] - y[n]) / (len(drawn) * 0.1) for n in x}
        cs.append({n: cs[-1][n] + (new[n] - c_k[n]) / 6 for n in new})
        own[k] = new
        a_t = weight_of(exp, r - turn.version)
        models.append({n: (1 - a_t) * models[-1][n] + a_t * y[n] for n in y})
        assert_close(states[r + 1].model.params, models[-1], atol=1e-4)
        assert_close(states[r + 1].rule["c"], cs[-1], atol=1e-4)


def test_a_stale_clients_rate_and_batches_are_those_of_its_dispatch() -> None:
    exp = small(*ASYNC, "schedule=cosine", "rounds=12", "eval.every=12")
    rows = play(exp)[1]
    for r, (row, turn) in enumerate(zip(rows, turns(exp, 12), strict=True)):
        assert row["client_lr"] == pytest.approx(0.1 * (1 + math.cos(math.pi * turn.version / 12)) / 2, rel=1e-5), r


def test_fedasyncs_bad_values() -> None:
    for override in ("aggregator.alpha=0", "aggregator.alpha=1.1", "aggregator.a=0", "aggregator.b=-1"):
        with pytest.raises(BadValue, match=f"^{override}"):
            small("aggregator=fedasync", override)
    with pytest.raises(BadValue, match="constant, polynomial, hinge"):
        small("aggregator=fedasync", "aggregator.staleness=linear")


def test_the_configs_of_both_schedulers_have_the_same_keys() -> None:
    one, two = (config(f"participation={name}")["participation"] for name in ("uniform", "async"))
    assert set(two) - set(one) == {"max_staleness"}
    assert set(one) <= set(two)
    assert isinstance(experiment("participation=async", "dataset=synthetic").participation, Asynchronous)
