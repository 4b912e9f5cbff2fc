"""N, E and the aggregators built on them, against numbers worked by hand and NumPy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import experiment, play, small
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from fedsim.aggregator.fedavg import FedAvg
from fedsim.aggregator.fednnnn import FedNNNN
from fedsim.aggregator.momentum import Momentum
from fedsim.aggregator.norm_norm import NormNorm
from fedsim.cohort import Cohort, CohortSum, upload
from fedsim.layers import Layers
from fedsim.local import LocalResult
from fedsim.types import Model

SHARED = {"weighting": "uniform", "evaluate": "averaged"}


def layers_of(params: dict[str, Tensor]) -> Layers:
    return Layers(list(params), ["linear"] * len(params), ["linear", "all"], torch.ones(2, len(params)))


def cohort_of(
    updates: list[dict[str, Tensor]], weights: list[float], buffers: list[dict[str, Tensor]] | None = None
) -> Cohort:
    """A cohort of clients that moved by d_k from zero."""
    zero = {n: torch.zeros_like(t) for n, t in updates[0].items()}
    model = Model(zero, {n: torch.zeros_like(b) for n, b in (buffers or [{}])[0].items()})
    task = SimpleNamespace(layers=layers_of(zero))
    work: Any = SimpleNamespace(
        server=model, task=task, privacy=None, individual=False, lengths=False, staleness=0, whole=False
    )
    total = CohortSum(work, len(updates))
    for k, (d, w) in enumerate(zip(updates, weights, strict=True)):
        own = buffers[k] if buffers else {}
        total.add(k, w, upload(work, LocalResult(d, own, None, torch.tensor(float(k)), None)))
    return total.result()


def vectors(*rows: list[float]) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor(row)} for row in rows]


def test_n_and_e_by_hand() -> None:
    """d = (3, 4), (3, -4) with equal weights: mean (3, 0), N = 3, E = (5 + 5)/2 = 5."""
    cohort = cohort_of(vectors([3.0, 4.0], [3.0, -4.0]), [0.5, 0.5])
    assert cohort.delta["w"].tolist() == [-3.0, 0.0], "delta = theta - theta_k: the direction to descend"
    assert cohort.N.tolist() == [3.0, 3.0, 3.0], "the layer, its kind, the whole"
    assert cohort.E.tolist() == [5.0, 5.0, 5.0]
    assert cohort.loss.item() == 0.5


def test_n_and_e_with_weights_by_hand() -> None:
    """Weights 3/4, 1/4: mean (3, 2), N = sqrt(13), E = 5."""
    cohort = cohort_of(vectors([3.0, 4.0], [3.0, -4.0]), [0.75, 0.25])
    assert cohort.N[-1].item() == pytest.approx(13**0.5)
    assert cohort.E[-1].item() == 5.0


def test_n_and_e_by_layer_and_part() -> None:
    """E of a part is the mean of the clients' norms over that part, not the sum of its layers' E."""
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(1, 1))
    layers = Layers.of(module)
    assert list(layers.names) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert list(layers.kinds) == ["conv", "conv", "norm", "norm", "linear", "linear"]
    assert list(layers.parts) == ["conv", "linear", "all"]
    values = dict(zip(layers.names, (3.0, 4.0, 0.0, 12.0, 8.0, 6.0), strict=True))
    tree = {n: torch.full_like(p, values[n]) for n, p in module.named_parameters()}
    assert layers.norms(tree).tolist() == pytest.approx([3, 4, 0, 12, 8, 6, 5, 10, (25 + 144 + 100) ** 0.5])


@settings(max_examples=100, deadline=None)
@given(
    updates=arrays(
        np.float32, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.floats(-1e3, 1e3, width=32)
    ),
    seed=st.integers(0, 1000),
)
def test_n_never_exceeds_e(updates: np.ndarray, seed: int) -> None:
    """FedNNNN, Proposition 1, for any weights."""
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(updates)))
    cohort = cohort_of([{"w": torch.from_numpy(u)} for u in updates], weights.tolist())
    assert (cohort.N <= cohort.E * (1 + 1e-5) + 1e-6).all()
    mean = (weights[:, None] * updates.astype(float)).sum(0)
    assert cohort.N[-1].item() == pytest.approx(np.linalg.norm(mean), rel=1e-4, abs=1e-3)
    norms = np.linalg.norm(updates.astype(float), axis=1)
    assert cohort.E[-1].item() == pytest.approx((weights * norms).sum(), rel=1e-4, abs=1e-6)


def test_buffers_are_averaged_and_counters_rounded() -> None:
    buffers = [
        {"mean": torch.tensor([1.0]), "steps": torch.tensor(10)},
        {"mean": torch.tensor([5.0]), "steps": torch.tensor(13)},
    ]
    cohort = cohort_of(vectors([0.0], [0.0]), [0.25, 0.75], buffers)
    assert cohort.buffers["mean"].tolist() == [4.0]
    assert cohort.buffers["steps"].item() == 12
    assert cohort.buffers["steps"].dtype == torch.int64


def test_norm_norm_by_hand() -> None:
    """The step's length is beta E = 1.2 * 5 = 6, along the mean."""
    cohort = cohort_of(vectors([3.0, 4.0], [3.0, -4.0]), [0.5, 0.5])
    step = NormNorm(**SHARED, beta=1.2).direction(cohort, {}).tree["w"]
    assert step.tolist() == pytest.approx([-6.0, 0.0])


