"""The channel between clients and server: clipping, noise, masks, what they promise together, and what goes past it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from conftest import experiment, play, small
from torch import Tensor, nn

from fedsim import checkpoint
from fedsim.check import BadValue, InputError
from fedsim.cohort import Cohort
from fedsim.local import train
from fedsim.privacy import accountant
from fedsim.privacy.channel import Part, Privacy
from fedsim.runner import Experiment, Row, RunState, assign, initial_state, weights
from fedsim.task import Task
from fedsim.types import Tree, Turn

UNIFORM, SAMPLES = "aggregator.weighting=uniform", "aggregator.weighting=samples"
NOISY = ("privacy=gaussian", UNIFORM)
WIDE = ("dataset.features=1500", "dataset.train_samples=120", "dataset.test_samples=20")
"""15,010 parameters: enough for a standard deviation."""


def with_batch_norm(exp: Experiment) -> Experiment:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    return replace(exp, task=Task(module, exp.data.dataset))


def turn_of(exp: Experiment, state: RunState) -> Turn:
    return exp.participation(exp.seed, state.round, exp.steps, state.clock)


def cohort_of(exp: Experiment, state: RunState | None = None) -> Cohort:
    """What the server gets to see of a round."""
    state = state or initial_state(exp)
    turn = turn_of(exp, state)
    return exp.engine(assign(exp, state, turn), turn.clients, weights(exp, turn.clients))


def parts(cohort: Cohort) -> dict[str, Tree]:
    found = {"delta": cohort.delta, "buffers": cohort.buffers, "measured": cohort.measured, "sent": cohort.sent}
    return {name: tree for name, tree in found.items() if tree}


def flat(tree: Tree) -> np.ndarray:
    return np.concatenate([t.double().numpy().ravel() for t in tree.values()])


def leaves(node: object, path: str = "") -> dict[str, Tensor]:
    if isinstance(node, Tensor):
        return {path: node}
    if isinstance(node, RunState):
        names = ("aggregator", "server", "rule", "clients")
        node = {name: getattr(node, name) for name in names} | {"p": node.model.params, "b": node.model.buffers}
    if isinstance(node, Mapping):
        return {name: t for key, child in node.items() for name, t in leaves(child, f"{path}/{key}").items()}
    return {}


def assert_same(one: RunState, two: RunState) -> None:
    first, second = leaves(one), leaves(two)
    assert first.keys() == second.keys()
    for name, t in first.items():
        assert torch.equal(t, second[name]), name


def timeless(rows: Sequence[Row], *without: str) -> list[Row]:
    return [{k: v for k, v in row.items() if k not in ("time/round_s", *without)} for row in rows]


def linear(params: Tree) -> reference.Params:
    return {"W": params["layers.0.weight"].numpy().astype(float), "b": params["layers.0.bias"].numpy().astype(float)}


def trained(exp: Experiment, start: reference.Params, client: int, round: int = 0) -> reference.Params:
    drawn = exp.data.client(client, round, exp.client.batch_size).batches(exp.client.epochs)
    return reference.sgd(start, [(x.numpy().astype(float), y.numpy()) for x, y in drawn], lr=exp.client_optimizer.lr)


def unless_refused(*overrides: str) -> Experiment | None:
    """Norm-Norm and FedNNNN need the length of each client's update; to refuse them is one way to keep a promise."""
    try:
        return small(*overrides)
    except InputError:
        assert {"aggregator=norm_norm", "aggregator=fednnnn"} & set(overrides)
        return None


def clipped(p: reference.Params, bound: float) -> reference.Params:
    """x min(1, S / ||x||), the norm over everything together."""
    return {n: v * min(1.0, bound / reference.norm(p)) for n, v in p.items()}


METHODS = [
    ("aggregator=fedavg",),
    ("aggregator=elastic", "client=scaffold"),
    ("aggregator=momentum", "server_optimizer=fedavgm", "client=fedprox"),
]


# ---------------------------------------------------------------- nothing asked for


