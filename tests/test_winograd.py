"""Winograd's convolution against torch's plain one, and against numbers worked by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fedsim import native
from fedsim.native import winograd

LAST = torch.channels_last


def plain(x: Tensor, weight: Tensor, padding: tuple[int, int], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = torch.conv2d(x, weight, padding=padding)
    return (y.detach(), *torch.autograd.grad(y, [x, weight], grad))


def ours(x: Tensor, weight: Tensor, padding: tuple[int, int], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, grad = (t.contiguous(memory_format=LAST) for t in (x, weight, grad))
    return (winograd.convolution(x, weight, padding), *winograd.gradients(grad, x, weight, padding))


def drawn(
    seed: int, n: int, c: int, k: int, h: int, w: int, r: int, padding: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((n, c, h, w), (k, c, r, r)))
    shape = n, k, h + 2 * padding[0] - r + 1, w + 2 * padding[1] - r + 1
    return x, weight, torch.randn(shape, generator=g, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sizes(data: st.DataObject) -> None:
    """Tiles that stick out, channels that fill no vector, paddings of any width, borders on one side only."""
    r = data.draw(st.sampled_from([3, 5]))
    n, c, k = (data.draw(st.integers(1, most)) for most in (7, 40, 40))
    padding = data.draw(st.integers(0, r)), data.draw(st.integers(0, r))
    h, w = (data.draw(st.integers(max(r - 2 * pad, 1), 14)) for pad in padding)
    x, weight, grad = drawn(data.draw(st.integers(0, 99)), n, c, k, h, w, r, padding)
    for mine, theirs in zip(ours(x, weight, padding, grad), plain(x, weight, padding, grad), strict=True):
        assert_close(mine.contiguous(), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("c", "k", "size", "r"), [(16, 16, 32, 3), (64, 64, 8, 3), (128, 128, 16, 3), (20, 50, 12, 5)])
def test_many_tiles_go_in_pieces_and_float32_keeps_its_digits(c: int, k: int, size: int, r: int) -> None:
    padding = ((r - 1) // 2,) * 2
    x, weight, grad = drawn(1, 10, c, k, size, size, r, padding)
    exact = plain(x, weight, padding, grad)
    for mine, true in zip(ours(x, weight, padding, grad), exact, strict=True):
        assert_close(mine.contiguous(), true, rtol=1e-10, atol=1e-10)
    for mine, true in zip(ours(x.float(), weight.float(), padding, grad.float()), exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - true).norm() < 5e-6 * true.norm()  # what winograd.py promises is about 2e-6


def test_by_hand() -> None:
    """Over 1 ... 16 in four rows: the sum of each 3 x 3 window, and a filter that looks one pixel to the right."""
    x = torch.arange(1.0, 17).view(1, 1, 4, 4)
    ones, right = torch.ones(1, 1, 3, 3), torch.zeros(1, 1, 3, 3)
    right[..., 1, 2] = 1
    assert_close(winograd.convolution(x, ones, (0, 0)), torch.tensor([[[[54.0, 63], [90, 99]]]]))
    assert_close(
        winograd.convolution(x, right, (1, 1)),
        torch.tensor([[[[2.0, 3, 4, 0], [6, 7, 8, 0], [10, 11, 12, 0], [14, 15, 16, 0]]]]),
        rtol=0,
        atol=1e-5,
    )


def test_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "X86", True)
    x, weight = torch.zeros(10, 16, 32, 32), torch.zeros(16, 16, 3, 3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert winograd.pays(x, weight, [1, 1])
        assert winograd.pays(x, torch.zeros(16, 16, 5, 5), [2, 2])
        assert not winograd.pays(x, torch.zeros(16, 16, 1, 1), [0, 0])
        assert not winograd.pays(x[:, :3], weight[:, :3], [1, 1])  # a first layer
        assert not winograd.pays(x[:1, :, :2, :2], weight, [1, 1])
        assert not winograd.pays(x.bfloat16(), weight.bfloat16(), [1, 1])
        torch.set_num_threads(2)  # torch's own then uses both
        assert not winograd.pays(x, weight, [1, 1])
    finally:
        torch.set_num_threads(threads)