def test_momentum_by_hand() -> None:
    """v1 = d1, v2 = gamma d1 + d2."""
    rule = Momentum(**SHARED, gamma=0.5)
    state = rule.init({"w": torch.zeros(2)})
    first = rule.direction(cohort_of(vectors([2.0, 0.0]), [1.0]), state)
    second = rule.direction(cohort_of(vectors([0.0, 4.0]), [1.0]), first.state)
    assert first.tree["w"].tolist() == [-2.0, 0.0]
    assert second.tree["w"].tolist() == [-1.0, -4.0]


def test_fednnnn_by_hand() -> None:
    """Round 1: mean (3, 0), E/N = 5/3, v = 0.6 * 5/3 * (3, 0) = (3, 0). Round 2: mean (0, 2), E/N = 1,
    v = 0.5 (3, 0) + 0.6 (0, 2) = (1.5, 1.2)."""
    rule = FedNNNN(**SHARED, beta=0.6, gamma=0.5)
    state = rule.init({"w": torch.zeros(2)})
    first = rule.direction(cohort_of(vectors([3.0, 4.0], [3.0, -4.0]), [0.5, 0.5]), state)
    second = rule.direction(cohort_of(vectors([0.0, 2.0]), [1.0]), first.state)
    assert first.tree["w"].tolist() == pytest.approx([-3.0, 0.0])
    assert second.tree["w"].tolist() == pytest.approx([-1.5, -1.2])


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_updates_that_cancel_leave_the_model_where_it_is(scale: float) -> None:
    """N = 0 (or rounding error next to E): no step, no NaN, and the memory of earlier rounds is kept."""
    cancelling = cohort_of(vectors([scale, 0.0], [-scale, 0.0]), [0.5, 0.5])
    assert NormNorm(**SHARED, beta=1.0).direction(cancelling, {}).tree["w"].tolist() == [0.0, 0.0]
    rule = FedNNNN(**SHARED, beta=1.0, gamma=0.9)
    remembered = {"v": {"w": torch.tensor([1.0, 2.0])}}
    result = rule.direction(cancelling, remembered)
    assert result.tree["w"].tolist() == [0.0, 0.0]
    assert result.state["v"]["w"].tolist() == [1.0, 2.0]


def test_updates_that_cancel_up_to_rounding_leave_the_model_too() -> None:
    tenth = torch.full((1000,), 0.1)
    cohort = cohort_of([{"w": tenth}, {"w": tenth}, {"w": -2 * tenth}], [1 / 3] * 3)
    assert 0 < cohort.N[-1] < 1e-6 * cohort.E[-1], "float32 leaves a little"
    assert NormNorm(**SHARED, beta=1.0).direction(cohort, {}).tree["w"].abs().max() == 0


def test_updates_that_nearly_cancel_or_are_tiny_are_still_normalised() -> None:
    """N/E = 1e-4 is a direction, not rounding; and so are updates of length 1e-9 that agree."""
    nearly = cohort_of(vectors([1.0, 1e-4], [-1.0, 1e-4]), [0.5, 0.5])
    step = NormNorm(**SHARED, beta=1.0).direction(nearly, {}).tree["w"]
    assert step.tolist() == pytest.approx([0.0, -1.0], rel=1e-4)
    tiny = cohort_of(vectors([1e-9, 0.0], [1e-9, 0.0]), [0.5, 0.5])
    assert NormNorm(**SHARED, beta=2.0).direction(tiny, {}).tree["w"].tolist() == pytest.approx([-2e-9, 0.0])


