"""The newer networks by hand arithmetic, anyone's own module, and sequences with a target at every position."""

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import config, environment, play, work_of
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models_and_datasets import in_words
from torch import Tensor, nn
from torch.func import functional_call

from fedsim import build, personal
from fedsim.check import InputError
from fedsim.data import Dataset, FederatedData, Split
from fedsim.runner import Experiment, initial_state
from fedsim.task import Task
from fedsim.types import Model


@functools.cache
def section(*overrides: str) -> dict[str, Any]:
    return dict(config(*overrides)["model"])


def model(name: str, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, **values: object) -> nn.Module:
    made: nn.Module = instantiate({**section(f"model={name}"), **values})(input_shape=shape, num_classes=classes)
    return made


def conv(inputs: int, outputs: int, size: int = 3) -> int:
    """Weights of a convolution without bias."""
    return inputs * outputs * size * size


def linear(*widths: int) -> int:
    return sum(a * b + b for a, b in pairwise(widths))


# conv3 32 and conv3 64 without padding take 32 to 30 to 28; the pool to 14; 64 x 14 x 14 = 12544.
CNN_PFL = (conv(3, 32) + 32) + (conv(32, 64) + 64) + linear(12544, 128, 10)
VGG9_WIDTHS = [(3, 32), (32, 64), (64, 128), (128, 128), (128, 256), (256, 256)]
# Three pools take 32 to 4; 256 x 4 x 4 = 4096.
VGG9 = sum(conv(a, b) + b for a, b in VGG9_WIDTHS) + linear(4096, 512, 512, 10)
# Four stages of two blocks of two convolutions; from the second on, the first block has a 1 x 1 convolution beside it.
# Every convolution is followed by a norm with a scale and a shift a channel.
STAGES = [(64, 64), (64, 128), (128, 256), (256, 512)]
RESNET18_BODY = sum(conv(a, b) + 3 * conv(b, b) + 4 * 2 * b for a, b in STAGES) + sum(
    conv(a, b, 1) + 2 * b for a, b in STAGES[1:]
)


def test_the_arithmetic() -> None:
    assert CNN_PFL == 896 + 18_496 + 1_605_760 + 1_290 == 1_626_442
    assert VGG9 == 896 + 18_496 + 73_856 + 147_584 + 295_168 + 590_080 + 2_097_664 + 262_656 + 5_130 == 3_491_530
    imagenet = conv(3, 64, 7) + 2 * 64 + RESNET18_BODY + linear(512, 1000)
    assert imagenet == 11_689_512, "ResNet-18, as published everywhere"


@pytest.mark.parametrize(
    ("name", "classes", "values", "parameters"),
    [
        ("cnn_pfl", 10, {}, CNN_PFL),
        ("vgg9", 10, {}, VGG9),
        ("resnet18_gn", 100, {}, conv(3, 64) + 2 * 64 + RESNET18_BODY + linear(512, 100)),
        ("resnet18_gn", 1000, {"stem": "imagenet"}, 11_689_512),
    ],
)
def test_parameters(name: str, classes: int, values: dict[str, object], parameters: int) -> None:
    module = model(name, classes=classes, **values)
    assert sum(p.numel() for p in module.parameters()) == parameters
    kept = set(module.state_dict()) - {n for n, _ in module.named_parameters()}
    assert kept == set(), "no batch norm: nothing that clients' data leave behind"


