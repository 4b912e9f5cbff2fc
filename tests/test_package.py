"""The built wheel, installed elsewhere; the configuration; and what the documents promise."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import config, environment, experiment

from fedsim.metrics import LAYER_METRICS, METRICS
from fedsim.overrides import CONF, LONGEST_NAME, cell_name, run_name
from fedsim.table import AXES

ROOT = Path(__file__).resolve().parents[1]
CHOICES = sorted(
    (group.name, choice.relative_to(group).with_suffix("").as_posix())
    for group in CONF.iterdir()
    if group.is_dir()
    for choice in group.rglob("*.yaml")
)

EMBEDDED = ("mnist5k", "synthetic", "quadratic")
NEED_FILES = {
    *((group, choice) for group, choice in CHOICES if group == "dataset" and choice not in EMBEDDED),
    *(("model", "custom"), ("model", "lstm_shakespeare"), ("partition", "natural"), ("partition", "pachinko")),
}
"""Choices that go with data or code of one's own: each has tests that make some."""


def test_the_wheel_runs_in_another_environment_and_folder(tmp_path: Path) -> None:
    """Built without the network, installed into a virtual environment of its own that borrows only dependencies."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("fedsim_lab-*.whl")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, str(wheel)], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = subprocess.run(
        [python, "-c", "import fedsim; print(fedsim.__file__)"],
        check=True,
        capture_output=True,
        text=True,
        cwd=elsewhere,
    )
    assert where.stdout.startswith(str(venv)), "not the checkout"
    run = subprocess.run(
        [venv / "bin" / "fedsim", "rounds=1", "dataset=synthetic"],
        cwd=elsewhere,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert (elsewhere / "outputs" / "dataset=synthetic" / "metrics.csv").exists()
    assert "elastic" in subprocess.run([venv / "bin" / "fedsim", "--help"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_is_documented_and_composes(group: str, choice: str) -> None:
    text = (CONF / group / f"{choice}.yaml").read_text()
    lines = [line for line in text.splitlines() if line != "# @package _global_"]
    assert lines[0].startswith("# "), "the first line says what it is"
    value = f"[{choice}]" if group == "logger" else choice
    assert config(f"{group}={value}")["rounds"] >= 1


@pytest.mark.parametrize(
    ("group", "choice"),
    [c for c in CHOICES if c[0] not in ("experiment", "logger") and c not in NEED_FILES],
)
def test_every_choice_builds(group: str, choice: str) -> None:
    images = ["dataset=mnist5k"] if choice.startswith(("cnn", "resnet", "vgg")) else []
    quadratic = ["dataset=quadratic"] if choice == "quadratic" else []
    few = ["partition.num_clients=20"] if choice not in ("quadratic",) else []
    assert experiment(f"{group}={choice}", *images, *quadratic, *few).rounds >= 1


def test_adaptive_optimizers_keep_their_own_rate_with_every_dataset() -> None:
    assert config("dataset=cifar10", "client_optimizer=adam")["client_optimizer"]["lr"] == 0.001
    assert config("dataset=cifar10", "client_optimizer=nesterov")["client_optimizer"]["lr"] == 0.05
    assert config("dataset=cifar10", "model=cnn_cifar")["model"]["_target_"].endswith("CnnCifar")


PAPER_SETTINGS = {
    "mnist": {"rounds": 20, "num_clients": 1000, "clients_per_round": 100, "batch_size": 100, "lr": 0.1, "epochs": 1},
    "cifar10": {
        "rounds": 4000,
        "num_clients": 1000,
        "clients_per_round": 10,
        "batch_size": 10,
        "lr": 0.05,
        "epochs": 1,
    },
    "fashion_mnist": {"rounds": 30, "num_clients": 10, "clients_per_round": 1.0, "batch_size": 32, "epochs": 1},
}


@pytest.mark.parametrize("dataset", PAPER_SETTINGS)
def test_a_dataset_brings_its_papers_setting(dataset: str) -> None:
    """Elastic's Table 3 (alpha 100, cosine), Felbab et al. (one class a node, all nodes)."""
    found = config(f"dataset={dataset}")
    flat = {"rounds": found["rounds"]}
    for group in ("partition", "participation", "client", "client_optimizer"):
        flat |= found[group]
    assert {key: flat[key] for key in PAPER_SETTINGS[dataset]} == PAPER_SETTINGS[dataset]
    if dataset == "fashion_mnist":
        assert found["partition"]["non_iid"] == 1.0
        assert found["model"]["hidden"] == [128]
        for optimizer in ("nesterov", "adagrad", "rmsprop", "adam"):
            kept = config(f"dataset={dataset}", f"client_optimizer={optimizer}")["client_optimizer"]["persist_state"]
            assert kept, "Felbab et al.: the optimizer's state lives on the client"
    else:
        assert found["partition"]["alpha"] == 100.0
        assert found["schedule"] | {"rounds": flat["rounds"], "factor": 0.5} == found["schedule"]
        assert found["schedule"]["_target_"].endswith("Cosine")


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        (
            "aggregator=elastic",
            {"tau": 0.5, "mu": 0.95, "sensitivity": "momentum", "layer": "tensor", "weighting": "samples"},
        ),
        ("aggregator=fedavg", {"weighting": "samples", "evaluate": "sent"}),
        ("aggregator=norm_norm", {"weighting": "uniform", "evaluate": "averaged"}),
        ("aggregator=momentum", {"weighting": "uniform", "evaluate": "averaged"}),
        ("aggregator=fednnnn", {"weighting": "uniform", "evaluate": "averaged"}),
        ("client_optimizer=nesterov", {"momentum": 0.9, "nesterov": True, "persist_state": False}),
        ("client_optimizer=momentum", {"momentum": 0.9, "nesterov": False}),
        ("client_optimizer=adagrad", {"initial_accumulator": 0.1, "eps": 1e-7, "persist_state": False}),
        ("client_optimizer=rmsprop", {"rho": 0.9, "eps": 1e-7}),
        ("client_optimizer=adam", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-7}),
        ("server_optimizer=sgd", {"lr": 1.0}),
        ("server_optimizer=fedavgm", {"lr": 1.0, "momentum": 0.9}),
        ("partition=dirichlet", {"alpha": 100.0, "sensitivity_fraction": 0.1}),
        ("partition=iid", {"sigma": 0.0, "power": 0.0, "sensitivity_fraction": 0.1}),
        ("partition=classes", {"classes_per_client": 2, "num_clients": 100, "sensitivity_fraction": 0.1}),
        ("partition=one_class", {"num_clients": 10, "sensitivity_fraction": 0.1}),
    ],
)
def test_defaults_are_the_papers(choice: str, values: dict[str, object]) -> None:
    found = config(choice)[choice.partition("=")[0]]
    assert {key: found[key] for key in values} == values


