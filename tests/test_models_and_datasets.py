"""Networks by their published shapes; datasets from files of the official formats, whole, damaged and missing."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import config, environment, experiment
from hydra.utils import instantiate
from torch import nn

from fedsim.check import InputError
from fedsim.dataset import images
from fedsim.dataset.mnist5k import mnist5k
from fedsim.dataset.synthetic import mixture


def model(name: str, shape: tuple[int, ...], classes: int, *overrides: str) -> nn.Module:
    return instantiate(config(f"model={name}", *overrides)["model"])(input_shape=shape, num_classes=classes)


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

    def say(m: nn.Module) -> str:
        match m:
            case nn.Conv2d():
                assert m.bias is not None
                return f"conv{m.kernel_size[0]}:{m.out_channels}"
            case nn.Linear():
                assert m.bias is not None
                return f"{m.in_features}>{m.out_features}"
            case nn.MaxPool2d():
                return f"max{m.kernel_size}"
            case nn.Dropout():
                return f"drop{m.p:g}".replace("0.", ".")
        return {"ReLU": "relu", "BatchNorm2d": "bn", "Flatten": "flat"}[type(m).__name__]

    assert " ".join(say(m) for m in model(name, shape, 10)) == layers


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


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four small files of MNIST's format, whose checksums are taken for the official ones."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    r = np.random.default_rng(0)
    for prefix, n in (("train", 12), ("t10k", 5)):
        write_idx(raw / f"{prefix}-images-idx3-ubyte", r.integers(0, 256, (n, 28, 28)))
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", np.arange(n) % 10)
    monkeypatch.setattr(images, "MNIST_MD5", {name: md5(raw / name) for name in images.MNIST_MD5})
    return tmp_path


def test_mnist_from_files(tiny_mnist: Path) -> None:
    data = images.mnist(str(tiny_mnist), standardize=False, augment=False)
    first = np.random.default_rng(0).integers(0, 256, (12, 28, 28))[0]
    assert np.array_equal(data.train_x[0, 0].numpy(), first)
    assert data.train_y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert data.test_x.shape == (5, 1, 28, 28)


def test_standardisation_constants() -> None:
    """Mean and deviation of the training images, as commonly published."""
    for mean, std, known in (
        ([0.1307], [0.3081], experiment("dataset=mnist5k").data.dataset),
        ([0.1307], [0.3081], images._images(*[torch.zeros(1)] * 4, *images.MNIST_STATISTICS, True, False)),
        ([0.2860], [0.3530], images._images(*[torch.zeros(1)] * 4, *images.FASHION_MNIST_STATISTICS, True, False)),
        (
            [0.4914, 0.4822, 0.4465],
            [0.2470, 0.2435, 0.2616],
            images._images(*[torch.zeros(1)] * 4, *images.CIFAR10_STATISTICS, True, False),
        ),
    ):
        assert (known.scale.flatten() * 255 * torch.tensor(std)).tolist() == pytest.approx([1.0] * len(std))
        assert (-known.shift.flatten() * torch.tensor(std)).tolist() == pytest.approx(mean)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_files_are_never_trained_on(tiny_mnist: Path, damage: str) -> None:
    file = tiny_mnist / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes({"truncate": bytes(content[:-100]), "flip": bytes(content), "empty": b""}[damage])
    with pytest.raises(InputError, match="train-images-idx3-ubyte is damaged or another file"):
        images.mnist(str(tiny_mnist), standardize=True, augment=False)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment().items():
        monkeypatch.setenv(key, value)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_missing_files_without_network_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        getattr(images, name)(str(tmp_path), standardize=True, augment=False)
    assert f"dataset={name}" in str(error.value)
    assert "data_dir=FOLDER" in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.usefixtures("offline")
def test_one_missing_file_is_noticed(tiny_mnist: Path) -> None:
    (tiny_mnist / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(InputError, match="not found"):
        images.mnist(str(tiny_mnist), standardize=True, augment=False)


def test_cifar10_binary_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label byte, then the red, green and blue planes."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    r = np.random.default_rng(1)
    planes = {name: r.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8) for name in images.CIFAR10_BINARY_MD5}
    for i, (name, x) in enumerate(planes.items()):
        labels = np.full((4, 1), i, dtype=np.uint8)
        (folder / name).write_bytes(np.hstack([labels, x.reshape(4, -1)]).tobytes())
    monkeypatch.setattr(images, "CIFAR10_BINARY_MD5", {name: md5(folder / name) for name in planes})
    data = images.cifar10(str(tmp_path), standardize=True, augment=True)
    assert data.train_x.shape == (20, 3, 32, 32)
    assert np.array_equal(data.train_x[4:8].numpy(), planes["data_batch_2.bin"])
    assert data.train_y.tolist() == sorted([0, 1, 2, 3, 4] * 4)
    assert data.test_y.tolist() == [5] * 4
    assert data.augment


def test_cifar10_python_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torchvision: the same images as the binary version would give, channels first, rows down."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    r = np.random.default_rng(2)
    planes = {}
    for i, name in enumerate([*(f"data_batch_{j}" for j in range(1, 6)), "test_batch"]):
        planes[name] = r.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
        entry = {"data": planes[name].reshape(4, -1), "labels": [i] * 4}
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(c) for c in range(10)]}))
    source = images.datasets.CIFAR10
    monkeypatch.setattr(
        source, "train_list", [[f"data_batch_{j}", md5(folder / f"data_batch_{j}")] for j in range(1, 6)]
    )
    monkeypatch.setattr(source, "test_list", [["test_batch", md5(folder / "test_batch")]])
    monkeypatch.setattr(source, "meta", source.meta | {"md5": md5(folder / "batches.meta")})
    data = images.cifar10(str(tmp_path), standardize=True, augment=False)
    assert np.array_equal(data.train_x[4:8].numpy(), planes["data_batch_2"])
    assert np.array_equal(data.test_x.numpy(), planes["test_batch"])
    assert data.train_y.tolist() == sorted([0, 1, 2, 3, 4] * 4)


def test_an_unchecked_pickle_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A python-version folder with wrong checksums is refused (it would be fetched again), not unpickled."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="dataset=cifar10"):
        images.cifar10(str(tmp_path), standardize=True, augment=False)
    assert not (tmp_path / "owned").exists()