@pytest.mark.parametrize("methods", METHODS, ids=lambda m: " ".join(m))
@pytest.mark.parametrize("batch_norm", [False, True])
def test_no_noise_and_no_clipping_is_plain_bit_for_bit(methods: tuple[str, ...], batch_norm: bool) -> None:
    def change(exp: Experiment) -> Experiment:
        return with_batch_norm(exp) if batch_norm else exp

    shared = (*methods, "rounds=3", "partition.sigma=0")
    plain, rows = play(change(small(*shared, SAMPLES)))
    off = (SAMPLES, "privacy.noise_multiplier=0", "privacy.clip=null")
    none, none_rows = play(change(small(*shared, "privacy=gaussian", *off)))
    assert_same(plain, none)
    assert timeless(rows) == timeless(none_rows)
    if batch_norm:
        return  # its statistics are not clipped, whatever the bound
    loose = (SAMPLES, "privacy.noise_multiplier=0", "privacy.clip=1e9", "privacy.clip_extra=1e9")
    wide, wide_rows = play(change(small(*shared, "privacy=gaussian", *loose)))
    assert_same(plain, wide)
    assert timeless(rows) == timeless(wide_rows, "privacy/clipped_fraction")
    assert all(row["privacy/clipped_fraction"] == 0 for row in wide_rows)
    assert not any(name.startswith("privacy/") for row in rows + none_rows for name in row)


# ---------------------------------------------------------------- clipping


CLIPPED = ("privacy=gaussian", "privacy.noise_multiplier=0", "partition.sigma=0.6", "client.epochs=2", "rounds=1")


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_clipping_against_numpy(weighting: str, rank: int) -> None:
    """A bound between the clients' norms: some are scaled down to it as a whole, others are left as they are."""
    exp = small(*CLIPPED, "aggregator=fedavg", f"aggregator.weighting={weighting}")
    start = linear(exp.task.initial_model().params)
    clients = turn_of(exp, initial_state(exp)).clients
    deltas = {k: {n: start[n] - v for n, v in trained(exp, start, k).items()} for k in clients}
    norms = sorted(reference.norm(d) for d in deltas.values())
    bound = norms[rank] * 0.999
    exp = small(*CLIPPED, "aggregator=fedavg", f"aggregator.weighting={weighting}", f"privacy.clip={bound}")
    sizes = {k: len(exp.data.split.training(k)) if weighting == "samples" else 1 for k in clients}
    total = sum(sizes.values())
    mean = {n: sum(sizes[k] / total * clipped(deltas[k], bound)[n] for k in clients) for n in start}
    state, (row,) = play(exp)
    found = linear(state.model.params)
    for name, value in mean.items():
        np.testing.assert_allclose(start[name] - found[name], value, rtol=1e-3, atol=2e-6)
    assert row["privacy/clipped_fraction"] == pytest.approx((3 - rank) / 3)
    assert row["norm/N_server"] <= bound * (1 + 1e-5)
    assert "privacy/epsilon" not in row, "without noise there is none"


def test_sensitivities_are_clipped_to_clip_extra_in_numpy() -> None:
    """Omega_k and delta_k each to their own bound; zeta then comes from the clipped Omega."""
    exp = small(*CLIPPED, "aggregator=elastic", SAMPLES, "privacy.clip=0.4", "privacy.clip_extra=0.05")
    start = linear(exp.task.initial_model().params)
    clients = turn_of(exp, initial_state(exp)).clients
    sizes = np.array([len(exp.data.split.training(k)) for k in clients])
    w = sizes / sizes.sum()
    omegas, deltas = [], []
    for k in clients:
        held = exp.data.dataset.train_x[exp.data.split.sensitivity(k)].numpy().astype(float)
        omegas.append(reference.sensitivity(start, [held[i : i + 10] for i in range(0, len(held), 10)], mu=0.95))
        deltas.append({n: start[n] - v for n, v in trained(exp, start, k).items()})
    assert all(reference.norm(o) > 0.05 for o in omegas)
    assert len({round(reference.norm(o), 3) for o in omegas}) > 1, "of different lengths: the weights change"
    omega = {n: sum(w[i] * clipped(o, 0.05)[n] for i, o in enumerate(omegas)) for n in start}
    mean = {n: sum(w[i] * clipped(d, 0.4)[n] for i, d in enumerate(deltas)) for n in start}
    cohort = cohort_of(exp)
    assert cohort.measured is not None
    for name, value in linear(cohort.measured).items():
        np.testing.assert_allclose(value, omega[name], rtol=1e-4, atol=1e-7)
    found = linear(play(exp)[0].model.params)
    for name in start:
        zeta = 1.5 - omega[name] / omega[name].max()
        np.testing.assert_allclose(found[name], start[name] - zeta * mean[name], rtol=1e-3, atol=1e-5)


