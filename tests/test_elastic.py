"""Elastic aggregation against its equations, worked in NumPy and by hand."""

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from conftest import doubled, experiment, play, small, work_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from fedsim.aggregator.elastic import Elastic
from fedsim.cohort import Cohort
from fedsim.data import Dataset
from fedsim.local import measure, train
from fedsim.model.resnet import ResNet20
from fedsim.runner import initial_state, weights
from fedsim.task import Task
from fedsim.types import Model


def elastic(**changes) -> Elastic:
    base = {"tau": 0.5, "mu": 0.95, "sensitivity": "momentum", "layer": "tensor", "batch_norm": "running"}
    return Elastic(**{"weighting": "samples", "evaluate": "sent", "batch_size": None, **base, **changes})


def cohort(delta: dict[str, Tensor], omega: dict[str, Tensor]) -> Cohort:
    zero = torch.zeros(len(delta) + 1)
    return Cohort(Model({}, {}), delta, {}, omega, zero, zero, torch.zeros(()), {})


def linear_task(features: int, classes: int) -> tuple[Task, Model, reference.Params]:
    torch.manual_seed(1)
    module = nn.Linear(features, classes)
    dataset = Dataset(*[torch.zeros(1)] * 4, classes, torch.ones(1), torch.zeros(1))
    task = Task(module, dataset)
    model = task.initial_model()
    params = {"W": model.params["weight"].numpy().astype(float), "b": model.params["bias"].numpy().astype(float)}
    return task, model, params


def test_sensitivity_by_hand() -> None:
    """F(x) = w x with w = 2: g = d(w x)^2/dw = 2 w x^2. Batches {1}, {2}, {1, 3}: |g| = 4, 16, mean(4, 36) = 20.

    mu = 0.5: 0 -> 2 -> 9 -> 14.5. Average: 40/3."""
    task, _, _ = linear_task(1, 1)
    model = Model({"weight": torch.tensor([[2.0]]), "bias": torch.zeros(1)}, {})
    batches = [torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.tensor([[1.0], [3.0]])]
    assert measure(elastic(mu=0.5).probe, task, model, iter(batches))["weight"].item() == 14.5
    average = measure(elastic(sensitivity="average").probe, task, model, iter(batches))
    assert average["weight"].item() == pytest.approx(40 / 3)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    mu=st.floats(0, 0.99),
    seed=st.integers(0, 1000),
)
def test_sensitivity_against_numpy(sizes: list[int], mu: float, seed: int) -> None:
    """Both variants, one value for each scalar parameter, any number of batches (none gives zeros)."""
    task, model, params = linear_task(4, 3)
    batches = [np.random.default_rng(seed + i).normal(size=(n, 4)) for i, n in enumerate(sizes)]
    tensors = [torch.tensor(b, dtype=torch.float32) for b in batches]
    expected = reference.sensitivity(params, batches, mu)
    found = measure(elastic(mu=mu).probe, task, model, iter(tensors))
    assert np.allclose(found["weight"], expected["W"], rtol=1e-4, atol=1e-6)
    assert np.allclose(found["bias"], expected["b"], rtol=1e-4, atol=1e-6)
    if batches:
        expected = reference.average_sensitivity(params, batches)
        found = measure(elastic(sensitivity="average").probe, task, model, iter(tensors))
        assert np.allclose(found["weight"], expected["W"], rtol=1e-4, atol=1e-6)
        assert np.allclose(found["bias"], expected["b"], rtol=1e-4, atol=1e-6)


