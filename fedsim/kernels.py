"""Operations in the form that is fastest on a CPU: those of a single client's convolutional network, with channels
last (the compiler neither vectorises a pool's search for its maxima nor the way back: torch's own kernels do), an
LSTM's loop over time, and those of a stack of small models."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from fedsim.native import lstm, winograd

aten = torch.ops.aten
FEW = 16

# Under names of our own torch's kernels are left alone by the compiler. (torch.library.custom_op would check every call
# for a tenth of a millisecond.)
_LIBRARY = Library("fedsim", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, signature: str, kernel: Callable[..., Any], form: Callable[..., Any]) -> None:
    """`form` gives empty tensors of the results' form."""
    _LIBRARY.define(name + signature)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    register_fake(f"fedsim::{name}", form, lib=_LIBRARY)


_SIZES = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_pool, _pool_backward = aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward
_define("max_pool", f"(Tensor x, {_SIZES}) -> (Tensor, Tensor)", _pool, _pool)
_define("max_pool_backward", f"(Tensor g, Tensor x, {_SIZES}, Tensor i) -> Tensor", _pool_backward, _pool_backward)
_define("winograd", "(Tensor x, Tensor weight, int[] padding) -> Tensor", winograd.convolution, winograd.outputs)
_define(
    "winograd_backward",
    "(Tensor grad, Tensor x, Tensor weight, int[] padding) -> (Tensor, Tensor)",
    winograd.gradients,
    lambda grad, x, weight, padding: (torch.empty_like(x), torch.empty_like(weight)),
)
_define("lstm", "(Tensor x, Tensor w, Tensor r, Tensor bias) -> (Tensor, Tensor, Tensor)", lstm.layer, lstm.outputs)
_define(
    "lstm_backward",
    "(Tensor of_h, Tensor x, Tensor h, Tensor c, Tensor gates, Tensor w, Tensor r) -> (Tensor, Tensor, Tensor, Tensor)",
    lstm.gradients,
    lstm.like,
)


def pooled(
    x: Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> Any:
    return torch.ops.fedsim.max_pool(
        _last(x), kernel, stride or kernel, padding or [0, 0], dilation or [1, 1], ceil_mode
    )


def pooled_backward(grad: Tensor, x: Tensor, *rest: Any) -> Any:
    return torch.ops.fedsim.max_pool_backward(_last(grad), _last(x), *rest)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    plain = stride == [1, 1] and dilation == [1, 1] and not transposed and groups == 1
    if not plain or not winograd.pays(x, weight, padding):
        return NotImplemented
    y = torch.ops.fedsim.winograd(_last(x), _last(weight), padding)
    return y if bias is None else y + bias.view(-1, 1, 1)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> Any:
    if stride != [1, 1] or dilation != [1, 1] or transposed or groups != 1:
        return NotImplemented
    if output_mask[:2] == [True, True] and winograd.pays(x, weight, padding):
        of_x, of_weight = torch.ops.fedsim.winograd_backward(_last(grad), _last(x), _last(weight), padding)
        return of_x, of_weight, grad.sum((0, 2, 3)) if output_mask[2] else None
    if x.shape[1] == 1 and padding == [0, 0] and not output_mask[0]:
        # A first layer over a single channel, as one product of gradients and patches: oneDNN has no kernel for it.
        channels, _, h, w = weight.shape
        by_place = grad.permute(0, 2, 3, 1).reshape(-1, channels)
        patches = x[:, 0].unfold(1, h, 1).unfold(2, w, 1).reshape(-1, h * w)
        return None, (by_place.t() @ patches).view(weight.shape), by_place.sum(0) if output_mask[2] else None
    return NotImplemented


class Lstm(torch.autograd.Function):
    """(h, c, gates) of a layer, under torch.func's gradient too."""

    @staticmethod
    def forward(*given: Tensor) -> Any:
        return torch.ops.fedsim.lstm(*(t.contiguous() for t in given))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, w, r, _), (h, c, gates) = inputs, output
        ctx.save_for_backward(x, h, c, gates, w, r)

    @staticmethod
    def backward(ctx: Any, of_h: Tensor, *rest: Any) -> Any:
        return torch.ops.fedsim.lstm_backward(*(t.contiguous() for t in (of_h, *ctx.saved_tensors)))


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def products(a: Tensor, b: Tensor) -> Any:
    """A stack's small products as sums that the compiler vectorises, together with what comes before and after: MKL's
    kernels are for larger ones."""
    depth, columns = b.shape[1:]
    if depth <= FEW and columns > FEW and b.stride(2) == 1:  # a weight's gradient: a sum over the few samples
        return (a.unsqueeze(3) * in_memory(b).unsqueeze(1)).sum(2)
    if columns <= FEW and depth > FEW and a.stride(2) == 1 and b.stride(1) == 1:  # a layer with few outputs
        a, b = in_memory(a), in_memory(b)
        return (a.unsqueeze(2) * b.transpose(1, 2).unsqueeze(1)).sum(-1)
    return NotImplemented


def product(a: Tensor, b: Tensor) -> Any:
    """Of a stack's first step, in which all clients have the same weights; as `products`."""
    depth, columns = b.shape
    if columns <= FEW < depth and a.stride(1) == 1 and b.stride(0) == 1:
        return (in_memory(a).unsqueeze(1) * in_memory(b).t().unsqueeze(0)).sum(-1)
    return NotImplemented


def few_outputs(bias: Tensor, a: Tensor, b: Tensor, **scales: float) -> Any:
    """Of many rows, the other way round: MKL takes half the time for a product that is wide."""
    rows, columns = a.shape[0], b.shape[1]
    return (b.t() @ a.t()).t() + bias if columns <= FEW < rows // 4 and not scales else NotImplemented


def weighted(a: Tensor, w: Tensor) -> Tensor:
    """A sum over a stack, together with what comes before it."""
    return (a * w).sum(1)


def in_memory(t: Tensor) -> Tensor:
    """As it is; but the compiler then has it in memory, and does not compute it again wherever it is used."""
    return t.as_strided(t.shape, t.stride())


Decompositions = dict[Any, Callable[..., Any]]
STACKED: Decompositions = {aten.bmm.default: products, aten.mm.default: product, aten.mv.default: weighted}
CHANNELS_LAST: Decompositions = {
    aten.max_pool2d_with_indices.default: pooled,
    aten.max_pool2d_with_indices_backward.default: pooled_backward,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.addmm.default: few_outputs,
}


def forms(stacked: bool, device: torch.device) -> Decompositions:
    """Which operations of a program have a form of their own."""
    if device.type != "cpu":
        return {}
    return STACKED if stacked else CHANNELS_LAST