def test_control_variates_are_clipped_to_clip_extra() -> None:
    """c = sum over the cohort of clip(c_i+ - c_i) / N, from what each client would send alone."""
    exp = small(*CLIPPED, "client=scaffold", "aggregator=fedavg", "privacy.clip=1e9", "privacy.clip_extra=0.3")
    state = initial_state(exp)
    turn = turn_of(exp, state)
    work = assign(exp, state, turn)
    total = np.zeros(210)
    for k in turn.clients:
        sent = train(work, k).sent
        assert sent is not None
        vector = flat(sent)
        assert np.linalg.norm(vector) > 0.3
        total += vector * 0.3 / np.linalg.norm(vector)
    np.testing.assert_allclose(flat(play(exp)[0].rule["c"]), total / 6, rtol=1e-4, atol=1e-6)


def test_what_a_client_remembers_is_not_clipped() -> None:
    """Clipping is of what is sent; c_i stays on the client."""
    tight = small(*CLIPPED, "client=scaffold", "aggregator=fedavg", "privacy.clip_extra=0.01", "privacy.clip=0.01")
    plain = small(*CLIPPED[2:], "client=scaffold", "aggregator=fedavg")
    one, two = play(tight)[0].clients, play(plain)[0].clients
    assert one.keys() == two.keys()
    assert all(torch.equal(t, leaves(two)[name]) for name, t in leaves(one).items())


@pytest.mark.parametrize(
    ("aggregator", "most"),
    [("fedavg", 1.0), ("momentum", 1.0), ("elastic", 1.5), ("norm_norm", 1.0), ("fednnnn", 1.0), ("fedasync", 0.6)],
)
def test_clipping_bounds_the_servers_first_step(aggregator: str, most: float) -> None:
    """No client sends more than S, so the mean (and, for Norm-Norm and FedNNNN, the mean length E) is at most S:
    the first step is at most S times what the aggregator makes of it (elastic: 1 + tau; beta = 1)."""
    beta = ("aggregator.beta=1.0",) if aggregator in ("norm_norm", "fednnnn") else ()
    exp = unless_refused(*CLIPPED, f"aggregator={aggregator}", *beta, "privacy.clip=0.01")
    assert exp is None or play(exp)[1][0]["norm/N_server"] <= 0.01 * most * (1 + 1e-4)


# ---------------------------------------------------------------- noise


def noise_of(exp: Experiment, state: RunState | None = None) -> dict[str, np.ndarray]:
    """What was added to each part, from the same round without noise."""
    silent = replace(exp, privacy=replace(exp.privacy, noise_multiplier=0.0))
    with_noise, without = parts(cohort_of(exp, state)), parts(cohort_of(silent, state))
    assert with_noise.keys() == without.keys()
    return {name: flat(with_noise[name]) - flat(tree) for name, tree in without.items()}