def test_run_names() -> None:
    assert run_name([]) == "default"
    assert (
        run_name(["rounds=3", "logger=[csv,wandb]", "+checkpoint.every=2", "hydra.run.dir=x", "device=cpu"])
        == "default"
    )
    assert run_name(["seed=1", "aggregator=elastic"]) == run_name(["aggregator=elastic", "seed=1", "schedule.rounds=9"])
    assert run_name(["roundsize=3"]) == "roundsize=3"
    assert run_name(["model.hidden=[64, 32]"]) == "model.hidden=-64,-32"
    assert "/" not in run_name(["experiment=elastic/table3", "dataset.data_dir=/a/../b"])
    long = [run_name([f"a{'x' * 300}={i}"]) for i in range(2)]
    assert len(set(long)) == 2
    assert all(len(name) <= LONGEST_NAME for name in long)
    assert cell_name(["a=True", "rounds=5", "b=2"], typed=["a=true", "b=2,3"]) == "b=2,rounds=5"
    assert cell_name(["b=1", "b=2"], typed=["b=1", "b=2,3"]) != cell_name(["b=1", "b=3"], typed=["b=1", "b=2,3"])


def test_the_readme_lists_every_group_choice_and_metric() -> None:
    readme = (ROOT / "README.md").read_text()
    for group, choice in CHOICES:
        row = next((line for line in readme.splitlines() if line.startswith(f"| `{group}` |")), "")
        assert f"`{choice}`" in row, f"{group}={choice} is not in README's table of groups"
    for name in {*METRICS, *LAYER_METRICS}:
        assert f"`{name}`" in readme, f"{name} is not in README's tables of metrics"


def test_every_key_of_the_readme_exists() -> None:
    """Commands shown in README and CONTRIBUTING compose."""
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, flags=re.DOTALL):
            for command in re.findall(r"^(?:\$ )?fedsim (.*?)(?:\s+#.*)?$", block, flags=re.MULTILINE):
                words = [w for w in command.split() if "=" in w and w.partition("=")[0] not in AXES]
                first = [re.sub(r"=([^\[,]+),.*", r"=\1", w) for w in words]
                assert config(*first)["rounds"] >= 1, command


def test_the_documented_keys_are_there() -> None:
    """Keys that users and scripts rely on."""
    default = config()
    for key in (
        *("rounds", "seed", "device", "participation.clients_per_round", "partition.num_clients", "partition.alpha"),
        *("partition.sigma", "client.epochs", "client.batch_size", "client_optimizer.lr", "aggregator.tau"),
        *("aggregator.mu", "aggregator.weighting", "eval.every", "eval.train"),
    ):
        node = default
        for part in key.split("."):
            node = node[part]
    fednnnn = config("aggregator=fednnnn")["aggregator"]
    assert {"beta", "gamma", "weighting"} <= fednnnn.keys()


def test_no_module_below_the_command_reads_configuration() -> None:
    """Hydra and OmegaConf belong to what composes and builds; W&B and TensorBoard to their loggers."""
    allowed = {"cli.py", "build.py", "overrides.py", "table.py", "scale.py"}
    for file in (ROOT / "fedsim").rglob("*.py"):
        text = file.read_text()
        imported = set(re.findall(r"^\s*(?:from|import) (hydra|omegaconf|wandb)", text, flags=re.MULTILINE))
        if imported & {"hydra", "omegaconf"}:
            assert file.name in allowed, file
        if "wandb" in imported:
            assert file.relative_to(ROOT).as_posix() == "fedsim/logger/wandb.py"


def test_the_installed_distribution() -> None:
    from importlib.metadata import version

    from fedsim import __version__

    assert version("fedsim-lab") == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
