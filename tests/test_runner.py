"""Identities and bookkeeping of whole rounds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from conftest import experiment, play, small, work_of
from torch import nn

from fedsim.data import FederatedData, Split
from fedsim.local import train
from fedsim.logger.base import RunInfo
from fedsim.logger.console import Console
from fedsim.runner import Experiment, initial_state, run, weights
from fedsim.types import Model

LONE = ("partition.num_clients=1", "participation.clients_per_round=1", "aggregator=fedavg")


def test_one_client_with_server_rate_one_is_centralised_sgd() -> None:
    """Three rounds of two epochs against torch's own module, loss and optimizer."""
    exp = small("rounds=3", "client.epochs=2", "client_optimizer.weight_decay=0.01", "model=mlp", *LONE)
    module = exp.task.module
    module.load_state_dict(exp.task.initial_model().params)
    state, _ = play(exp)
    optimizer = torch.optim.SGD(module.parameters(), exp.client_optimizer.lr, weight_decay=0.01)
    for r in range(3):
        for x, y in exp.data.client(0, r, 10).batches(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(state.model.params[name], p.detach(), rtol=1e-4, atol=1e-6)


def test_one_client_with_batch_norm_is_centralised_sgd_buffers_included() -> None:
    """At a small rate: at 0.1 this network amplifies a single rounding error a thousandfold within ten steps."""
    exp = experiment("dataset=mnist5k", "model=cnn_cifar", "rounds=2", "client_optimizer.lr=0.001", *LONE)
    data = replace(exp.data, split=replace(exp.data.split, offsets=np.array([0, 60]), held=np.array([10])))
    exp = replace(exp, data=data, eval=replace(exp.eval, every=9, train=False), rounds=2)
    module = exp.task.module
    module.load_state_dict({**exp.task.initial_model().params, **exp.task.initial_model().buffers})
    state, _ = play(exp)
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), exp.client_optimizer.lr)
    for r in range(2):
        for x, y in exp.data.client(0, r, 10).batches(1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(state.model.params[name], p.detach(), rtol=1e-4, atol=1e-6)
    for name, b in module.named_buffers():
        torch.testing.assert_close(state.model.buffers[name], b, rtol=1e-4, atol=1e-6)


def test_fedprox_without_penalty_is_plain_training_bit_for_bit() -> None:
    plain, prox = (play(small(c, "rounds=3", "client.epochs=2"))[0] for c in ("client=sgd", "client=fedprox"))
    free = play(small("client=fedprox", "client.mu=0", "rounds=3", "client.epochs=2"))[0]
    for name, p in plain.model.params.items():
        assert torch.equal(p, free.model.params[name])
        assert not torch.equal(p, prox.model.params[name])


def test_fedprox_against_numpy() -> None:
    exp = small("client=fedprox", "client.mu=0.7", "client.epochs=3", "rounds=1", *LONE)
    initial = exp.task.initial_model().params
    theta = {"W": initial["layers.0.weight"].numpy().astype(float), "b": initial["layers.0.bias"].numpy().astype(float)}
    batches = [(x.numpy().astype(float), y.numpy()) for x, y in exp.data.client(0, 0, 10).batches(3)]
    expected = reference.sgd(theta, batches, lr=0.1, prox=0.7)
    found = play(exp)[0].model.params
    assert np.allclose(found["layers.0.weight"], expected["W"], atol=1e-5)
    assert np.allclose(found["layers.0.bias"], expected["b"], atol=1e-5)


def drifted(x: float, m: float, G: float, rate: float, steps: int) -> float:
    """One round of the supplement's Sec. 9.5 with equal weights:
    x' = x ((1 - 2 m rate)^K + 1)/2 + rate G/2 sum_{t<K} (1 - (1 - 2 m rate)^t)."""
    shrink = 1 - 2 * m * rate
    return x * (shrink**steps + 1) / 2 + rate * G / 2 * sum(1 - shrink**t for t in range(steps))


@pytest.mark.parametrize(
    ("m", "G", "rate", "samples"), [(1.0, 1.0, 0.1, 11), (0.5, 3.0, 0.05, 6), (2.0, 1.0, 0.02, 21)]
)
def test_the_quadratic_drifts_where_the_supplement_says(m: float, G: float, rate: float, samples: int) -> None:
    """Local steps pull FedAvg away from the optimum 0 to the fixed point of that recursion, round for round."""
    exp = experiment(
        *("dataset=quadratic", "aggregator=fedavg", "rounds=60", "seed=4"),
        *(f"dataset.m={m}", f"dataset.G={G}", f"client_optimizer.lr={rate}", f"dataset.samples={samples}"),
    )
    steps = len(exp.data.split.training(0))
    assert steps == samples - max(1, round(samples / 10))
    x = 1.0
    state = initial_state(exp)
    for _ in range(60):
        x = drifted(x, m, G, rate, steps)
    final, rows = play(exp, state)
    assert final.model.params["x"].item() == pytest.approx(x, rel=1e-4)
    assert x > 0.05, "it stays away from the optimum"
    assert rows[-1]["test/loss"] == pytest.approx(m * x * x / 2, rel=1e-3), "f = (f1 + f2)/2 = m x^2 / 2"
    assert "test/accuracy" not in rows[-1]


def test_the_quadratic_with_one_local_step_reaches_the_optimum() -> None:
    one_step = ("client.batch_size=null", "rounds=200")
    final, _ = play(experiment("dataset=quadratic", "aggregator=fedavg", *one_step))
    assert abs(final.model.params["x"].item()) < 1e-6


def test_methods_compared_under_one_seed_share_everything_random() -> None:
    """Partition, cohorts, batches, initial weights: whatever the aggregator, client rule or optimizers."""
    variants = [
        ("aggregator=fedavg",),
        ("aggregator=elastic",),
        ("aggregator=fednnnn", "client=fedprox", "client_optimizer=adam", "server_optimizer=fedavgm"),
    ]
    exps = [small(*v, "partition.alpha=0.3", "client.epochs=2") for v in variants]
    first = exps[0]
    for exp in exps[1:]:
        assert exp.data.split.fingerprint() == first.data.split.fingerprint()
        for name, p in first.task.initial_model().params.items():
            assert torch.equal(p, exp.task.initial_model().params[name])
        for r in range(3):
            assert exp.participation.draw(exp.seed, r, 6) == first.participation.draw(first.seed, r, 6)
            for (x1, y1), (x2, y2) in zip(
                exp.data.client(1, r, 10).batches(2), first.data.client(1, r, 10).batches(2), strict=True
            ):
                assert torch.equal(x1, x2)
                assert torch.equal(y1, y2)


def test_global_random_state_is_neither_used_nor_needed() -> None:
    exp = small("rounds=3")
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 (disturbed on purpose)
    first = play(exp)[1]
    torch.manual_seed(2)
    second = play(small("rounds=3"))[1]
    drop = ("time/round_s",)
    assert [{k: v for k, v in r.items() if k not in drop} for r in first] == [
        {k: v for k, v in r.items() if k not in drop} for r in second
    ]


def test_seeds_change_cohorts_batches_and_weights() -> None:
    one, two = small("seed=1"), small("seed=2")
    assert one.data.split.fingerprint() != two.data.split.fingerprint()
    assert [one.participation.draw(1, r, 6) for r in range(8)] != [two.participation.draw(2, r, 6) for r in range(8)]
    assert not torch.equal(*(e.task.initial_model().params["layers.0.weight"] for e in (one, two)))


def test_dropout_is_a_function_of_seed_round_and_client() -> None:
    shared = ("dataset=mnist5k", "model=cnn_emnist", "partition.num_clients=200", "participation.clients_per_round=2")
    runs = []
    for disturbance in (1, 2):
        torch.manual_seed(disturbance)
        exp = experiment(*shared, "rounds=1", "eval.train=false")
        runs.append(play(exp)[0].model.params)
    for name, p in runs[0].items():
        assert torch.equal(p, runs[1][name])
    without = play(experiment(*shared, "rounds=1", "eval.train=false", "model.dropout=false"))[0].model.params
    assert not torch.equal(runs[0]["0.weight"], without["0.weight"])


def test_dropout_draws_differ_by_round_and_client() -> None:
    exp = small()
    state = initial_state(exp)
    seeds = set()
    for r, k in ((0, 1), (0, 2), (1, 1)):
        train(work_of(exp, state, r), k)
        seeds.add(torch.initial_seed())
    assert len(seeds) == 3


BATCH_NORM = (
    *("dataset=mnist5k", "model=cnn_cifar", "partition.num_clients=200", "participation.clients_per_round=3"),
    *("client_optimizer.lr=0.01", "rounds=1"),
)


@pytest.mark.parametrize("server_optimizer", ["sgd", "fedadam"])
def test_batch_norm_clients_start_from_the_same_buffers_and_leave_them_alone(server_optimizer: str) -> None:
    """The broadcast statistics are each client's own copy: one client's training does not show in the next one's.
    Their average is the new model's, whatever the server optimizer does to the weights."""
    exp = experiment(*BATCH_NORM, "aggregator=fedavg", "eval.train=false", f"server_optimizer={server_optimizer}")
    state = initial_state(exp)
    before = {n: b.clone() for n, b in state.model.buffers.items()}
    after, _ = play(exp, state)
    clients = exp.participation.draw(exp.seed, 0, 200)
    work = work_of(exp, state)
    alone = [train(work, k).buffers for k in clients]
    for name, b in before.items():
        assert torch.equal(state.model.buffers[name], b)
        if b.is_floating_point():
            mean = sum(w * own[name] for w, own in zip(weights(exp, clients), alone, strict=True))
            torch.testing.assert_close(after.model.buffers[name], mean, rtol=1e-5, atol=1e-6)


def test_what_is_judged_with_batch_norm() -> None:
    """FedNNNN judges, on test and training data alike, the clients' averaged weights with their averaged statistics."""

    def few(exp: Experiment) -> Experiment:
        """Ten clients of twenty samples and fifty test images are enough, and much quicker."""
        whole, data = exp.data.split, exp.data.dataset
        split = Split(whole.indices[: whole.offsets[10]], whole.offsets[:11], whole.held[:10])
        return replace(
            exp, data=FederatedData(replace(data, test_x=data.test_x[::20], test_y=data.test_y[::20]), split, exp.seed)
        )

    longer = (*BATCH_NORM, "client.epochs=15", "client_optimizer=adam", "client_optimizer.lr=0.001")
    exp = few(experiment(*longer, "aggregator=fednnnn", "aggregator.beta=2.0"))
    _, (row,) = play(exp)
    state, (expected,) = play(few(experiment(*longer, "aggregator=fedavg", "aggregator.weighting=uniform")))
    for name in ("test/loss", "train/loss"):
        assert row[name] == pytest.approx(expected[name], rel=1e-5)
    data = exp.data.dataset
    stale = Model(state.model.params, exp.task.initial_model().buffers)
    old_statistics = exp.task.evaluate(stale, data, data.test_x, data.test_y, 200)
    for other in (row["sent/loss"], old_statistics.loss_sum.item() / old_statistics.count):
        assert other != pytest.approx(row["test/loss"], rel=1e-3), "the test could tell"


def test_norms_of_parts_are_those_of_their_layers() -> None:
    exp = experiment(*BATCH_NORM, "aggregator=elastic", "eval.train=false")
    tables = []
    run(exp, initial_state(exp), lambda s, row, layers: tables.append((row, layers)))
    ((row, layers),) = tables
    kinds = np.array(exp.task.layers.kinds)
    for name in ("N", "N_server"):
        squares = np.array(layers[name]) ** 2
        assert row[f"norm/{name}"] == pytest.approx(np.sqrt(squares.sum()), rel=1e-5)
        for kind in ("conv", "linear"):
            assert row[f"norm/{name}_{kind}"] == pytest.approx(np.sqrt(squares[kinds == kind].sum()), rel=1e-5)
    whole, conv, linear = row["norm/E"], row["norm/E_conv"], row["norm/E_linear"]
    assert max(layers["E"]) < max(conv, linear) < whole < conv + linear + sum(np.array(layers["E"])[kinds == "norm"])


def test_the_servers_rate_scales_its_step() -> None:
    whole = play(small("aggregator=fedavg", "rounds=1"))
    half = play(small("aggregator=fedavg", "server_optimizer.lr=0.5", "rounds=1"))
    assert half[1][0]["norm/N"] == whole[1][0]["norm/N"]
    assert half[1][0]["norm/N_server"] == pytest.approx(0.5 * whole[1][0]["norm/N_server"], rel=1e-5)
    start = small().task.initial_model().params
    for name, p in start.items():
        middle = (p + whole[0].model.params[name]) / 2
        torch.testing.assert_close(half[0].model.params[name], middle, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("aggregator", "up"), [("fedavg", 1), ("elastic", 2), ("fednnnn", 1)])
def test_bytes_follow_the_papers_accounting(aggregator: str, up: int) -> None:
    """Models a round and client, down + up: FedAvg 2, elastic 3. The linear model has 20 * 10 + 10 floats."""
    _, (row,) = play(small(f"aggregator={aggregator}", "rounds=1"))
    assert row["comm/down_bytes"] == 3 * 210 * 4
    assert row["comm/up_bytes"] == up * 3 * 210 * 4


def test_bytes_count_batch_norm_statistics() -> None:
    exp = experiment(*BATCH_NORM, "aggregator=fedavg", "eval.train=false")
    parameters = sum(p.numel() for p in exp.task.module.parameters())
    statistics = 2 * 2 * (32 + 64 + 128) * 4 + 6 * 8  # mean and variance of each channel, and a counter for each layer
    assert play(exp)[1][0]["comm/down_bytes"] == 3 * (4 * parameters + statistics)


def test_evaluation_every_k_rounds_and_after_the_last() -> None:
    _, rows = play(small("rounds=5", "eval.every=2", "eval.train=true"))
    assert [r["round"] for r in rows if "test/accuracy" in r] == [2, 4, 5]
    assert [r["round"] for r in rows if "train/accuracy" in r] == [2, 4, 5]
    assert all("client/loss" in r for r in rows)


def test_evaluation_against_plain_torch() -> None:
    """Accuracy and loss over the test set, and over all D_k (B_k left out), in uneven batches."""
    exp = small("rounds=1", "eval.train=true", "eval.batch_size=7")
    state, (row,) = play(exp)
    data = exp.data.dataset
    own = np.concatenate([exp.data.split.training(k) for k in range(6)])
    w, b = state.model.params["layers.0.weight"], state.model.params["layers.0.bias"]
    for name, x, y in (("test", data.test_x, data.test_y), ("train", data.train_x[own], data.train_y[own])):
        logits = x @ w.T + b
        assert row[f"{name}/accuracy"] == (logits.argmax(1) == y).sum().item() / len(y)
        assert row[f"{name}/loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-5)


def test_client_loss_is_the_weighted_mean_of_the_batches_losses() -> None:
    """With a rate that moves nothing, it is the loss of the initial model over the cohort's data."""
    exp = small("rounds=1", "client_optimizer.lr=1e-30", "partition.sigma=0.8")
    model = exp.task.initial_model().params
    clients = exp.participation.draw(0, 0, 6)
    own = np.concatenate([exp.data.split.training(k) for k in clients])
    logits = exp.data.dataset.train_x[own] @ model["layers.0.weight"].T + model["layers.0.bias"]
    expected = nn.functional.cross_entropy(logits, exp.data.dataset.train_y[own]).item()
    assert play(exp)[1][0]["client/loss"] == pytest.approx(expected, rel=1e-5)


def test_a_diverging_run_stops() -> None:
    _, rows = play(small("rounds=50", "client_optimizer.lr=1e30", "model=mlp"))
    assert len(rows) < 50
    assert not np.isfinite(rows[-1]["client/loss"])


def test_participation_counts_and_fractions() -> None:
    whole = small("participation.clients_per_round=1.0")
    assert list(whole.participation.draw(0, 0, 6)) == list(range(6))
    assert len(small("participation.clients_per_round=0.5").participation.draw(0, 3, 6)) == 3
    assert len(small("participation.clients_per_round=1").participation.draw(0, 3, 6)) == 1
    assert small("participation.clients_per_round=0.01").participation.count(6) == 1, "m = max(C K, 1)"
    assert small("participation.clients_per_round=0.29").participation.count(100) == 29, "0.29 * 100 is 28.99..."


def test_participation_is_uniform_without_replacement() -> None:
    exp = small("participation.clients_per_round=2")
    cohorts = [exp.participation.draw(0, r, 6) for r in range(3000)]
    assert all(len(set(c)) == 2 for c in cohorts)
    counts = np.bincount(np.array(cohorts).ravel(), minlength=6)
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(3000 * (1 / 3) * (2 / 3))


def test_plain_lines_tell_the_mean_of_their_rounds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One round in fifty may be evaluated, and take ten times as long."""
    console = Console()
    console.open(RunInfo(tmp_path, "a run", "id", {}, rounds=40, start=0))
    for number, seconds in ((1, 0.2), (2, 1.0), (3, 0.0004), (4, 0.0005)):
        console.log({"round": number, "time/round_s": seconds, "client/loss": 1.0}, {})
    lines = capsys.readouterr().err.splitlines()
    assert [line.rsplit("  ", 1)[1] for line in lines[1:]] == ["0.6 s/round", "0.00045 s/round"]