@pytest.mark.parametrize(
    ("methods", "names"),
    [
        (("aggregator=fedavg",), ["delta"]),
        (("aggregator=elastic",), ["delta", "measured"]),
        (("aggregator=fedavg", "client=scaffold"), ["delta", "sent"]),
        (("aggregator=elastic", "client=scaffold"), ["delta", "measured", "sent"]),
    ],
    ids=lambda m: " ".join(m),
)
def test_the_noises_standard_deviation(methods: tuple[str, ...], names: list[str]) -> None:
    """z S_p sqrt(P) / m on the mean, for every one of the P parts; normal, independent, centred."""
    z, bounds, m = 1.7, {"delta": 0.3, "measured": 0.05, "sent": 0.05}, 3
    values = (f"privacy.noise_multiplier={z}", "privacy.clip=0.3", "privacy.clip_extra=0.05")
    found = noise_of(small(*WIDE, *methods, *NOISY, *values))
    assert sorted(found) == sorted(names)
    for name, noise in found.items():
        n, spread = len(noise), z * bounds[name] * math.sqrt(len(names)) / m
        assert n == 15010
        assert noise.std() == pytest.approx(spread, rel=4.5 / math.sqrt(2 * n)), name
        assert abs(noise.mean()) < 4.5 * spread / math.sqrt(n)
        assert (np.abs(noise) < spread).mean() == pytest.approx(0.6827, abs=0.02)
        assert (np.abs(noise) < 2 * spread).mean() == pytest.approx(0.9545, abs=0.01)
        assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 4.5 / math.sqrt(n)
    pairs = [(found[a], found[b]) for a in names for b in names if a < b]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 4.5 / math.sqrt(15010) for a, b in pairs)


def test_the_noise_is_on_the_model() -> None:
    """theta moves by the clipped mean and the noise: with a rate that moves nothing, by the noise alone."""
    exp = small(*WIDE, *NOISY, "aggregator=fedavg", "client_optimizer.lr=1e-30", "privacy.clip=0.5", "rounds=1")
    before, (after, (row,)) = exp.task.initial_model().params, play(exp)
    moved = np.concatenate([(after.model.params[n] - p).numpy().ravel() for n, p in before.items()])
    assert moved.std() == pytest.approx(0.5 / 3, rel=4.5 / math.sqrt(2 * 15010))
    assert row["privacy/clipped_fraction"] == 0


def test_with_failures_the_noise_is_divided_by_the_survivors() -> None:
    """The sum's noise does not depend on how many answer; the mean's does."""
    shared = (*WIDE, *NOISY, "aggregator=fedavg", "participation.dropout=0.5", "privacy.clip=0.5")
    counts = set()
    for seed in range(4):
        exp = small(*shared, f"seed={seed}")
        clients = turn_of(exp, initial_state(exp)).clients
        if clients:
            noise = noise_of(exp)["delta"]
            assert noise.std() == pytest.approx(0.5 / len(clients), rel=4.5 / math.sqrt(2 * 15010))
            counts.add(len(clients))
    assert len(counts) > 1


def test_noise_is_seeded_and_fresh_in_every_round() -> None:
    exp = small(*NOISY, "aggregator=elastic")
    start = initial_state(exp)
    rounds = [noise_of(exp, replace(start, round=r))["delta"] for r in range(3)]
    again = noise_of(small(*NOISY, "aggregator=elastic"))["delta"]
    np.testing.assert_allclose(again, rounds[0], atol=1e-7)
    other = noise_of(small(*NOISY, "aggregator=elastic", "seed=1"))["delta"]
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        assert abs(np.corrcoef(rounds[a], rounds[b])[0, 1]) < 0.35
    assert abs(np.corrcoef(rounds[0], other)[0, 1]) < 0.35


@pytest.mark.parametrize("masked", ["false", "true"])
def test_noise_and_masks_resume_exactly(masked: str, tmp_path: Path) -> None:
    exp = small(*NOISY, "aggregator=elastic", "client=scaffold", f"privacy.masked={masked}", "rounds=5")
    whole, rows = play(exp)
    half, first = play(replace(exp, rounds=2))
    checkpoint.save(tmp_path / "checkpoint.pt", half, elapsed_s=1.0)
    torch.manual_seed(3)
    resumed, last = play(exp, checkpoint.load(tmp_path / "checkpoint.pt", torch.device("cpu"))[0])
    assert_same(resumed, whole)
    assert timeless(first + last) == timeless(rows)


def test_elastics_zeta_stays_in_its_range_under_noise() -> None:
    """zeta = 1 + tau - Omega/max lies in [tau, 1 + tau] (Eq. 7). Noise may make an Omega negative, or even a whole
    layer's; sensitivities are not."""
    exp = small(*NOISY, "aggregator=elastic", "rounds=3", "privacy.noise_multiplier=2.0")
    assert all(0.5 <= row["elastic/mean_zeta"] <= 1.5 for row in play(exp)[1])
    scalar = experiment("dataset=quadratic", *NOISY, "aggregator=elastic", "rounds=8")
    assert all(0.5 <= row["elastic/mean_zeta"] <= 1.5 for row in play(scalar)[1])


