"""Networks by their published shapes, and the datasets that need no files."""

import pytest
import torch
from conftest import config, experiment
from hydra.utils import instantiate
from torch import nn

from fedsim.check import InputError
from fedsim.dataset.mnist5k import mnist5k
from fedsim.dataset.synthetic import mixture
from fedsim.model.dropout import Dropout


def model(name: str, shape: tuple[int, ...], classes: int, *overrides: str) -> nn.Module:
    return instantiate(config(f"model={name}", *overrides)["model"])(input_shape=shape, num_classes=classes)


def in_words(module: nn.Module, padding: bool = False) -> str:
    """An nn.Sequential, layer by layer, all with biases; `padding` tells convolutions that keep the size apart."""

    def say(m: nn.Module) -> str:
        match m:
            case nn.Conv2d():
                assert m.bias is not None
                same = "same" if padding and m.padding == (1, 1) else ""
                return f"conv{m.kernel_size[0]}{same}:{m.out_channels}"
            case nn.Linear():
                assert m.bias is not None
                return f"{m.in_features}>{m.out_features}"
            case nn.MaxPool2d():
                return f"max{m.kernel_size}"
            case Dropout():
                return f"drop{m.p:g}".replace("0.", ".")
        return {"ReLU": "relu", "BatchNorm2d": "bn", "Flatten": "flat"}[type(m).__name__]

    return " ".join(map(say, module.children()))


# Weights and biases counted from the papers' tables.
CNN_MNIST = (25 * 20 + 20) + (25 * 20 * 50 + 50) + (800 * 500 + 500) + (500 * 10 + 10)
CNN_CIFAR = sum(9 * a * b + b + 2 * b for a, b in [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]) + (
    (2048 * 382 + 382) + (382 * 192 + 192) + (192 * 10 + 10)
)
CNN_EMNIST = (9 * 32 + 32) + (9 * 32 * 64 + 64) + (12 * 12 * 64 * 128 + 128) + (128 * 62 + 62)
RESNET_CONVOLUTIONS = [(3, 16)] + [(16, 16)] * 6 + [(16, 32)] + [(32, 32)] * 5 + [(32, 64)] + [(64, 64)] * 5
RESNET20 = sum(9 * a * b + 2 * b for a, b in RESNET_CONVOLUTIONS) + 64 * 10 + 10


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("logistic", (1, 28, 28), 10, 784 * 10 + 10),
        ("mlp", (1, 28, 28), 10, 784 * 128 + 128 + 128 * 10 + 10),
        ("cnn_mnist", (1, 28, 28), 10, CNN_MNIST),
        ("cnn_cifar", (3, 32, 32), 10, CNN_CIFAR),
        ("cnn_emnist", (1, 28, 28), 62, CNN_EMNIST),
        ("resnet20", (3, 32, 32), 10, RESNET20),
    ],
)
def test_sizes_as_published(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    module = model(name, shape, classes)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert module(torch.randn(3, *shape)).shape == (3, classes)


def test_resnet20_is_the_usual_quarter_million() -> None:
    assert RESNET20 == 269_722
    assert len(RESNET_CONVOLUTIONS) + 1 == 20


def test_resnet20_shortcuts_have_no_parameters_and_halve_the_image() -> None:
    """With the residual branch silenced, a block passes every second pixel on and adds empty channels."""
    block = model("resnet20", (3, 32, 32), 10).blocks[3]
    for p in block.parameters():
        nn.init.zeros_(p)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert out[:, 16:].abs().max() == 0


def test_resnet20_against_its_description() -> None:
    """He et al., Sec. 4.2, written out with torch's functions: 3x3 convolutions, two a block, batch norm after each,
    ReLU after the first and after the sum, stride 2 into stages 2 and 3, global average pooling."""
    module = model("resnet20", (3, 32, 32), 10).eval()
    for name, b in module.named_buffers():
        if "running_mean" in name:
            nn.init.uniform_(b, -0.1, 0.1)
        if "running_var" in name:
            nn.init.uniform_(b, 0.5, 1.5)
    w = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def conv_norm(x: torch.Tensor, conv: str, norm: str, stride: int = 1) -> torch.Tensor:
        x = nn.functional.conv2d(x, w[f"{conv}.weight"], stride=stride, padding=1)
        mean, var = w[f"{norm}.running_mean"], w[f"{norm}.running_var"]
        return nn.functional.batch_norm(x, mean, var, w[f"{norm}.weight"], w[f"{norm}.bias"])

    images = torch.randn(4, 3, 32, 32)
    x = conv_norm(images, "conv", "norm").relu()
    for i in range(9):
        stride = 2 if i in (3, 6) else 1
        inner = conv_norm(x, f"blocks.{i}.conv1", f"blocks.{i}.norm1", stride).relu()
        out = conv_norm(inner, f"blocks.{i}.conv2", f"blocks.{i}.norm2")
        shortcut = torch.zeros_like(out)
        shortcut[:, : x.shape[1]] = x[:, :, ::stride, ::stride]
        x = (out + shortcut).relu()
    assert (x > 0).float().mean() > 0.1, "something reaches the last layer"
    logits = x.mean((2, 3)) @ w["linear.weight"].T + w["linear.bias"]
    torch.testing.assert_close(module(images), logits)


def test_resnet20_starts_from_he_initialisation() -> None:
    module = model("resnet20", (3, 32, 32), 10)
    for name, p in module.named_parameters():
        if "conv" in name:
            fan_in = 9 * p.shape[1]
            assert p.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.2)


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [
        ("cnn_mnist", (1, 28, 28), "conv5:20 relu max2 conv5:50 relu max2 flat 800>500 relu 500>10"),
        (
            "cnn_cifar",
            (3, 32, 32),
            "conv3:32 bn relu conv3:32 bn relu max2 conv3:64 bn relu conv3:64 bn relu max2 "
            "conv3:128 bn relu conv3:128 bn relu max2 flat 2048>382 relu 382>192 relu 192>10",
        ),
        ("cnn_emnist", (1, 28, 28), "conv3:32 relu conv3:64 relu max2 drop.25 flat 9216>128 relu drop.5 128>10"),
    ],
)
def test_layers_as_published(name: str, shape: tuple[int, ...], layers: str) -> None:
    """FedNNNN's Tables 3 and 4 (all with biases); Reddi et al.'s EMNIST network."""
    assert in_words(model(name, shape, 10)) == layers


