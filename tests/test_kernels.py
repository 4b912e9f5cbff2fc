"""A compiled step's own forms of pooling and convolution, against torch's."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._pytree import tree_map, tree_map_only

from fedsim.kernels import CHANNELS_LAST, STACKED
from fedsim.native import X86
from fedsim.program import Compiled
from fedsim.types import Tree

NETWORKS = {
    # a first layer over one channel, windows that do not divide the image
    "one channel": (1, nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2))),
    # by Winograd's tiles, with biases, both sizes of filters; then a stride, for which there is no such form
    "winograd": (
        3,
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 8, 5, padding=(0, 2), bias=False),
            nn.Conv2d(8, 8, 3, stride=2),
        ),
    ),
    # what has no form of its own: overlapping windows with a border, a convolution with padding and stride
    "others": (1, nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, stride=2, bias=False), nn.MaxPool2d(3, 2, 1))),
}
TILED = {"one channel": 0, "winograd": 2 if X86 else 0, "others": 0}
"""Convolutions of each that are made of tiles."""


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
        recorded = make_fx(gradient, CHANNELS_LAST)(params, x).code
        found = Compiled(gradient, CHANNELS_LAST)(params, x)
    assert recorded.count("fedsim.winograd.default") == recorded.count("fedsim.winograd_backward") == TILED[name]
    assert_close(found, gradient(params, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("apart", [True, False], ids=["own weights", "one's weights for all"])
def test_products_of_a_stack(apart: bool) -> None:
    """A layer of few outputs and its weights' gradients, as sums instead of products."""
    r = torch.Generator().manual_seed(0)
    x = torch.rand(3, 5, 40, dtype=torch.float64, generator=r)
    w = torch.rand(*((3,) if apart else ()), 4, 40, dtype=torch.float64, generator=r)

    def gradients(w: Tensor, x: Tensor) -> Tensor:
        one = grad(lambda w, x: nn.functional.linear(x, w).pow(3).sum())
        found: Tensor = vmap(one, in_dims=(0 if apart else None, 0))(w, x)
        return found

    recorded = make_fx(gradients, STACKED)(w, x).code
    assert "mm" not in recorded
    expected = torch.stack([3 * (b @ v.T).square().T @ b for b, v in zip(x, w.expand(3, 4, 40), strict=True)])
    assert_close(Compiled(gradients, STACKED)(w, x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scales", [{}, {"alpha": 0.5}, {"beta": 2.0}], ids=str)
def test_many_rows_with_few_outputs(scales: dict[str, float]) -> None:
    bias, x, w = (torch.rand(*shape, dtype=torch.float64) for shape in [(3,), (100, 40), (40, 3)])

    def layer(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.addmm(bias, x, w, **scales)

    assert_close(Compiled(layer, CHANNELS_LAST)(bias, x, w), layer(bias, x, w), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channels_last", [True, False])
def test_results_lie_as_the_compiler_is_told(channels_last: bool) -> None:
    """It no longer looks: a program reads them by the strides of the operation's form."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    x, w = (torch.rand(shape).contiguous(memory_format=form) for shape in ((4, 8, 12, 11), (16, 8, 3, 3)))
    own, window = torch.ops.fedsim, ([2, 2], [2, 2], [0, 0], [1, 1], False)
    y = torch.rand(4, 16, 12, 11).contiguous(memory_format=form)
    pooled, places = own.max_pool(x, *window)
    calls: list[tuple[Any, tuple[Any, ...]]] = [(own.max_pool, (x, *window))]
    calls += [(own.max_pool_backward, (torch.ones_like(pooled), x, *window, places))]
    if X86:
        last = [t.contiguous(memory_format=torch.channels_last) for t in (x, w, y)]
        calls += [(own.winograd, (*last[:2], [1, 1])), (own.winograd_backward, (last[2], *last[:2], [1, 1]))]
        sequence, weight, recurrent, bias = (torch.rand(s) for s in ((3, 5, 8), (64, 8), (64, 16), (64,)))
        h, c, gates = own.lstm(sequence, weight, recurrent, bias)
        calls += [(own.lstm, (sequence, weight, recurrent, bias))]
        calls += [(own.lstm_backward, (torch.ones_like(h), sequence, h, c, gates, weight, recurrent))]
    with FakeTensorMode() as fake:
        told = [
            tree_map(lambda t: (t.shape, t.stride()), f(*tree_map_only(Tensor, fake.from_tensor, a))) for f, a in calls
        ]
    assert [tree_map(lambda t: (t.shape, t.stride()), f(*a)) for f, a in calls] == told


def test_a_program_serves_one_kind_of_number() -> None:
    double = Compiled(lambda a: a * 2)
    for kind in (torch.float32, torch.float64, torch.int32):
        assert_close(double(torch.ones(4, dtype=kind)), torch.full((4,), 2, dtype=kind))


FORKED = """
import os, torch
from fedsim.kernels import CHANNELS_LAST
from fedsim.program import Compiled
def made(number):  # one that no cache knows
    return Compiled(torch.func.grad(lambda x: (x * x * number).sum() + torch.sin(x).sum()))
seed = int.from_bytes(os.urandom(6), "big")
made(seed)(torch.ones(2))
if (child := os.fork()) == 0:
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad((x * x).sum(), x)
    made(seed + 1)(torch.ones(3))
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_forked_after_compiling_takes_gradients_and_compiles() -> None:
    """As a sweep does that goes from an engine which compiles in its own process to one with workers."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


KEPT = """
import torch
from fedsim.kernels import CHANNELS_LAST
from fedsim.program import Compiled

convolve = Compiled(lambda x, w: torch.nn.functional.conv2d(x, w, padding=1).relu(), CHANNELS_LAST)
torch.set_num_threads(1)
with torch.no_grad():
    print(convolve(torch.ones(4, 8, 12, 12), torch.ones(16, 8, 3, 3)).sum().item())
"""


def test_what_was_half_written_is_made_anew(tmp_path: Path) -> None:
    """A compiler that is killed leaves the beginning of a file where torch looks for the whole."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def said() -> float:
        command = [sys.executable, "-c", KEPT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    whole = said()
    programs = list(tmp_path.rglob("*.so"))
    for number, program in enumerate(programs):
        program.write_bytes(program.read_bytes()[: 100 * (number % 2)])
    assert len(programs) >= (2 if X86 else 1)
    assert said() == whole