def test_batch_norm_is_refused_where_its_statistics_would_be_clipped() -> None:
    """Clipping scales them towards zero, and noise makes variances negative, which is no number one division later."""
    for noise in ("0", "1.0"):
        with pytest.raises(InputError, match="batch norm") as error:
            experiment("dataset=mnist5k", "model=cnn_cifar", "privacy=gaussian", f"privacy.noise_multiplier={noise}")
        assert "\n" not in str(error.value)
    assert experiment("dataset=mnist5k", "model=cnn_cifar", MASKED).privacy.masked


# ---------------------------------------------------------------- epsilon


def test_epsilon_is_the_accountants_and_grows() -> None:
    values = ("privacy.noise_multiplier=3.0", "privacy.delta=1e-4", "participation.dropout=0.4")
    rows = play(small(*NOISY, *values, "aggregator=fedavg", "rounds=6"))[1]
    found = [row["privacy/epsilon"] for row in rows]
    assert found == [accountant.epsilon(r, 3.0, 1e-4, 6, 3) for r in range(1, 7)]
    assert found == sorted(set(found))
    assert found[0] > 0


def test_more_noise_spends_less_and_the_bounds_do_not_matter() -> None:
    def spent(*overrides: str) -> float:
        return play(small(*NOISY, *overrides, "aggregator=elastic", "rounds=1"))[1][0]["privacy/epsilon"]

    base = spent("privacy.noise_multiplier=2.0")
    assert spent("privacy.noise_multiplier=4.0") < base
    assert (
        spent("privacy.noise_multiplier=2.0", "privacy.clip=7.0", "privacy.clip_extra=0.1", "client=scaffold") == base
    )
    assert spent("privacy.noise_multiplier=2.0", "participation.clients_per_round=1") < base


# ---------------------------------------------------------------- masks


MASKED = "privacy=masked"


def masked_tolerance(m: int, bits: int, plain: np.ndarray) -> np.ndarray:
    """m roundings to fixed point of half a unit each, and the plain sum's own roundings to float32."""
    return m * 2.0 ** -(bits + 1) + (m + 1) * np.finfo(np.float32).eps * (np.abs(plain) + np.abs(plain).max())


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("methods", "names", "bits"),
    [
        (("aggregator=fedavg",), {"delta"}, 24),
        (("aggregator=elastic",), {"delta", "measured"}, 24),
        (("aggregator=fedavg", "client=scaffold"), {"delta", "sent"}, 24),
        (("aggregator=elastic", "client=scaffold"), {"delta", "measured", "sent"}, 24),
        (("aggregator=elastic", "client=scaffold"), {"delta", "measured", "sent"}, 10),
    ],
    ids=lambda m: " ".join(m) if isinstance(m, tuple) else "",
)
def test_the_masked_sum_is_the_plain_one(
    methods: tuple[str, ...], names: set[str], batch_norm: bool, bits: int
) -> None:
    shared = (*methods, "partition.sigma=0")
    exps = [small(*shared), small(*shared, MASKED, f"privacy.bits={bits}")]
    if batch_norm:
        exps, names = [with_batch_norm(e) for e in exps], names | {"buffers"}
    plain, masked = (parts(cohort_of(e)) for e in exps)
    assert plain.keys() == masked.keys() == names
    for part, tree in plain.items():
        for name, t in tree.items():
            expected, found = t.double().numpy(), masked[part][name].double().numpy()
            assert masked[part][name].shape == t.shape
            assert masked[part][name].dtype == t.dtype
            assert (np.abs(found - expected) <= masked_tolerance(3, bits, expected)).all(), (part, name)
    if batch_norm:
        counter = masked["buffers"]["1.num_batches_tracked"]
        assert counter.dtype == torch.int64
        assert counter.item() == 4, "36 samples in batches of 10"