@pytest.mark.parametrize("name", ["cnn_pfl", "vgg9", "resnet18_gn"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_shapes_outside_weights_and_gradients(name: str, shape: tuple[int, ...]) -> None:
    """Weights are taken from outside, and every one of them matters."""
    torch.manual_seed(0)
    module, x = model(name, shape, 7).eval(), torch.randn(4, *shape)
    before = module(x)
    assert before.shape == (4, 7)
    outside = {n: (p.detach() * 0.9).requires_grad_() for n, p in module.named_parameters()}
    out = functional_call(module, outside, (x,))
    assert not torch.allclose(out, before)
    assert torch.equal(module(x), before), "its own weights are as they were"
    gradients = torch.autograd.grad(nn.functional.cross_entropy(out, torch.tensor([0, 3, 6, 3])), [*outside.values()])
    assert [n for n, g in zip(outside, gradients, strict=True) if not g.abs().sum() > 0] == []


def test_layers_in_order() -> None:
    assert in_words(model("cnn_pfl"), padding=True) == (
        "conv3:32 relu conv3:64 relu max2 drop.25 flat 12544>128 relu drop.5 128>10"
    )
    assert in_words(model("vgg9"), padding=True) == (
        "conv3same:32 relu conv3same:64 relu max2 conv3same:128 relu conv3same:128 relu max2 "
        "conv3same:256 relu conv3same:256 relu max2 flat 4096>512 relu 512>512 relu 512>10"
    )


def test_cnn_pfl_starts_from_xavier() -> None:
    """Uniform up to sqrt(6 / (fan in + fan out)), whose standard deviation is that over sqrt(3)."""
    torch.manual_seed(0)
    for module in model("cnn_pfl").children():
        if isinstance(module, nn.Conv2d | nn.Linear):
            out, *inputs = module.weight.shape
            taps = math.prod(inputs[1:])
            bound = math.sqrt(6 / (inputs[0] * taps + out * taps))
            assert module.weight.abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize(("stem", "sizes"), [("cifar", [32, 16, 8, 4]), ("imagenet", [8, 4, 2, 1])])
def test_resnet18_stages_and_groups(stem: str, sizes: list[int]) -> None:
    module, seen = model("resnet18_gn", stem=stem), []
    for stage in (module.layer1, module.layer2, module.layer3, module.layer4):
        stage.register_forward_hook(lambda _module, _inputs, output: seen.append(tuple(output.shape)))
    module(torch.randn(1, 3, 32, 32))
    assert seen == [(1, width, size, size) for width, size in zip((64, 128, 256, 512), sizes, strict=True)]
    norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20
    assert {m.num_groups for m in norms} == {2}
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def test_group_norm_does_not_look_at_the_rest_of_the_batch() -> None:
    torch.manual_seed(0)
    module, x = model("resnet18_gn"), torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(module.train()(x)[:1], module.eval()(x[:1]))


@pytest.mark.parametrize("name", ["cnn_pfl", "vgg9", "resnet18_gn"])
@pytest.mark.parametrize("shape", [(20,), (3, 4, 4), (80, 8)])
def test_networks_for_images_refuse_other_samples(name: str, shape: tuple[int, ...]) -> None:
    said = "x".join(map(str, shape))
    with pytest.raises(InputError, match=rf"model={name} needs images of at least \d x \d; .* shape {said}$"):
        model(name, shape)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"groups": 3}, "groups=3: must divide"),
        ({"groups": 0}, "groups=0: .*>= 1"),
        ({"stem": "vgg"}, "stem=vgg: must be one of cifar, imagenet"),
    ],
)
def test_resnet18_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model("resnet18_gn", **values)


# Anyone's own module.