def test_mlp_against_its_formula() -> None:
    module = model("mlp", (6,), 3, "model.hidden=[5]")
    x = torch.randn(4, 6)
    first, second = module.layers
    expected = (x @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias
    torch.testing.assert_close(module(x), expected)


def test_resnet20_with_group_norm_has_no_buffers() -> None:
    group = model("resnet20", (3, 32, 32), 10, "model.norm=group")
    assert list(group.buffers()) == []
    assert sum(p.numel() for p in group.parameters()) == RESNET20
    assert len(list(model("resnet20", (3, 32, 32), 10).buffers())) == 3 * 19


def test_mlp_of_any_widths() -> None:
    module = model("mlp", (5,), 3, "model.hidden=[7,4]")
    assert [tuple(p.shape) for p in module.parameters()] == [(7, 5), (7,), (4, 7), (4,), (3, 4), (3,)]


@pytest.mark.parametrize("name", ["cnn_mnist", "cnn_cifar", "cnn_emnist", "resnet20"])
def test_networks_for_images_refuse_vectors(name: str) -> None:
    with pytest.raises(InputError, match=f"model={name} needs images"):
        experiment("dataset=synthetic", f"model={name}")


def test_mnist5k_is_real_balanced_and_split() -> None:
    data = mnist5k(standardize=True)
    assert data.train_x.shape == (4000, 1, 28, 28)
    assert data.test_x.shape == (1000, 1, 28, 28)
    assert data.train_y.bincount().tolist() == [400] * 10
    assert data.test_y.bincount().tolist() == [100] * 10
    both = {x.numpy().tobytes() for x in torch.cat([data.train_x, data.test_x])}
    assert len(both) == 5000, "no image twice, none in both parts"
    assert data.train_x.dtype == torch.uint8


def test_mixture_of_any_size() -> None:
    data = mixture(train_samples=1003, test_samples=50, num_classes=4, features=6, separation=10.0, seed=0)
    assert data.train_y.bincount().tolist() == [251, 251, 251, 250]
    centres = torch.stack([data.train_x[data.train_y == c].mean(0) for c in range(4)])
    assert torch.allclose(centres.norm(dim=1), torch.full((4,), 10.0), atol=0.3)
    within = torch.cat([data.train_x[data.train_y == c] - centres[c] for c in range(4)])
    assert within.std().item() == pytest.approx(1.0, abs=0.05)