def test_masked_numbers_are_fixed_point() -> None:
    """The server has multiples of 2^-bits and nothing finer: it works with the masked sum alone."""
    exp = small("aggregator=elastic", "client=scaffold", MASKED, "privacy.bits=8")
    for name, tree in parts(cohort_of(exp)).items():
        scaled = flat(tree) * 2**8
        assert np.array_equal(scaled, np.rint(scaled)), name


@pytest.mark.parametrize("methods", METHODS, ids=lambda m: " ".join(m))
def test_a_masked_run_follows_the_plain_one(methods: tuple[str, ...]) -> None:
    plain, rows = play(small(*methods, "rounds=5"))
    masked, masked_rows = play(small(*methods, "rounds=5", MASKED))
    for name, t in leaves(plain).items():
        torch.testing.assert_close(leaves(masked)[name], t, rtol=1e-4, atol=2e-5)
    for one, two in zip(rows, masked_rows, strict=True):
        assert one["test/loss"] == pytest.approx(two["test/loss"], rel=1e-4)
        assert one["comm/down_bytes"] == two["comm/down_bytes"]


def test_the_result_does_not_depend_on_the_keys() -> None:
    """Keys are drawn afresh from the system; two runs have the same bits."""
    overrides = ("aggregator=elastic", "client=scaffold", MASKED, "rounds=4", "participation.dropout=0.2", "seed=3")
    one, two = (play(with_batch_norm(small(*overrides, "partition.sigma=0"))) for _ in range(2))
    assert_same(one[0], two[0])
    assert timeless(one[1]) == timeless(two[1])