OWN = """
import torch
from torch import nn
from fedsim.data import Dataset

NUMBER = 3


class Net(nn.Sequential):
    def __init__(self, width, input_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, num_classes))


def plain(outputs=10):
    return nn.Linear(20, outputs)


def no_module():
    return {"weights": 1}


def fails():
    raise KeyError("no such\\nlayer")


class Fails(nn.Linear):
    def __init__(self, kind):
        super().__init__(20, 10)
        self.kind = kind

    def forward(self, x):
        if self.kind == "tuple":
            return super().forward(x), x
        if self.kind == "assertion":
            assert x.shape[1] == 3, "wants three channels"
        if self.kind == "key":
            return {}["logits"]
        if self.kind == "zero":
            return x / (1 // 0)
        raise NotImplementedError("later")


class Empty(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return x[:, :10]


def images(channels=3, size=32, samples=24):
    r = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, channels, size, size), generator=r, dtype=torch.uint8)
    y = torch.arange(samples) % 3
    return {"train_x": x, "train_y": y, "test_x": x[:6], "test_y": y[:6]}


def sequences():
    x = torch.arange(24).view(6, 4).byte() % 5 + 1
    return {"train_x": x, "train_y": x.long() % 5 + 1, "test_x": x, "test_y": x.long() % 5 + 1}
"""
MADE_UP = ("dataset=synthetic", "dataset.train_samples=60", "dataset.test_samples=20")
LINES = (
    *("partition=iid", "partition.num_clients=3", "participation.clients_per_round=2", "aggregator=fedavg", "rounds=1"),
)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's, importable under the name `mine`."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def net(:\n")
    (tmp_path / "unlucky.py").write_text("import torch\nraise ZeroDivisionError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine", "broken", "unlucky"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@functools.cache
def composed(*overrides: str) -> str:
    """As text: composing takes longer than all that follows."""
    return json.dumps(config(*LINES, *overrides))


def built(load: str, arguments: object = None, data: str | None = None) -> Experiment:
    """A module by import path, on made-up vectors or on data by import path."""
    asked = json.loads(composed("model=custom", "model.load=x", *(MADE_UP if data is None else DATA)))
    asked["model"]["load"] = load
    if arguments is not None:
        asked["model"]["arguments"] = arguments
    if data is not None:
        asked["dataset"]["load"] = data
    return build.experiment(asked, torch.device("cpu"))


DATA = ("dataset=custom", "dataset.load=x")


@pytest.mark.usefixtures("own")
def test_a_module_of_ones_own_gets_the_shapes_it_asks_for() -> None:
    exp = built("mine.Net", {"width": 7})
    assert [tuple(p.shape) for p in exp.task.initial_model().params.values()] == [(7, 20), (7,), (10, 7), (10,)]
    final, rows = play(exp)
    assert final.round == len(rows) == 1
    assert math.isfinite(rows[0]["test/loss"])
    assert built("mine.plain").task.layers.names == ["weight", "bias"]


@pytest.mark.usefixtures("own")
def test_torchvisions_resnet18_by_name() -> None:
    start = built("torchvision.models.resnet18", data="mine.images").task.initial_model()
    assert start.params["fc.weight"].shape == (3, 512)
    assert sum(p.numel() for p in start.params.values()) == 11_689_512 - linear(512, 1000) + linear(512, 3)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("load", "arguments", "message"),
    [
        ("nowhere.Net", {}, r"model\.load=nowhere\.Net: there is no module nowhere"),
        ("mine.Missing", {}, r"model\.load=mine\.Missing: must be a function or a class"),
        ("mine", {}, r"model\.load=mine: "),
        ("broken.net", {}, r"model\.load=broken\.net: broken "),
        ("unlucky.net", {}, r"model\.load=unlucky\.net: unlucky cannot be imported \(.*at import"),
        ("mine.NUMBER", {}, r"model\.load=mine\.NUMBER: "),
        ("Net", {}, r"model\.load=Net: "),
        ("mine..Net", {}, r"model\.load=mine\.\.Net: "),
        ("", {}, r"model\.load=: must be text"),
        (7, {}, r"model\.load=7: must be text"),
        ("mine.fails", {}, r"model=custom: mine\.fails failed \(KeyError: 'no such"),
        ("mine.Net", {}, r"model=custom: mine\.Net failed \(TypeError: .*width"),
        ("mine.Net", {"width": 4, "depth": 2}, r"model=custom: mine\.Net failed \(TypeError: .*depth"),
        ("mine.no_module", {}, r"model\.load=mine\.no_module: must make an nn\.Module, not dict"),
        ("mine.plain", [7], r"model\.arguments=\[7\]: is a section"),
        ("mine.plain", {"outputs": 9}, r"model: Linear gives 2x9 for 2 samples, this dataset needs 2x10"),
        ("torch.nn.Identity", {}, r"model: Identity "),
        ("mine.Empty", {}, r"model: Empty "),
        ("mine.Fails", {"kind": "tuple"}, r"model: Fails "),
        ("mine.Fails", {"kind": "none"}, r"model: Fails .*later"),
        ("mine.Fails", {"kind": "assertion"}, r"model: Fails .*wants three channels"),
        ("mine.Fails", {"kind": "key"}, r"model: Fails .*logits"),
        ("mine.Fails", {"kind": "zero"}, r"model: Fails .*zero"),
    ],
)
def test_a_module_that_does_not_fit_is_one_line(load: str, arguments: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        built(load, arguments)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("own")
def test_images_of_another_size_are_one_line() -> None:
    with pytest.raises(InputError, match=r"model: Linear cannot take this dataset's samples of shape 3x32x32") as error:
        built("mine.plain", data="mine.images")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["mlp", "logistic", "cnn_mnist", "resnet20", "vgg9"])
