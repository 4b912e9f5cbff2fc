"""From config values to objects: the only place that instantiates, and that knows which key an object came from."""

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from torch import nn

from fedsim import check, rng
from fedsim.client.loadaboost import LoAdaBoost
from fedsim.data import Dataset, FederatedData
from fedsim.engine.auto import settle
from fedsim.logger.base import Logger
from fedsim.model.dropout import replace_dropout
from fedsim.participation.asynchronous import Asynchronous
from fedsim.partition import cache
from fedsim.partition.base import Partition
from fedsim.privacy.channel import Privacy
from fedsim.runner import Evaluate, Experiment, extent, first_work
from fedsim.task import Task
from fedsim.types import Aggregator, Client, Participation

GROUPS = (
    *("dataset", "partition", "model", "client", "client_optimizer", "schedule", "aggregator", "server_optimizer"),
    *("participation", "engine", "shared_data", "privacy", "logger"),
)
ROOT = (
    *(
        "rounds",
        "seed",
        "device",
        "precision",
        "data_dir",
        "cache_dir",
        "overwrite",
        "deterministic",
        "eval",
        "checkpoint",
    ),
    *GROUPS,
)
CACHED, MANY = 200, 2000
"""Samples evaluated at a time, where nobody says: what a CPU's cache holds, what keeps a GPU busy."""
PREVIEW = "preview"
"""partition.preview: draw the partition and stop. Asked of the command, not of the partition."""