def test_no_client_moved() -> None:
    still = cohort_of(vectors([0.0, 0.0]), [1.0])
    for rule in (NormNorm(**SHARED, beta=1.0), FedNNNN(**SHARED, beta=1.0, gamma=0.5)):
        assert rule.direction(still, rule.init({"w": torch.zeros(2)})).tree["w"].tolist() == [0.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(arrays(np.float32, (3, 4), elements=st.floats(-10, 10, width=32)))
def test_fednnnn_with_beta_e_over_n_one_and_no_memory_is_fedavg(updates: np.ndarray) -> None:
    cohort = cohort_of([{"w": torch.from_numpy(u)} for u in updates], [0.2, 0.3, 0.5])
    N, E = cohort.N[-1].item(), cohort.E[-1].item()
    if N <= 1e-3 * E:
        return
    naive = FedAvg(**SHARED).direction(cohort, {}).tree["w"]
    rule = FedNNNN(**SHARED, beta=N / E, gamma=0.0)
    found = rule.direction(cohort, rule.init({"w": torch.zeros(4)})).tree["w"]
    torch.testing.assert_close(found, naive, rtol=1e-5, atol=1e-6)


def test_momentum_without_memory_is_fedavg() -> None:
    uniform = ("aggregator.weighting=uniform", "aggregator.evaluate=averaged", "rounds=3")
    naive = play(small("aggregator=fedavg", *uniform))[0]
    found = play(small("aggregator=momentum", "aggregator.gamma=0.0", *uniform))[0]
    for name, p in naive.model.params.items():
        assert torch.equal(p, found.model.params[name])


def test_with_one_client_fednnnn_without_memory_is_fedavg_over_rounds() -> None:
    """A single client has N = E."""
    one = ("participation.clients_per_round=1", "rounds=4", "aggregator.weighting=uniform")
    naive = play(small("aggregator=fedavg", *one))[0]
    found = play(small("aggregator=fednnnn", "aggregator.beta=1.0", "aggregator.gamma=0.0", *one))[0]
    for name, p in naive.model.params.items():
        torch.testing.assert_close(found.model.params[name], p, rtol=1e-6, atol=1e-7)


def test_fednnnn_judges_the_average_and_sends_the_normalised_model() -> None:
    """test/accuracy is the plain average's, which is what FedAvg would have sent from the same start."""
    shared = ("rounds=1", "aggregator.weighting=uniform", "partition.alpha=0.1")
    naive_state, (naive,) = play(small("aggregator=fedavg", *shared))
    state, (row,) = play(small("aggregator=fednnnn", "aggregator.beta=3.0", *shared))
    assert row["test/accuracy"] == naive["test/accuracy"]
    assert row["test/loss"] == pytest.approx(naive["test/loss"], rel=1e-6)
    assert row["sent/loss"] != row["test/loss"]
    assert "sent/loss" not in naive
    sent = experiment("dataset=synthetic", "dataset.train_samples=240", "dataset.test_samples=60")
    data = sent.data.dataset
    outputs = sent.task.outputs(state.model.params, {}, data.test_x, "eval")
    assert row["sent/loss"] == pytest.approx(nn.functional.cross_entropy(outputs, data.test_y).item(), rel=1e-5)
    assert row["norm/N_over_E"] == row["norm/N"] / row["norm/E"]
    assert row["norm/N_server"] == pytest.approx(3.0 * row["norm/E"], rel=1e-5), "Eq. 9: the step is beta E long"
    assert naive["norm/N_server"] == pytest.approx(naive["norm/N"], rel=1e-6)
    assert not torch.equal(naive_state.model.params["layers.0.weight"], state.model.params["layers.0.weight"])


def test_integrated_norm_is_the_running_sum_of_the_servers_moves() -> None:
    _, rows = play(small("aggregator=fednnnn", "rounds=4"))
    moves = [row["norm/N_server"] for row in rows]
    assert [row["norm/N_integrated"] for row in rows] == pytest.approx(np.cumsum(moves).tolist())


def test_weighting() -> None:
    from fedsim.runner import weights

    skewed = "partition.sigma=1.0"
    exp = small(skewed)
    sizes = exp.data.split.sizes[[0, 2, 5]]
    assert weights(exp, [0, 2, 5]) == pytest.approx((sizes / sizes.sum()).tolist())
    assert weights(small(skewed, "aggregator.weighting=uniform"), [0, 2, 5]) == [1 / 3] * 3