def test_zeta_by_hand() -> None:
    """tau = 0.5, Omega = (4, 2, 1, 0): zeta = 1.5 - (1, .5, .25, 0) = (.5, 1, 1.25, 1.5); two of four above one."""
    delta = {"w": torch.tensor([1.0, 1.0, 2.0, -4.0])}
    result = elastic().direction(cohort(delta, {"w": torch.tensor([4.0, 2.0, 1.0, 0.0])}), {})
    assert result.tree["w"].tolist() == [0.5, 1.0, 2.5, -6.0]
    assert result.metrics["elastic/boosted_fraction"].item() == 0.5
    assert result.layers["boosted_fraction"].tolist() == [0.5], "a zeta of exactly one is not boosted"
    assert result.metrics["elastic/mean_zeta"].item() == pytest.approx((0.5 + 1 + 1.25 + 1.5) / 4)
    # |(.5, 1, 2.5, -6)| / |(1, 1, 2, -4)|
    assert result.metrics["elastic/step"].item() == pytest.approx((43.5 / 22) ** 0.5)


def test_boosted_fraction_counts_scalars_over_the_model_and_by_layer() -> None:
    omega = {"a": torch.tensor([1.0, 0.1, 0.1, 0.1]), "b": torch.tensor([[2.0, 2.0]])}
    delta = {name: torch.ones_like(o) for name, o in omega.items()}
    result = elastic().direction(cohort(delta, omega), {})
    assert result.metrics["elastic/boosted_fraction"].item() == pytest.approx(3 / 6)
    assert result.layers["boosted_fraction"].tolist() == [0.75, 0.0]
    assert result.metrics["elastic/boosted_by_layer"].item() == pytest.approx((0.75 + 0.0) / 2)


def test_tau_zero_boosts_nothing() -> None:
    """Table 1's first column: zeta = 1 - Omega/max never exceeds one."""
    omega = {"w": torch.tensor([1.0, 0.3, 0.0])}
    result = elastic(tau=0.0).direction(cohort({"w": torch.ones(3)}, omega), {})
    assert result.metrics["elastic/boosted_fraction"].item() == 0.0


def test_the_papers_boosted_share_is_the_mean_over_layers() -> None:
    """Table 1 at tau = 1, where zeta = 2 - Omega / max > 1 for all but each layer's maximum: 97.38 %."""
    params = dict(ResNet20("batch", 2, (3, 32, 32), 10).named_parameters())
    omega = {n: torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) for n, p in params.items()}
    rule = elastic(tau=1.0)
    result = rule.scaled({n: torch.ones_like(p) for n, p in params.items()}, rule.zeta(omega))
    assert round(100 * result.metrics["elastic/boosted_by_layer"].item(), 2) == 97.38
    assert round(100 * result.metrics["elastic/boosted_fraction"].item(), 2) == 99.98


def test_a_layer_without_any_sensitivity_is_boosted_fully() -> None:
    """max Omega = 0: ratio 0, zeta = 1 + tau; and no NaN anywhere."""
    omega = {"dead": torch.zeros(3), "alive": torch.tensor([1.0])}
    zeta = elastic().zeta(omega)
    assert zeta["dead"].tolist() == [1.5] * 3
    assert zeta["alive"].tolist() == [0.5]


def test_the_maximum_is_taken_in_the_layer() -> None:
    omega = {"fc.weight": torch.tensor([4.0, 1.0]), "fc.bias": torch.tensor([2.0]), "out.bias": torch.tensor([8.0])}
    assert elastic().zeta(omega)["fc.bias"].tolist() == [0.5], "tensor: the bias is its own layer"
    module = elastic(layer="module").zeta(omega)
    assert module["fc.bias"].tolist() == [1.0], "module: the bias is measured against its weight's maximum, 4"
    assert module["fc.weight"].tolist() == [0.5, 1.25]
    assert module["out.bias"].tolist() == [0.5]
    nested = elastic(layer="module").zeta({"a.0.w": torch.tensor([4.0]), "a.1.w": torch.tensor([2.0])})
    assert nested["a.1.w"].tolist() == [0.5], "a.0 and a.1 are two modules"