def test_clients_that_drop_out_are_recovered() -> None:
    """Their masks come off and the survivors' weighted sum is left."""
    shared = ("aggregator=elastic", "client=scaffold", "participation.clients_per_round=6", "partition.sigma=0.5")
    shared = (*shared, "participation.dropout=0.25", "rounds=6")
    plain_exp, masked_exp = small(*shared), small(*shared, MASKED, "privacy.threshold=0.51")
    arrived = [row["clients/arrived"] for row in play(plain_exp)[1]]
    assert min(arrived) >= 4, "enough in every round"
    assert min(arrived) < 6, "and not always all"
    plain, masked = play(plain_exp), play(masked_exp)
    assert [row["clients/arrived"] for row in masked[1]] == arrived
    for name, t in leaves(plain[0]).items():
        torch.testing.assert_close(leaves(masked[0])[name], t, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("noise", ["0.0", "1.0"])
def test_too_few_survivors_void_the_round(noise: str) -> None:
    """Of 6, a threshold of 0.67 takes 5 (4.02 rounded up): with 4 the masks stay on and nothing happens."""
    exp = small(
        *("privacy=gaussian", UNIFORM, f"privacy.noise_multiplier={noise}", "privacy.masked=true", "rounds=12"),
        *("aggregator=momentum", "client=scaffold", "participation.dropout=0.3", "participation.clients_per_round=6"),
        "aggregator.evaluate=sent",
    )
    clock, answers = {"now": 0.0}, []
    for r in range(12):
        turn = exp.participation(exp.seed, r, exp.steps, clock)
        clock = turn.clock
        answers.append(len(turn.clients))
    assert {3, 4, 5} <= set(answers), "the case is met"
    state = initial_state(exp)
    for r, count in enumerate(answers):
        after, (row,) = play(replace(exp, rounds=r + 1), state)
        assert row["clients/arrived"] == (count if count >= 5 else 0)
        assert all(math.isfinite(v) for v in row.values())
        assert row["comm/up_bytes"] == 2 * 840 * count, "they have sent, whatever became of it"
        if count < 5:
            assert_same(after, state)
        else:
            assert not torch.equal(after.model.params["layers.0.bias"], state.model.params["layers.0.bias"])
        state = after


@pytest.mark.parametrize(
    ("threshold", "sampled", "least"),
    [
        (0.67, 3, 3),
        (0.67, 6, 5),
        (0.51, 6, 4),
        (1.0, 7, 7),
        (0.6, 10, 6),
        (0.55, 100, 55),
        (0.7, 10, 7),
    ],
)
def test_the_threshold_by_hand(threshold: float, sampled: int, least: int) -> None:
    """The smallest whole number that is at least threshold * sampled: 0.55 of 100 is 55."""
    assert Privacy(None, 1.0, 0.0, 1e-5, True, 24, threshold).least(sampled) == least
    assert Privacy(1.0, 1.0, 1.0, 1e-5, False, 24, threshold).least(sampled) == 1


def test_clipped_noisy_and_masked_together() -> None:
    """Clipped before the masks, noise after them: the same noise, the same sums."""
    values = ("privacy.clip=0.2", "privacy.clip_extra=0.1", "privacy.noise_multiplier=0.5")
    shared = (*NOISY, *values, "aggregator=elastic", "client=scaffold")
    plain, masked = (cohort_of(small(*shared, f"privacy.masked={m}")) for m in ("false", "true"))
    for name, tree in parts(plain).items():
        np.testing.assert_allclose(flat(parts(masked)[name]), flat(tree), atol=3 * 2.0**-25 + 1e-6)
    one, two = (play(small(*shared, f"privacy.masked={m}", "rounds=3"))[1] for m in ("false", "true"))
    for a, b in zip(one, two, strict=True):
        assert a["privacy/epsilon"] == b["privacy/epsilon"]
        assert a["privacy/clipped_fraction"] == b["privacy/clipped_fraction"] > 0
        assert a["test/loss"] == pytest.approx(b["test/loss"], rel=1e-3)


def test_a_diverged_client_does_not_go_past_the_masks() -> None:
    """Three clients send (1, 1), (2, 2) and (4, 4), the last with an infinite sensitivity. What the server has of the
    updates is their sum or no number, never the one client's (4, 4) alone."""
    exp = small("aggregator=elastic", MASKED)
    state = initial_state(exp)
    turn = turn_of(exp, state)
    channel = exp.privacy.open(assign(exp, state, turn))
    channel.expect("delta", {"w": torch.zeros(2)})
    for k, value, omega in zip(turn.clients, (1.0, 2.0, 4.0), (1.0, 1.0, torch.inf), strict=True):
        upload = {
            "delta": Part(1.0, {"w": torch.full((2,), value)}),
            "measured": Part(1.0, {"w": torch.tensor([omega])}),
        }
        channel.add(k, upload)
    try:
        total = channel.total()["delta"]["w"]
    except InputError:
        return
    assert not total.isfinite().any() or total.tolist() == pytest.approx([7.0, 7.0])


def test_a_diverging_run_stops_as_it_does_without_masks() -> None:
    _, rows = play(small(MASKED, "client_optimizer.lr=1e30", "model=mlp", "rounds=20"))
    assert len(rows) < 20
    assert not math.isfinite(rows[-1]["client/loss"])


def test_what_has_no_fixed_point_form_is_one_line() -> None:
    with pytest.raises(InputError, match="cannot be summed securely") as error:
        play(small("aggregator=fedavg", MASKED, "client_optimizer.lr=1e9", "privacy.bits=52", "rounds=1"))
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- what cannot be promised together


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("privacy=gaussian", "aggregator=fedavg", SAMPLES),
            "aggregator.weighting=samples: must be uniform with privacy.noise_multiplier > 0",
        ),
        (("privacy=gaussian", "aggregator=elastic", SAMPLES), "aggregator.weighting=samples: must be uniform"),
        ((*NOISY, "aggregator=fedavg", "client=loadaboost", "client.epochs=2"), "client=loadaboost"),
        ((MASKED, "aggregator=fedavg", "participation=async"), "participation=uniform"),
        ((*NOISY, "aggregator=fedavg", "participation=async"), "participation=uniform"),
        (("privacy=gaussian", "privacy.noise_multiplier=0", "participation=async"), "participation=uniform"),
        ((MASKED, "aggregator=pfnm", "model=mlp"), "aggregator=pfnm"),
        (("privacy=gaussian", "privacy.noise_multiplier=0", "aggregator=pfnm", "model=mlp"), "privacy=none"),
        (("aggregator=pfnm", "model=mlp", "participation=async"), "participation=uniform"),
        ((MASKED, "aggregator=fedavg", "client=local"), "client=local"),
    ],
    ids=lambda o: " ".join(o) if isinstance(o, tuple) else "",
)
def test_refused_together(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError) as error:
        small(*overrides)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("privacy.clip=0", "privacy.clip=0: must be a number > 0"),
        ("privacy.clip=-1", "privacy.clip=-1: must be a number > 0"),
        ("privacy.clip_extra=0", "privacy.clip_extra=0: must be a number > 0"),
        ("privacy.noise_multiplier=-1", "privacy.noise_multiplier=-1: must be a number >= 0"),
        ("privacy.noise_multiplier=1e7", "privacy.noise_multiplier=10000000.0: must be a number >= 0"),
        ("privacy.delta=0", "privacy.delta=0: must be a number > 0 and < 1"),
        ("privacy.delta=1", "privacy.delta=1: must be a number > 0 and < 1"),
        ("privacy.masked=1", "privacy.masked=1: must be true or false"),
        ("privacy.bits=0", "privacy.bits=0: must be a whole number >= 1 and <= 52"),
        ("privacy.bits=53", "privacy.bits=53: must be a whole number >= 1 and <= 52"),
        ("privacy.threshold=0.5", "privacy.threshold=0.5: must be a number > 0.5 and <= 1"),
        ("privacy.clip=null", "privacy.noise_multiplier=1.0: needs clip"),
    ],
)
def test_bad_values_are_refused_in_one_line(override: str, said: str) -> None:
    with pytest.raises(BadValue) as error:
        small(*NOISY, override)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- past the channel