def test_tokens_are_nothing_for_other_networks(name: str) -> None:
    asked = json.loads(composed("model=custom", "model.load=x", *DATA))
    asked["dataset"]["load"], asked["model"] = "mine.sequences", section(f"model={name}")
    with pytest.raises(InputError, match=r"^model") as error:
        build.experiment(asked, torch.device("cpu"))
    assert "\n" not in str(error.value)


def test_the_command_finds_a_module_in_the_current_folder(own: Path) -> None:
    """The installed command, which unlike `python -m` does not look there by itself."""
    typed = [*LINES, *MADE_UP, "model=custom", "model.load=mine.Net", "model.arguments={width:4}"]
    command, streams = Path(sys.executable).parent / "fedsim", {"capture_output": True, "text": True}
    run = subprocess.run([command, *typed], cwd=own, env=environment(), timeout=120, **streams)
    assert run.returncode == 0, run.stderr
    (summary,) = own.glob("outputs/*/summary.json")
    assert json.loads(summary.read_text())["parameters"] == linear(20, 4, 10)


# Sequences: tokens [N, T] with a target at every position, 0 where there is none.

V, T, WIDTH = 6, 5, 3


class Reader(nn.Module):
    """Looks at each position alone: logits = U tanh(E[token]) + b."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, WIDTH)
        self.linear = nn.Linear(WIDTH, V)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.embedding(tokens).tanh())
        return logits


def sequences(samples: int = 7, seed: int = 0, clients: np.ndarray | None = None) -> Dataset:
    """Sequences of different lengths, at least one target each."""
    r = np.random.default_rng(seed)
    x, y = r.integers(1, V, (samples, T)), r.integers(1, V, (samples, T))
    beyond = np.arange(T) >= r.integers(1, T + 1, samples)[:, None]
    x[beyond] = y[beyond] = 0
    tokens, targets = torch.from_numpy(x.astype(np.uint8)), torch.from_numpy(y)
    return Dataset(
        *(tokens, targets, tokens, targets, V, torch.ones(1), torch.zeros(1)),
        tokens=True,
        train_client=clients,
        test_client=clients,
    )


def reader(seed: int = 0) -> tuple[Task, Model, Dataset]:
    torch.manual_seed(seed)
    data = sequences()
    task = Task(Reader().double(), data)
    return task, task.initial_model(), data


def by_numpy(params: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, int, int]:
    """(sum of -log softmax of the targets, right ones, targets), position by position."""
    loss, right, count = 0.0, 0, 0
    for token, target in zip(x.ravel(), y.ravel(), strict=True):
        if target:
            hidden = np.tanh(params["embedding.weight"][token])
            logits = params["linear.weight"] @ hidden + params["linear.bias"]
            loss += np.log(np.exp(logits).sum()) - logits[target]
            right += int(np.argmax(logits) == target)
            count += 1
    return loss, right, count


def arrays(model: Model) -> dict[str, np.ndarray]:
    return {name: p.numpy().copy() for name, p in model.params.items()}


def test_loss_and_gradient_of_sequences_by_finite_differences() -> None:
    """The mean over all targets of a batch, however they lie in its samples; padding is no target."""
    task, start, data = reader()
    x, y, h = data.train_x.numpy(), data.train_y.numpy(), 1e-5
    gradient, loss = task.gradient(start.params, {}, (data.inputs(data.train_x), data.train_y))
    total, _, count = by_numpy(arrays(start), x, y)
    assert count == (y != 0).sum() < y.size
    assert loss.item() == pytest.approx(total / count, rel=1e-12)
    for name, values in arrays(start).items():
        for place in np.ndindex(values.shape):
            moved = []
            for step in (h, -h):
                other = arrays(start)
                other[name][place] += step
                moved.append(by_numpy(other, x, y)[0] / count)
            assert gradient[name][place].item() == pytest.approx((moved[0] - moved[1]) / (2 * h), abs=1e-8)


@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 9), seed=st.integers(0, 99), chosen=st.none() | st.lists(st.integers(0, 6), min_size=1))
def test_evaluation_of_sequences_in_batches_of_any_size(batch: int, seed: int, chosen: list[int] | None) -> None:
    task, start, data = reader(seed)
    index = None if chosen is None else torch.tensor(chosen)
    found = task.evaluate(start, data, data.test_x, data.test_y, batch, index)
    part = slice(None) if chosen is None else chosen
    loss, right, count = by_numpy(arrays(start), data.test_x.numpy()[part], data.test_y.numpy()[part])
    assert found.correct is not None
    assert (int(found.correct), int(found.count)) == (right, count)
    assert found.loss_sum.item() == pytest.approx(loss, rel=1e-6)


def test_what_stands_in_padding_changes_nothing() -> None:
    task, start, data = reader()
    x, y = data.train_x, data.train_y
    other = torch.where(y == 0, (x + 3) % V, x).to(torch.uint8)
    assert not torch.equal(other, x)
    results = []
    for tokens in (x, other):
        gradient, loss = task.gradient(start.params, {}, (data.inputs(tokens), y))
        found = task.evaluate(start, data, tokens, y, 3)
        assert found.correct is not None
        results.append((loss, *gradient.values(), found.loss_sum, found.correct))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_prediction_of_padding_is_never_right() -> None:
    task, start, data = reader()
    start.params["linear.bias"][0] = 1e3
    found = task.evaluate(start, data, data.test_x, data.test_y, 4)
    assert found.correct is not None
    assert found.correct.item() == 0


def federated(data: Dataset, sizes: list[int], codes: np.ndarray | None = None) -> FederatedData:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return FederatedData(data, Split(np.arange(sum(sizes)), offsets, np.zeros(len(sizes), int), codes), seed=0)


@pytest.mark.parametrize("batch", [1, 2, 3, None])
def test_a_clients_mean_over_batches_is_over_its_targets(batch: int | None) -> None:
    """Batches with more targets weigh more: so that their size does not matter."""
    task, start, data = reader()
    client = federated(data, [5, 2]).client(0, 0, batch)
    x, y = data.inputs(data.train_x[:5]), data.train_y[:5]
    whole, loss = task.gradient(start.params, {}, (x, y))
    pieces = task.full_gradient(start, client.all())
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name])
    assert task.mean_loss(start, client).item() == pytest.approx(loss.item(), rel=1e-6)


def test_label_counts_of_sequences_are_target_counts() -> None:
    data = sequences()
    counts = federated(data, [4, 3]).label_counts()
    y = data.train_y.numpy()
    assert counts.tolist() == [[0, *((part == c).sum() for c in range(1, V))] for part in (y[:4], y[4:])]


# Personal accuracy: a client with test samples of its own is judged on those.

PEOPLE = '''
import numpy as np


def load():
    """Four people; x points at what a model of ones on the diagonal says, y is what is right."""
    who = {"train": "aaaabbbbbbccd" , "test": "bbbbaaeec"}
    said = {"train": [0] * 13, "test": [0, 1, 2, 0, 1, 2, 0, 1, 2]}
    right = {"train": [0] * 13, "test": [0, 1, 1, 1, 1, 2, 0, 1, 0]}
    arrays = {}
    for part in who:
        arrays[f"{part}_x"] = 100 * np.eye(3, dtype=np.float32)[said[part]]
        arrays[f"{part}_y"] = np.array(right[part])
        arrays[f"{part}_client_id"] = np.array(list(who[part]))
    return arrays | {"class_names": np.array(["x", "y", "z"])}
'''


@pytest.fixture
def people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Experiment]:
    (tmp_path / "people.py").write_text(PEOPLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "people", raising=False)

    def make(**partition: object) -> Experiment:
        lines = ("dataset=custom", "dataset.load=people.load", "model=logistic", "aggregator=fedavg", "rounds=1")
        asked = config(*lines, "partition=natural", "participation.clients_per_round=1", "client_optimizer.lr=1e-30")
        asked["partition"] |= partition
        return build.experiment(asked, torch.device("cpu"))

    return make


def judged(exp: Experiment) -> dict[str, float]:
    """Of the model that says what x points at, over all clients."""
    state = initial_state(exp)
    params = {n: torch.eye(3) if p.ndim == 2 else torch.zeros(3) for n, p in state.model.params.items()}
    work = replace(work_of(exp, state), model=Model(params, {}))
    return {name: float(value) for name, value in personal.accuracy(work, 1.0, batch_size=2).items()}


def test_natural_clients_are_judged_on_their_own_test_samples(people: Callable[..., Experiment]) -> None:
    """a has 2 of 2 right, b 2 of 4, c 0 of 1. d has no test samples, e no training samples: neither is judged."""
    exp = people()
    names = [exp.data.dataset.client_names[code] for code in exp.data.split.codes]
    assert sorted(names) == ["a", "b", "c", "d"]
    sizes = {name: int(size) for name, size in zip(names, exp.data.split.sizes, strict=True)}
    assert sizes == {"a": 3, "b": 5, "c": 1, "d": 1}, "a tenth, at least one, is B_k where there are two"
    assert {names[k] for k in personal.sample(exp.data, 1.0)} == {"a", "b", "c"}
    found = judged(exp)
    for moment in ("before", "after"):
        assert found[f"personal/accuracy_{moment}"] == pytest.approx((3 * 1 + 5 * 0.5 + 1 * 0) / 9)
        assert found[f"personal/accuracy_{moment}_uniform"] == pytest.approx((1 + 0.5 + 0) / 3)
        assert found[f"personal/accuracy_{moment}_std"] == pytest.approx(np.std([1, 0.5, 0]))


def test_a_clients_own_test_samples_follow_it_into_a_smaller_federation(people: Callable[..., Experiment]) -> None:
    exp = people(min_samples=5)
    assert [exp.data.dataset.client_names[code] for code in exp.data.split.codes] == ["b"]
    assert exp.data.dataset.test_y[personal.test_samples(exp.data, 0, [])].tolist() == [0, 1, 1, 1]
    assert judged(exp)["personal/accuracy_before"] == pytest.approx(0.5)


def test_personal_accuracy_of_sequences_counts_targets() -> None:
    """Two clients of unequal sequences; each one's share of right targets, not of right sequences."""
    owner = np.array([0, 0, 0, 1, 1, 1, 1])
    torch.manual_seed(3)
    data = sequences(clients=owner)
    task = Task(Reader().double(), data)
    whole = federated(data, [3, 4], codes=np.array([0, 1]))
    start = task.initial_model()
    expected = []
    for code in (0, 1):
        own = owner == code
        _, right, count = by_numpy(arrays(start), data.test_x.numpy()[own], data.test_y.numpy()[own])
        expected.append(right / count)
        index = whole.on_device(personal.test_samples(whole, code, []))
        found = task.evaluate(start, data, data.test_x, data.test_y, 2, index)
        assert found.correct is not None
        assert (found.correct / found.count).item() == pytest.approx(expected[-1])
    assert expected[0] != expected[1]
