"""Operations for which torch's own kernels are faster on a CPU, channels last, than what the compiler makes of them:
it neither vectorises a pool's search for its maxima nor the way back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

aten = torch.ops.aten


@custom_op("fedsim::max_pool", mutates_args=())
def max_pool(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    values, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    return values, indices


@custom_op("fedsim::max_pool_backward", mutates_args=())
def max_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    result: Tensor = aten.max_pool2d_with_indices_backward(
        grad, x, kernel, stride, padding, dilation, ceil_mode, indices
    )
    return result


max_pool.register_fake(aten.max_pool2d_with_indices)
max_pool_backward.register_fake(aten.max_pool2d_with_indices_backward)


def pooled(
    x: Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> Any:
    return max_pool(x, kernel, stride or kernel, padding or [0, 0], dilation or [1, 1], ceil_mode)


def pooled_backward(grad: Tensor, x: Tensor, *rest: Any) -> Any:
    # The kernel is fast where both are laid out alike.
    return max_pool_backward(grad.contiguous(memory_format=torch.channels_last), x, *rest)


CHANNELS_LAST: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices.default: pooled,
    aten.max_pool2d_with_indices_backward.default: pooled_backward,
}