def device(name: object) -> torch.device:
    """auto | cpu | cuda | cuda:N | mps."""
    text = str(name)
    kind, _, index = text.partition(":")
    if text == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(kind)
    if kind not in ("cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdigit())):
        raise check.BadValue("device", name, "must be auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise check.BadValue("device", name, "no CUDA device is available here; use device=cpu or device=auto")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise check.BadValue("device", name, f"must be below cuda:{torch.cuda.device_count()}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise check.BadValue("device", name, "no MPS device is available here; use device=cpu or device=auto")
    return torch.device(text)


def precision(name: object, where: torch.device) -> str:
    """fp32 | bf16 | tf32: what products are computed in. Parameters, sums and losses are float32 in any case."""
    check.choice("precision", name, ("fp32", "bf16", "tf32"))
    if name == "tf32" and where.type != "cuda":
        raise check.BadValue("precision", name, f"needs CUDA, and this is {where.type}; use fp32 or bf16")
    if where.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
    return str(name)


def determinism(active: bool, where: torch.device) -> None:
    """On CUDA, only algorithms that give the same bits every time. (The CPU's are, with a fixed number of threads.)"""
    if where.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.backends.cudnn.deterministic = active
        torch.backends.cudnn.benchmark = not active
        torch.use_deterministic_algorithms(active, warn_only=True)


def on_device(config: Mapping[str, Any], where: torch.device) -> dict[str, Any]:
    """With what the device decides where nobody says: a run that goes on elsewhere goes on with the same."""
    asked = dict(config["eval"])
    if asked["batch_size"] is None:
        asked["batch_size"] = CACHED if where.type == "cpu" else MANY
    return {**config, "eval": asked}


def experiment(config: Mapping[str, Any], where: torch.device, before: Mapping[str, Any] | None = None) -> Experiment:
    """Build everything, cheap and easily refused parts first. `before` says how a run that goes on was trained."""
    client, client_optimizer = group(config, "client"), group(config, "client_optimizer")
    precision(config["precision"], where)
    schedule, engine = group(config, "schedule"), group(config, "engine")
    aggregator, server_optimizer = group(config, "aggregator"), group(config, "server_optimizer")
    partition, participation = law(config), group(config, "participation")
    privacy, shared = group(config, "privacy"), group(config, "shared_data")
    asked = on_device(config, where)["eval"]
    evaluate = group({"eval": {"_target_": "fedsim.runner.Evaluate", **asked}}, "eval")
    assert isinstance(evaluate, Evaluate)
    if partition.num_clients is not None:
        enough(participation, partition.num_clients, privacy)
    if aggregator.probe is not None and not partition.sensitivity_fraction:
        raise check.BadValue(
            "partition.sensitivity_fraction", 0, "must be > 0 for this aggregator, which measures on B_k"
        )

    with prefixed("client"):
        client.check(client_optimizer)
    compatible(privacy, client, aggregator, participation)

    data = federated_data(config, where)
    enough(participation, data.num_clients, privacy)
    module = model(config, data.dataset, where)
    task = Task(module, data.dataset, precision(config["precision"], where))
    if privacy.clip is not None and task.initial_model().buffers:
        raise check.BadValue("privacy.clip", privacy.clip, "batch norm's statistics cannot be clipped; use group norm")
    exp = Experiment(
        seed=config["seed"],
        rounds=config["rounds"],
        task=task,
        data=data,
        client=client,
        client_optimizer=client_optimizer,
        schedule=schedule,
        aggregator=aggregator,
        server_optimizer=server_optimizer,
        participation=participation,
        engine=engine,
        eval=evaluate,
        privacy=privacy,
        warmup_epochs=shared.warmup_epochs,
    )
    settled, choice = settle(engine, first_work(exp), extent(exp), before or {})
    return replace(exp, engine=settled, engine_choice=choice)


def enough(participation: Participation, num_clients: int, privacy: Privacy) -> None:
    """Whether there are the clients a round wants."""
    with prefixed("participation"):
        count = participation.count(num_clients)
    if privacy.masked and count < 2:
        raise check.BadValue("participation.clients_per_round", count, "must be 2 or more: masks hide no sum of one")


def law(config: Mapping[str, Any]) -> Partition:
    partition: Partition = group(config, "partition", without=(PREVIEW,))
    return partition


def federated_data(config: Mapping[str, Any], where: torch.device) -> FederatedData:
    """The dataset on its device, and who holds what of it."""
    partition, shared = law(config), group(config, "shared_data")
    dataset, seed = group(config, "dataset"), config["seed"]
    dataset = replace(dataset, fingerprint=dataset.identity())
    everything = np.arange(len(dataset.train_y))
    with prefixed("shared_data"):
        global_set = shared.draw(dataset.train_y.numpy(), seed)
    others = np.setdiff1d(everything, global_set) if len(global_set) else everything
    with prefixed("partition"):
        key = cache.key(partition, dataset.fingerprint, others, seed)
        split = cache.draw(partition, dataset.population(others), seed, key, config["cache_dir"])
    split = replace(split, indices=others[split.indices])
    return FederatedData(dataset.to(where), split, seed, global_set, round(shared.alpha * len(global_set)), key)


def model(config: Mapping[str, Any], dataset: Dataset, where: torch.device) -> nn.Module:
    """The architecture, tried on two samples: what it gives must be what the dataset asks for."""
    rng.seed_torch(torch.device("cpu"), config["seed"], "init")  # weights are drawn there, the same for every device
    architecture = group(config, "model")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # an orthogonal weight's last bits depend on it
    with prefixed("model"):
        module: nn.Module = architecture(input_shape=dataset.input_shape, num_classes=dataset.num_classes)
    torch.set_num_threads(threads)
    replace_dropout(module)
    module = module.to(where)
    if frozen := [n for n, p in module.named_parameters() if not p.requires_grad]:
        raise check.InputError(f"model: {frozen[0]} is frozen (requires_grad=False); every parameter is trained here")
    if next(module.parameters(), None) is None:
        raise check.InputError(f"model: {type(module).__name__} has no parameters to train")
    if not dataset.classification:
        return module
    name, few = type(module).__name__, min(2, len(dataset.test_y))
    expected = (few, *dataset.test_y.shape[1:], dataset.num_classes)
    try:
        task = Task(module, dataset)
        start, x = task.initial_model(), dataset.inputs(dataset.test_x[:few])
        with torch.no_grad():
            found = task.outputs(start.params, start.buffers, x, "eval").shape
        if tuple(found) == expected:
            copies = {n: b.clone() for n, b in start.buffers.items()}
            task.gradient(start.params, copies, (x, dataset.test_y[:few]))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # anyone's code: whatever it raises is told in one line
        kind, shape = "tokens" if dataset.tokens else "samples", "x".join(map(str, dataset.input_shape))
        reason = shorten(f"{type(error).__name__}: {error}", 140, placeholder=" ...")
        raise check.InputError(
            f"model: {name} cannot take this dataset's {kind} of shape {shape} ({reason})"
        ) from error
    if tuple(found) != expected:
        said = ["x".join(map(str, shape)) for shape in (found, expected)]
        raise check.InputError(f"model: {name} gives {said[0]} for {few} samples, this dataset needs {said[1]}")
    return module


def compatible(privacy: Privacy, client: Client, aggregator: Aggregator, participation: Participation) -> None:
    """What cannot be promised together."""
    asynchronous = isinstance(participation, Asynchronous)
    if aggregator.individual and (privacy.active or asynchronous):
        raise check.InputError("aggregator=pfnm needs each client's model: use privacy=none and participation=uniform")
    if privacy.active and asynchronous:
        raise check.InputError("privacy: a sum hides its clients only in synchronous rounds; use participation=uniform")
    if privacy.active and not any(client.traffic):
        raise check.InputError("client=local sends nothing that could be protected; use privacy=none")
    if privacy.noise_multiplier and aggregator.weighting != "uniform":
        raise check.BadValue(
            "aggregator.weighting", aggregator.weighting, "must be uniform with privacy.noise_multiplier > 0"
        )
    if privacy.active and isinstance(client, LoAdaBoost):
        raise check.InputError("client=loadaboost reports every client's loss, which no sum can hide; use privacy=none")


def check_root(config: Mapping[str, Any]) -> None:
    """The keys outside any group: none missing, none that nothing reads, each with a usable value."""
    for key in config:
        if key not in ROOT:
            near = get_close_matches(key, ROOT, n=2) or ROOT
            raise check.BadValue(key, config[key], f"unknown key; valid: {', '.join(near)}")
    for key in ROOT:
        if key not in config:
            raise check.InputError(f"{key} is missing")
    check.integer("rounds", config["rounds"], ge=1)
    check.integer("seed", config["seed"], ge=0)
    for section in ("eval", "checkpoint"):
        check.mapping(section, config[section])
    check.boolean("overwrite", config["overwrite"])
    check.mapping("dataset", config["dataset"])
    for section, values in (("", config), ("dataset.", config["dataset"])):
        for key in ("data_dir", "cache_dir"):
            if key in values:
                check.text(section + key, values[key])
    check.mapping("partition", config["partition"])
    check.boolean("partition.preview", config["partition"].get(PREVIEW))
    check.boolean("deterministic", config["deterministic"])
    if set(config["checkpoint"]) != {"every"}:
        raise check.BadValue("checkpoint", config["checkpoint"], "must have the key every, and no other")
    check.integer("checkpoint.every", config["checkpoint"]["every"], ge=1)


def loggers(config: Mapping[str, Any]) -> list[Logger]:
    return [group(config["logger"], name, "logger.") for name in config["logger"] or {}]


def group(config: Mapping[str, Any], name: str, above: str = "", without: tuple[str, ...] = ()) -> Any:
    """The object a config group describes; its complaints come back under the group's name."""
    values, path = config[name], above + name
    check.mapping(path, values)
    values = {key: value for key, value in values.items() if key not in without}
    if not isinstance(values.get("_target_"), str):
        raise check.BadValue(f"{path}._target_", values.get("_target_"), "must be an import path")
    check.boolean(f"{path}._partial_", values.get("_partial_", False))
    try:
        known = inspect.signature(get_object(values["_target_"])).parameters
    except (ImportError, ValueError) as error:
        raise check.BadValue(f"{path}._target_", values["_target_"], "cannot be imported") from error
    for key in values:
        if not key.startswith("_") and key not in known:
            near = get_close_matches(key, known, n=3) or sorted(known)
            raise check.BadValue(f"{path}.{key}", values[key], f"unknown key; valid: {', '.join(near)}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in values and not values.get("_partial_"):
            raise check.InputError(f"{path}.{key} is missing")
    with prefixed(path):
        return instantiate(values, _convert_="all")


@contextmanager
def prefixed(path: str) -> Iterator[None]:
    """`tau=2: must be ...` becomes `aggregator.tau=2: must be ...`."""
    try:
        yield
    except (check.BadValue, InstantiationException) as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        if isinstance(cause, check.BadValue):
            raise check.BadValue(f"{path}.{cause.key}", cause.value, cause.valid) from error
        raise cause from None