@settings(max_examples=100, deadline=None)
@given(omega=arrays(np.float32, st.integers(1, 20), elements=st.floats(0, 1e6, width=32)), tau=st.floats(0, 1))
def test_zeta_lies_between_tau_and_one_plus_tau(omega: np.ndarray, tau: float) -> None:
    zeta = elastic(tau=tau).zeta({"w": torch.from_numpy(omega)})["w"]
    assert zeta.min() >= tau - 1e-6
    assert zeta.max() <= 1 + tau + 1e-6


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_constant_omega_gives_tau_times_the_naive_update(tau: float) -> None:
    delta = {"a": torch.randn(3, 2), "b": torch.randn(5)}
    omega = {name: torch.full_like(d, 0.7) for name, d in delta.items()}
    result = elastic(tau=tau).direction(cohort(delta, omega), {})
    for name, d in delta.items():
        torch.testing.assert_close(result.tree[name], tau * d, rtol=1e-6, atol=1e-7)


def test_one_scalar_model_takes_tau_of_the_naive_step() -> None:
    """The quadratic's only parameter is its own layer's maximum, so elastic moves tau times as far as naive."""
    naive = play(experiment("dataset=quadratic", "aggregator=fedavg", "rounds=1"))[1][0]
    scaled = play(experiment("dataset=quadratic", "aggregator.tau=0.25", "rounds=1"))[1][0]
    assert scaled["norm/N"] == naive["norm/N"]
    assert scaled["norm/N_server"] == pytest.approx(0.25 * naive["norm/N_server"], rel=1e-6)
    assert scaled["elastic/mean_zeta"] == scaled["elastic/step"] == 0.25


def test_sensitivities_do_not_use_labels() -> None:
    exp = small()
    work = work_of(exp, initial_state(exp))
    scrambled = replace(exp.data.dataset, train_y=exp.data.dataset.train_y.flip(0))
    other = replace(work, data=replace(exp.data, dataset=scrambled))
    for name, omega in train(work, 2).measured.items():
        assert torch.equal(omega, train(other, 2).measured[name])


def test_sensitivities_are_fresh_for_each_client() -> None:
    """Measuring a client twice, or another one in between, changes nothing; and clients do not share storage.
    (Both went wrong in a public implementation, which on a CPU is naive aggregation with rate 0.5.)"""
    exp = small()
    work = work_of(exp, initial_state(exp))
    first, other, again = train(work, 1).measured, train(work, 2).measured, train(work, 1).measured
    for name, omega in first.items():
        assert torch.equal(omega, again[name])
        assert not torch.equal(omega, other[name])
        assert omega.data_ptr() != other[name].data_ptr()


def test_a_round_against_numpy() -> None:
    """Two local epochs, three of six clients of unequal size, weights by |D_k|, both sums, zeta, the server step."""
    exp = small("rounds=1", "client.epochs=2", "partition.sigma=0.6", "partition.alpha=0.5", "client.batch_size=4")
    state = initial_state(exp)
    after, (row,) = play(exp)
    clients = exp.participation.draw(exp.seed, 0, 6)
    model = {"W": state.model.params["layers.0.weight"], "b": state.model.params["layers.0.bias"]}
    theta = {k: v.numpy().astype(float) for k, v in model.items()}
    x, y = exp.data.dataset.train_x.numpy().astype(float), exp.data.dataset.train_y.numpy()

    sizes = np.array([len(exp.data.split.training(k)) for k in clients])
    w = sizes / sizes.sum()
    assert weights(exp, clients) == pytest.approx(w.tolist())
    deltas, omegas = [], []
    for k in clients:
        batches = [(b[0].numpy().astype(float), b[1].numpy()) for b in exp.data.client(k, 0, 4).batches(2)]
        trained = reference.sgd(theta, batches, lr=0.1)
        deltas.append({n: theta[n] - trained[n] for n in theta})
        held = exp.data.split.sensitivity(k)
        probes = [x[held[i : i + 4]] for i in range(0, len(held), 4)]
        omegas.append(reference.sensitivity(theta, probes, mu=0.95))
    mean = {n: sum(w[i] * d[n] for i, d in enumerate(deltas)) for n in theta}
    omega = {n: sum(w[i] * o[n] for i, o in enumerate(omegas)) for n in theta}
    zeta = {n: 1.5 - o / o.max() for n, o in omega.items()}
    expected = {n: theta[n] - zeta[n] * mean[n] for n in theta}

    assert np.allclose(after.model.params["layers.0.weight"], expected["W"], atol=1e-5)
    assert np.allclose(after.model.params["layers.0.bias"], expected["b"], atol=1e-5)
    count = sum(z.size for z in zeta.values())
    assert row["elastic/boosted_fraction"] == pytest.approx(sum((z > 1).sum() for z in zeta.values()) / count)
    assert row["elastic/mean_zeta"] == pytest.approx(sum(z.sum() for z in zeta.values()) / count, rel=1e-5)
    assert row["norm/N"] == pytest.approx(reference.norm(mean), rel=1e-4)
    longer = reference.norm({n: zeta[n] * mean[n] for n in mean}) / reference.norm(mean)
    assert row["elastic/step"] == pytest.approx(longer, rel=1e-4)
    assert row["norm/E"] == pytest.approx(sum(w[i] * reference.norm(d) for i, d in enumerate(deltas)), rel=1e-4)
    assert row["norm/N_server"] == pytest.approx(reference.norm({n: zeta[n] * mean[n] for n in mean}), rel=1e-4)
    assert (y >= 0).all()


