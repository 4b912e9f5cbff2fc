"""An LSTM's own kernel against its equations: worked by hand, step by step in plain operations, by differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fedsim import native
from fedsim.kernels import Lstm as Kernel
from fedsim.model.lstm import Lstm, LstmShakespeare
from fedsim.native import lstm
from fedsim.program import Compiled
from fedsim.types import Tree


def drawn(n: int, time: int, inputs: int, hidden: int, seed: int = 0) -> tuple[Lstm, Tensor, Tensor]:
    """A layer, what it is given, and the gradient of what it gives."""
    torch.manual_seed(seed)
    layer = Lstm(inputs, hidden).double()
    torch.nn.init.normal_(layer.bias)
    sizes = (n, time, inputs), (n, time, hidden)
    x, of_h = (torch.randn(size, dtype=torch.float64) for size in sizes)
    return layer, x, of_h


def plain(layer: Lstm, x: Tensor, of_h: Tensor) -> list[Tensor]:
    """h, and the gradients of x, both weights and the bias."""
    x = x.clone().requires_grad_()
    h = layer._step_by_step(x)
    return [h.detach(), *torch.autograd.grad(h, [x, *layer.parameters()], of_h)]


def ours(layer: Lstm, x: Tensor, of_h: Tensor) -> list[Tensor]:
    w, r, bias = (p.detach().to(x) for p in layer.parameters())
    h, c, gates = lstm.layer(x, w, r, bias)
    return [h, *lstm.gradients(of_h, x, h, c, gates, w, r)]


@settings(max_examples=60, deadline=None)
@given(*(st.integers(1, most) for most in (13, 7, 40, 40)), st.integers(0, 99))
def test_any_sizes(n: int, time: int, inputs: int, hidden: int, seed: int) -> None:
    """Rows that fill no block, columns that fill no vector, a single moment."""
    given = drawn(n, time, inputs, hidden, seed)
    for mine, theirs in zip(ours(*given), plain(*given), strict=True):
        assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("hidden", [100, 32])
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_change_no_bit(threads: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, of_h = drawn(10, 20, 8, hidden)
    alone = ours(layer, x.float(), of_h.float())
    monkeypatch.setattr(native.party, "members", threads)
    monkeypatch.setattr(native.party, "busy", torch.tensor(1))
    for _ in range(20):
        assert all(map(torch.equal, ours(layer, x.float(), of_h.float()), alone))


def test_more_gates_than_go_together_and_float32_keeps_its_digits() -> None:
    layer, x, of_h = drawn(10, 20, 8, 100)
    exact = plain(layer, x, of_h)
    for mine, true in zip(ours(layer, x, of_h), exact, strict=True):
        assert_close(mine, true, rtol=1e-11, atol=1e-11)
    for mine, true in zip(ours(layer, x.float(), of_h.float()), exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - true).norm() < 2e-6 * true.norm()


def test_by_hand() -> None:
    """One unit, x = 1 then 2; gates i, f, g, o with W = .5, -1, 2, 1, R = 1, 1, .5, -1, b = 0, 1, 0, .5."""

    def sigmoid(z: float) -> float:
        return 1 / (1 + math.exp(-z))

    c1 = sigmoid(0.5) * math.tanh(2)
    h1 = sigmoid(1.5) * math.tanh(c1)
    c2 = sigmoid(-1 + h1) * c1 + sigmoid(1 + h1) * math.tanh(4 + 0.5 * h1)
    h2 = sigmoid(2.5 - h1) * math.tanh(c2)
    columns = ([0.5, -1, 2, 1], [1, 1, 0.5, -1], [0, 1, 0, 0.5])
    w, r, b = (torch.tensor(column, dtype=torch.float64).view(-1, 1) for column in columns)
    h, c, _ = lstm.layer(torch.tensor([[[1.0], [2]]], dtype=torch.float64), w, r, b.view(-1))
    assert h.view(-1).tolist() == pytest.approx([h1, h2], rel=1e-15)
    assert c.view(-1).tolist() == pytest.approx([c1, c2], rel=1e-15)


def test_gradients_by_differences() -> None:
    layer, x, _ = drawn(2, 4, 3, 5)
    given = [t.detach().clone().requires_grad_() for t in (x, *layer.parameters())]
    assert torch.autograd.gradcheck(lambda *given: Kernel.apply(*given)[0], given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_from_zero_and_near_it(dtype: torch.dtype) -> None:
    """Gates that are full, or nearly nothing, come out as such; what is no number stays none."""
    values = torch.tensor([-1e30, -200, -50, -1, -1e-3, -1e-6, 0, 1e-6, 1e-3, 1, 50, 200, 1e30, math.nan], dtype=dtype)
    nothing = torch.zeros(4, 1, dtype=dtype)
    x = values.view(-1, 1, 1).expand(-1, 1, 4).contiguous()  # a unit whose four gates are all of this value
    h, c, gates = lstm.layer(x, torch.eye(4, dtype=dtype), nothing, nothing.view(-1))
    exact, precise = values.double(), 8 * torch.finfo(dtype).eps
    sigmoid, tanh = exact.sigmoid(), exact.tanh()
    expected = torch.stack([sigmoid, sigmoid, tanh, sigmoid], 1)

    def close(mine: Tensor, true: Tensor) -> None:
        assert_close(mine.double(), true, rtol=precise, atol=1e-30, equal_nan=True)

    close(gates[:, 0, :4], expected)
    close(c.view(-1), sigmoid * tanh)
    close(h.view(-1), sigmoid * (sigmoid * tanh).tanh())


def test_a_compiled_gradient_has_a_call_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "X86", True)
    torch.manual_seed(0)
    network = LstmShakespeare(3, 6, 2, input_shape=(7,), num_classes=11).double()
    params = {n: p.detach() for n, p in network.named_parameters()}
    x = torch.randint(0, 11, (4, 7))

    def value(params: Tree) -> Tensor:
        found: Tensor = torch.func.functional_call(network, params, (x,))
        return found.square().sum()

    with torch.no_grad():
        recorded = torch.fx.experimental.proxy_tensor.make_fx(torch.func.grad(value))(params).code
        found = Compiled(torch.func.grad(value))(params)
    assert recorded.count("fedsim.lstm.default") == recorded.count("fedsim.lstm_backward.default") == 2
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    assert_close(found, dict(zip(leaves, torch.autograd.grad(value(leaves), [*leaves.values()]), strict=True)))