@pytest.mark.parametrize(
    "methods",
    [
        ("aggregator=fedavg",),
        ("aggregator=momentum", "server_optimizer=fedavgm"),
        ("aggregator=elastic", "client=fedprox"),
        ("aggregator=norm_norm",),
        ("aggregator=fednnnn",),
    ],
    ids=lambda m: " ".join(m),
)
def test_the_released_model_depends_on_clipped_updates_alone(methods: tuple[str, ...]) -> None:
    """Two cohorts whose updates differ only in length, beyond the bound: the channel makes them the same, and the next
    model (which is what epsilon is about) must be the same too; or the combination is refused."""
    shared = (*NOISY, *methods, "client.batch_size=null", "privacy.clip=1e-3", "rounds=1")
    exps = [unless_refused(*shared, f"client_optimizer.lr={lr}") for lr in (5.0, 20.0)]
    if exps[0] is None or exps[1] is None:
        return
    one, two = play(exps[0]), play(exps[1])
    assert two[1][0]["norm/E"] == pytest.approx(4 * one[1][0]["norm/E"], rel=1e-3), "the researcher sees it"
    for name, p in one[0].model.params.items():
        torch.testing.assert_close(two[0].model.params[name], p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("methods", [*METHODS, ("aggregator=fednnnn",), ("aggregator=norm_norm",)], ids=lambda m: m[0])
def test_what_the_server_decides_by_has_been_through_the_masks(methods: tuple[str, ...]) -> None:
    """Losses and lengths are for the researcher. Should the direction depend on E after all, then E must have come
    through the masked sum like everything else: a multiple of 2^-bits."""
    exp = unless_refused(*methods, MASKED, "privacy.bits=6", "client_optimizer.lr=0.5", "rounds=1")
    if exp is None:
        return
    state = initial_state(exp)
    cohort = cohort_of(exp, state)
    unknown = {"loss": torch.full_like(cohort.loss, torch.nan), "reports": (), "members": ()}
    taken = exp.aggregator.direction(cohort, state.aggregator).tree
    without = exp.aggregator.direction(replace(cohort, **unknown), state.aggregator).tree
    assert all(torch.equal(t, without[name]) for name, t in taken.items())
    doubled = exp.aggregator.direction(replace(cohort, E=2 * cohort.E), state.aggregator).tree
    if any(not torch.equal(t, doubled[name]) for name, t in taken.items()):
        scaled = cohort.E[-1].item() * 2**6
        assert scaled == round(scaled), "the direction depends on lengths that no mask has covered"