def test_elastic_is_not_half_of_fedavg() -> None:
    naive, elastic_ = (play(small(f"aggregator={a}", "rounds=1"))[1][0] for a in ("fedavg", "elastic"))
    ratio = elastic_["norm/N_server"] / naive["norm/N_server"]
    assert 0.55 < ratio < 1.5
    assert 0.5 < elastic_["elastic/mean_zeta"] < 1.5


def test_batch_norm_sensitivities_leave_the_model_alone() -> None:
    """Measured with running statistics by default; with the batch's own, the buffers still do not move."""
    exp = experiment("dataset=mnist5k", "model=cnn_cifar", "partition.num_clients=400")
    model = exp.task.initial_model()
    before = {n: b.clone() for n, b in model.buffers.items()}
    results = {}
    for mode in ("running", "batch"):
        x = [*map(exp.data.dataset.inputs, next(exp.data.sensitivity_batches([0], 2)))]
        results[mode] = measure(elastic(batch_norm=mode).probe, exp.task, model, iter(x))
        for name, buffer in model.buffers.items():
            assert torch.equal(buffer, before[name])
    assert not torch.allclose(results["running"]["0.weight"], results["batch"]["0.weight"])


def test_the_sensitivity_pass_never_drops_out() -> None:
    """Whatever batch norm does in it: two measurements are equal, and so is a resumed run."""
    exp = experiment("dataset=mnist5k", "model=cnn_emnist", "partition.num_clients=400")
    model = exp.task.initial_model()
    x = [*map(exp.data.dataset.inputs, next(exp.data.sensitivity_batches([0], 4)))]
    rule = elastic(batch_norm="batch")
    once, again = (measure(rule.probe, exp.task, model, iter(x)) for _ in range(2))
    for name, omega in once.items():
        assert torch.equal(omega, again[name])


def test_the_batch_size_of_the_sensitivity_pass() -> None:
    """The client's own unless another is given; 1 is supplement Eq. 1 sample by sample."""
    shared = ("aggregator.sensitivity=average", "partition.sensitivity_fraction=0.3", "client.batch_size=100")
    whole, single = (doubled(small(*shared, *more)) for more in ((), ("aggregator.batch_size=1",)))
    work = work_of(whole, initial_state(whole))
    held = whole.data.dataset.train_x[whole.data.split.sensitivity(1)].double()
    theta = {"W": work.model.params["layers.0.weight"].numpy(), "b": work.model.params["layers.0.bias"].numpy()}
    alone = reference.average_sensitivity(theta, [row[None] for row in held.numpy()])
    together = reference.average_sensitivity(theta, [held.numpy()])
    found = train(work_of(single, initial_state(single)), 1).measured
    assert np.allclose(found["layers.0.weight"], alone["W"], rtol=1e-9)
    assert np.allclose(train(work, 1).measured["layers.0.weight"], together["W"], rtol=1e-9)
