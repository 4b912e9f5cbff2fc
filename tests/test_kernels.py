"""A compiled step's own forms of pooling and convolution, against torch's."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.testing import assert_close

from fedsim.program import Compiled
from fedsim.types import Tree

NETWORKS = {
    # a first layer over one channel, windows that do not divide the image
    "one channel": (1, nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2))),
    # what has no form of its own: overlapping windows with a border, a convolution with padding and stride
    "others": (1, nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, stride=2, bias=False), nn.MaxPool2d(3, 2, 1))),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients(name: str) -> None:
    channels, network = NETWORKS[name]
    network = network.double()
    params = {n: p.detach() for n, p in network.named_parameters()}
    x = torch.rand(5, channels, 11, 13, dtype=torch.float64).contiguous(memory_format=torch.channels_last)

    def gradient(params: Tree, x: Tensor) -> Tree:
        def value(params: Tree) -> Tensor:
            out: Tensor = functional_call(network, params, (x,))
            return out.square().sum()

        found: Tree = grad(value)(params)
        return found

    with torch.no_grad():
        found = Compiled(gradient, channels_last=True)(params, x)
    assert_close(found, gradient(params, x), rtol=1e-12, atol=1e-12)
