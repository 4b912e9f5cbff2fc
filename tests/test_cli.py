"""The real command, as a process: what it writes, how it resumes, how it refuses, how it ends."""

import errno
import fcntl
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml
from conftest import environment, metrics

from fedsim.metrics import LAYER_METRICS, METRICS

Command = Callable[..., "subprocess.CompletedProcess[str]"]

QUICK = ("dataset=synthetic", "partition.num_clients=20", "participation.clients_per_round=4")
SLOW = (*QUICK, "rounds=2000", "client.epochs=3", "checkpoint.every=3", "engine=sequential")
"""With an engine: auto would compile so long a run, and its last bits would not be those of a shorter one."""


def only_folder(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "outputs").iterdir()
    return folder


def one_line_error(result: "subprocess.CompletedProcess[str]", code: int = 2) -> str:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("fedsim: error: ")
    return line


def test_the_default_run_writes_everything_promised(fedsim: Command, tmp_path: Path) -> None:
    result = fedsim("rounds=3")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "outputs" / "default"
    assert {p.name for p in folder.iterdir() if not p.name.startswith(".")} == {
        *("config.yaml", "metrics.csv", "layers.csv", "summary.json"),
        *("clients.csv", "partition.png", "curves.png", "checkpoint.pt"),
    }
    table = pd.read_csv(folder / "metrics.csv")
    assert list(table.columns) == list(METRICS)
    assert table["round"].tolist() == [1, 2, 3]
    elsewhere = ("norm_norm/", "sent/", "async/", "privacy/", "pfnm/", "personal/")
    measured = [c for c in METRICS if not c.startswith(elsewhere) and "conv" not in c]
    assert table[measured].notna().all().all()
    assert table[["sent/accuracy", "norm/N_conv"]].isna().all().all(), "blank where there is nothing to measure"
    layers = pd.read_csv(folder / "layers.csv")
    assert list(layers.columns) == list(LAYER_METRICS)
    assert layers["layer"].tolist() == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"] * 3
    assert (layers["N"] <= layers["E"] * (1 + 1e-6)).all()
    clients = pd.read_csv(folder / "clients.csv")
    assert len(clients) == 100
    assert clients[["samples", "sensitivity_samples"]].to_numpy().sum() == 4000
    assert clients["emd"].between(0, 2).all()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["virtual_s_to_accuracy"]["10 %"] in table["time/virtual_s"].tolist()
    assert summary["status"] == "finished"
    assert summary["test_accuracy_last"] == table["test/accuracy"].iloc[-1]
    assert summary["test_accuracy_best"] == table["test/accuracy"].max()
    assert summary["test_accuracy_mean_last_10"] == pytest.approx(table["test/accuracy"].mean())
    for key in ("rounds", "seed", "partition_fingerprint", "versions", "device", "engine", "wall_time_s"):
        assert key in summary
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["rounds"] == 3
    assert resolved["aggregator"]["tau"] == 0.5
    assert "test accuracy, last" in result.stdout
    assert "curves.png" in result.stdout
    assert "round 3/3" in result.stderr, "plain lines where there is no terminal"


def test_help_is_quick_and_lists_groups_choices_and_examples(fedsim: Command) -> None:
    """Nothing heavy is imported, and the processor time, which other processes hardly disturb, is under 2 seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = fedsim("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    listing = "import sys, fedsim.cli; print({'torch', 'pandas', 'matplotlib', 'numpy', 'wandb'} & set(sys.modules))"
    imported = subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True)
    assert imported.stdout.strip() == "set()"
    for text in (
        "aggregator: elastic, fedasync, fedavg",
        "client_optimizer: adagrad",
        "fedsim -m aggregator.tau=0.1,0.5,0.9",
    ):
        assert text in result.stdout


def test_cfg_prints_the_resolved_config_of_the_papers_setting(fedsim: Command) -> None:
    result = fedsim("aggregator=elastic", "dataset=cifar10", "--cfg", "job")
    shown = yaml.safe_load(result.stdout)
    assert "${" not in result.stdout
    assert shown["rounds"] == shown["schedule"]["rounds"] == 4000
    assert shown["partition"] | {"num_clients": 1000, "alpha": 100.0} == shown["partition"]
    assert shown["participation"]["clients_per_round"] == 10
    assert shown["client"] | {"batch_size": 10, "epochs": 1} == shown["client"]
    assert shown["client_optimizer"]["lr"] == 0.05
    assert shown["model"]["_target_"] == "fedsim.model.resnet.ResNet20"
    assert shown["aggregator"] | {"tau": 0.5, "mu": 0.95} == shown["aggregator"]
    assert shown["server_optimizer"]["lr"] == 1.0


def test_a_sweep_gives_every_run_its_own_folder(fedsim: Command, tmp_path: Path) -> None:
    result = fedsim("-m", "aggregator.tau=0.1,0.9", "partition.alpha=0.5,100", "rounds=2", *QUICK)
    assert result.returncode == 0, result.stderr
    sweep = only_folder(tmp_path)
    cells = {p.name for p in sweep.iterdir() if p.is_dir()}
    assert cells == {f"aggregator.tau={t},partition.alpha={a}" for t in (0.1, 0.9) for a in (0.5, 100)}
    for cell in cells:
        assert len(pd.read_csv(sweep / cell / "metrics.csv")) == 2
    assert len(pd.read_csv(sweep / "comparison.csv")) == 4
    assert (sweep / "comparison.png").stat().st_size > 10_000
    assert "4 runs" in result.stdout
    partitions = {
        cell: json.loads((sweep / cell / "summary.json").read_text())["partition_fingerprint"] for cell in cells
    }
    for alpha in (0.5, 100):
        assert len({f for cell, f in partitions.items() if cell.endswith(f"alpha={alpha}")}) == 1


def test_a_sweep_over_what_does_not_name_a_run_still_keeps_them_apart(fedsim: Command, tmp_path: Path) -> None:
    assert fedsim("-m", "rounds=1,2", *QUICK).returncode == 0
    assert {p.name for p in only_folder(tmp_path).iterdir() if p.is_dir()} == {"rounds=1", "rounds=2"}


def test_one_bad_cell_does_not_take_the_others_with_it(fedsim: Command, tmp_path: Path) -> None:
    result = fedsim("-m", "aggregator.tau=0.1,7", "rounds=1", *QUICK)
    assert result.returncode == 2
    assert "aggregator.tau=7: must be a number >= 0 and <= 1" in result.stderr
    assert [p.name for p in only_folder(tmp_path).iterdir() if p.is_dir()] == ["aggregator.tau=0.1"]


def start(*args: str, cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "fedsim", *args],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_rounds(folder: Path, rounds: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    file = folder / "metrics.csv"
    while not file.exists() or len(file.read_text().splitlines()) <= rounds:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "methods",
    [("aggregator=elastic",), ("aggregator=fednnnn", "client_optimizer=adam", "client_optimizer.persist_state=true")],
    ids=["elastic", "fednnnn with adam kept"],
)
def test_a_killed_run_continues_bit_for_bit(fedsim: Command, tmp_path: Path, methods: tuple[str, ...]) -> None:
    """SIGKILL at an arbitrary moment, twice; then the same command to the end. Compared with an undisturbed run."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    args = (*SLOW, *methods)
    folder = killed / "outputs" / run_name_of(args)
    done = 0
    for more in (4, 11):
        process = start(*args, cwd=killed)
        wait_for_rounds(folder, done + more, process)
        process.kill()
        process.communicate()
        done = len((folder / "metrics.csv").read_text().splitlines()) - 1
        assert json.loads((folder / "summary.json").read_text())["status"] == "running"
    last = f"rounds={done + 5}"
    resumed = fedsim(*args, last, cwd=killed)
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after round" in resumed.stderr
    assert fedsim(*args, last, cwd=whole).returncode == 0
    undisturbed = whole / "outputs" / run_name_of(args)
    pd.testing.assert_frame_equal(metrics(folder), metrics(undisturbed))
    assert (folder / "layers.csv").read_bytes() == (undisturbed / "layers.csv").read_bytes()


def run_name_of(args: tuple[str, ...]) -> str:
    from fedsim.overrides import run_name

    return run_name(args)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_a_complete_folder(
    fedsim: Command, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    folder = tmp_path / "outputs" / run_name_of(SLOW)
    process = start(*SLOW, cwd=tmp_path)
    wait_for_rounds(folder, 4, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "Traceback" not in output
    summary = json.loads((folder / "summary.json").read_text())
    table = pd.read_csv(folder / "metrics.csv")
    assert summary["status"] == "interrupted"
    assert summary["rounds"] == len(table) >= 4
    assert summary["test_accuracy_last"] == table["test/accuracy"].iloc[-1]
    assert (folder / "curves.png").exists()
    assert (folder / "partition.png").exists()
    assert len(pd.read_csv(folder / "layers.csv")) == 2 * len(table)
    if number == signal.SIGTERM:
        return
    last = f"rounds={len(table) + 3}"
    assert fedsim(*SLOW, last).returncode == 0
    other = tmp_path / "other"
    other.mkdir()
    assert fedsim(*SLOW, last, cwd=other).returncode == 0
    pd.testing.assert_frame_equal(metrics(folder), metrics(only_folder(other)))


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("config.yaml", "config.yaml is missing or damaged; overwrite=true starts the run again"),
        ("metrics.csv", "metrics.csv has 0 rows for the 3 rounds of the checkpoint"),
        ("layers.csv", "layers.csv has 0 rows for the 3 rounds of the checkpoint"),
        ("checkpoint.pt", ""),
        ("summary.json", ""),
    ],
)
def test_a_folder_with_a_file_missing_or_damaged(
    lost: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Either the run can still go on exactly, or one line says why not; nothing is silently wrong."""
    whole = in_process(tmp_path / "whole", monkeypatch, "rounds=5", "eval.every=2")
    for damage in ("missing", "damaged"):
        folder = in_process(tmp_path / damage, monkeypatch, "rounds=3", "eval.every=2")
        if damage == "missing":
            (folder / lost).unlink()
        elif lost == "checkpoint.pt":
            continue  # has a test of its own
        else:
            (folder / lost).write_bytes(b"\xff{ not what it was")
        capsys.readouterr()
        in_process(tmp_path / damage, monkeypatch, "rounds=5", "eval.every=2", code=2 if said else 0)
        shown = capsys.readouterr().err
        if said:
            assert (said if damage == "missing" or lost == "config.yaml" else lost) in shown
            assert len([line for line in shown.splitlines() if "error" in line]) == 1
        else:
            pd.testing.assert_frame_equal(metrics(folder), metrics(whole))


def in_process(folder: Path, monkeypatch: pytest.MonkeyPatch, *args: str, code: int = 0) -> Path:
    """The command's own entry point in this process, for cases by the dozen; the run's folder."""
    from fedsim.cli import main

    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["fedsim", *QUICK, *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == code
    return only_folder(folder)


def test_rounds_may_grow_and_the_longer_run_is_the_undisturbed_one(fedsim: Command, tmp_path: Path) -> None:
    """The shorter run evaluated its last round; the longer one would not have, and does not show it."""
    args = (*QUICK, "eval.every=4")
    assert fedsim(*args, "rounds=3").returncode == 0
    folder = only_folder(tmp_path)
    assert pd.read_csv(folder / "metrics.csv")["test/accuracy"].notna().tolist() == [False, False, True]
    assert fedsim(*args, "rounds=6").returncode == 0
    other = tmp_path / "other"
    other.mkdir()
    assert fedsim(*args, "rounds=6", cwd=other).returncode == 0
    pd.testing.assert_frame_equal(metrics(folder), metrics(only_folder(other)))
    again = fedsim(*args, "rounds=6")
    assert again.returncode == 0
    assert "finished earlier, after 6 rounds (data not looked at again); overwrite=true runs it again" in again.stdout


def test_overwrite_starts_again(fedsim: Command, tmp_path: Path) -> None:
    fedsim(*QUICK, "rounds=3")
    first = metrics(only_folder(tmp_path))
    result = fedsim(*QUICK, "rounds=2", "overwrite=true")
    assert result.returncode == 0
    pd.testing.assert_frame_equal(metrics(only_folder(tmp_path)), first.head(2))


def test_a_folder_made_by_another_config_is_refused_with_the_differences(fedsim: Command, tmp_path: Path) -> None:
    fedsim(*QUICK, "rounds=1", "hydra.run.dir=here")
    before = (tmp_path / "here" / "metrics.csv").read_bytes()
    stored = yaml.safe_load((tmp_path / "here" / "config.yaml").read_text())
    assert stored["eval"]["batch_size"] == 200, "what the device decides is stored as decided"
    line = one_line_error(fedsim(*QUICK, "rounds=2", "hydra.run.dir=here", "aggregator.tau=0.2", "seed=3"))
    assert "aggregator.tau: 0.5 there, 0.2 here" in line
    assert "seed: 0 there, 3 here" in line
    assert "rounds" not in line
    assert (tmp_path / "here" / "metrics.csv").read_bytes() == before


def test_a_schedule_with_a_horizon_says_so_when_rounds_grow(fedsim: Command) -> None:
    args = (*QUICK, "schedule=cosine")
    assert fedsim(*args, "rounds=2").returncode == 0
    assert "schedule.rounds: 2 there, 3 here" in one_line_error(fedsim(*args, "rounds=3"))
    result = fedsim(*args, "rounds=3", "schedule.rounds=2")
    assert result.returncode == 0, result.stderr
    assert "going on after round 2" in result.stderr


def test_two_processes_never_share_a_folder(fedsim: Command, tmp_path: Path) -> None:
    process = start(*SLOW, cwd=tmp_path)
    try:
        wait_for_rounds(tmp_path / "outputs" / run_name_of(SLOW), 1, process)
        assert "is in use by another fedsim process" in one_line_error(fedsim(*SLOW))
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_divergence_stops_the_run_and_keeps_its_metrics(fedsim: Command, tmp_path: Path) -> None:
    args = (*QUICK, "model=mlp", "client_optimizer.lr=1e20", "rounds=30")
    result = fedsim(*args)
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr
    folder = only_folder(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "diverged"
    table = pd.read_csv(folder / "metrics.csv")
    assert 1 <= len(table) == summary["rounds"] < 30
    assert (folder / "curves.png").exists()
    again = fedsim(*args)
    assert again.returncode == 3
    assert "diverged earlier" in again.stdout


def test_a_damaged_checkpoint_is_one_line(fedsim: Command, tmp_path: Path) -> None:
    fedsim(*QUICK, "rounds=2")
    file = only_folder(tmp_path) / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:-200])
    assert "checkpoint.pt is damaged" in one_line_error(fedsim(*QUICK, "rounds=3"))


def test_a_checkpoint_never_runs_code(fedsim: Command, tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch owned",)

    fedsim(*QUICK, "rounds=2")
    (only_folder(tmp_path) / "checkpoint.pt").write_bytes(pickle.dumps(Evil(), protocol=2))
    assert "checkpoint.pt is damaged" in one_line_error(fedsim(*QUICK, "rounds=3"))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["aggregator.taau=1"], "unknown key aggregator.taau; did you mean aggregator.tau?"),
        (["agregator=elastic"], "unknown key agregator; did you mean aggregator?"),
        (["aggregator=elastc"], "unknown choice aggregator=elastc; did you mean elastic?"),
        (["aggregator=fedavg", "aggregator.tau=1"], "aggregator.tau belongs to aggregator=elastic"),
        (["-m", "aggregator=elastic,fedavgg"], "unknown choice aggregator=fedavgg; did you mean fedavg?"),
        (["logger=[csv,wandbb]"], "unknown choice logger=wandbb; did you mean wandb?"),
        (["aggregator=elastic,fedavg"], "several values are a sweep, which needs -m"),
        (["rounds"], "rounds"),
        (["aggregator.tau=["], "cannot be read as key=value"),
        (["+rouns=3"], "rouns=3: unknown key; valid: rounds"),
        (["+aggregator.taau=1"], "aggregator.taau=1: unknown key; valid: tau"),
        (["~aggregator.tau"], "aggregator.tau is missing"),
        (["aggregator.tau=1.5"], "aggregator.tau=1.5: must be a number >= 0 and <= 1"),
        (["aggregator.tau=high"], "aggregator.tau=high: must be a number >= 0 and <= 1"),
        (["aggregator.mu=1"], "aggregator.mu=1: must be a number >= 0 and < 1"),
        (["aggregator=norm_norm", "aggregator.beta=0"], "aggregator.beta=0: must be a number > 0"),
        (["aggregator.weighting=equal"], "aggregator.weighting=equal: must be one of samples, uniform"),
        (["client=fedprox", "client.mu=-1"], "client.mu=-1: must be a number >= 0"),
        (["client.epochs=0"], "client.epochs=0: must be a whole number >= 1"),
        (["client_optimizer.lr=-0.1"], "client_optimizer.lr=-0.1: must be a number > 0"),
        (["partition.num_clients=5000"], "partition.num_clients=5000: must be at most the number of training samples"),
        (["participation.clients_per_round=101"], "must be at most the number of clients, 100"),
        (["participation.clients_per_round=1.5"], "must be a whole number of clients >= 1, or a fraction"),
        (["partition.sensitivity_fraction=1.0"], "partition.sensitivity_fraction=1.0: must be a number >= 0 and < 1"),
        (["partition.sensitivity_fraction=0"], "must be > 0 for this aggregator"),
        (
            ["partition=one_class", "partition.num_clients=4", "participation.clients_per_round=4"],
            "at least the number of classes",
        ),
        (["dataset=mnist", "data_dir=null"], "data_dir=None: must be text"),
        (["dataset=mnist", "dataset.cache_dir=7"], "dataset.cache_dir=7: must be text"),
        (["dataset=fed_cifar100", "dataset.seed=-1"], "dataset.seed=-1: must be a whole number >= 0"),
        (["partition.sigma=1e308"], "partition.sigma=1e+308: must be a number >= 0 and <= 100"),
        (["model=custom", "model.load=sys.exit"], "model=custom: sys.exit failed (SystemExit"),
        (["dataset=npz"], "dataset.path is missing; type dataset.path=VALUE"),
        (["dataset=npz", "dataset.path=nowhere.npz"], "dataset.path=nowhere.npz: there is no such file or folder"),
        (["partition=natural"], "partition=natural: this dataset does not say whose its samples are"),
        (["model=custom", "model.load=nowhere.Net"], "model.load=nowhere.Net: there is no module nowhere"),
        (["dataset=mnist", "data_dir=nowhere"], "dataset=mnist: train-images-idx3-ubyte"),
        (["device=cuda:99"], "device=cuda:99: "),
        (["device=gpu"], "device=gpu: must be auto, cpu, cuda, cuda:N or mps"),
        (["hydra.run.dir=a_file/below"], "a_file"),
        (["model=resnet20", "dataset=synthetic"], "model=resnet20 needs images"),
        (["rounds=0"], "rounds=0: must be a whole number >= 1"),
        (["seed=x"], "seed=x: must be a whole number >= 0"),
        (["eval.every=0"], "eval.every=0: must be a whole number >= 1"),
        (["schedule=step", "schedule.gamma=2"], "schedule.gamma=2: must be a number > 0 and <= 1"),
        (["data_dir=${nope}"], "Interpolation key 'nope' not found"),
        (["model=null"], "unknown choice model=null; valid: cnn_cifar"),
        (["partition=3"], "unknown choice partition=3; valid: classes, dirichlet"),
        (["=3"], "=3: a key is missing before the ="),
        (["seed=é"], "seed=é: cannot be read as key=value (quote it"),
        (["seed=99999999999999999999"], "seed=99999999999999999999: must be a whole number of at most 63 bits"),
        (["eval=3"], "eval=3: is a section; set one of its keys"),
        (["checkpoint=null"], "checkpoint=None: is a section"),
        (["model.hidden=128"], "model.hidden=128: must be a list of widths"),
        (["model.hidden=[10000000,10000000]"], "device=cpu: out of memory"),
        (["+model.depth=3"], "model.depth=3: unknown key; valid: hidden"),
        (["dataset=synthetic", "dataset.seed=1.5"], "dataset.seed=1.5: must be a whole number >= 0"),
        (["client_optimizer.nesterov=true"], "client_optimizer.nesterov=True: needs momentum > 0"),
        (["aggregator._target_=foo.bar"], "aggregator._target_=foo.bar: cannot be imported"),
        (["aggregator._target_=null"], "aggregator._target_=None: must be an import path"),
        (["aggregator=pfnm", "aggregator.layer=x"], "aggregator.layer=x: must be one of tensor, module"),
        (["aggregator=pfnm", "aggregator.sigma2=0"], "aggregator.sigma2=0: must be a number > 0"),
        (["aggregator=pfnm", "model=cnn_mnist"], "aggregator=pfnm matches fully connected networks"),
        (["client=scaffold", "client.option=3"], "client.option=3: must be a whole number >= 1 and <= 2"),
        (["client=scaffold", "client_optimizer=adam"], "client.option=2: needs client_optimizer=sgd without momentum"),
        (["client=loadaboost", "client.epochs=3"], "client.epochs=3: must be even"),
        (["client=pfedme", "client.lambda_=0"], "client.lambda_=0: must be a number > 0"),
        (["aggregator=fedasync", "aggregator.alpha=0"], "aggregator.alpha=0: must be a number > 0 and <= 1"),
        (["participation.dropout=1"], "participation.dropout=1: must be a number >= 0 and < 1"),
        (["participation=async", "participation.max_staleness=-1"], "participation.max_staleness=-1: must be a whole"),
        (["shared_data.beta=2"], "shared_data.beta=2: must be a number >= 0 and <= 1"),
        (["privacy.noise_multiplier=1"], "privacy.noise_multiplier=1: needs clip"),
        (["privacy=gaussian", "aggregator.weighting=samples"], "aggregator.weighting=samples: must be uniform with"),
        (["privacy=gaussian", "model=resnet20"], "privacy.clip=1.0: batch norm's statistics cannot be clipped"),
        (["privacy=masked", "participation.clients_per_round=1"], "must be 2 or more: masks hide no sum of one"),
        (["eval.personal_clients=0"], "eval.personal_clients=0: must be a whole number >= 1"),
        (["hydra/launcher=foo"], "Could not find 'hydra/launcher/foo'"),
        (["logger=wandb", "logger.wandb.project=1"], "logger.wandb.project=1: must be text"),
        (["logger=wandb", "logger.wandb.tags=x"], "logger.wandb.tags=x: must be a list of words"),
        (["logger=wandb", "logger.wandb.mode=on"], "logger.wandb.mode=on: must be one of online, offline, disabled"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line(
    args: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command's own entry point, in this process, so that all of them can be tried."""
    from fedsim.cli import main

    (tmp_path / "a_file").touch()
    monkeypatch.chdir(tmp_path)
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", ["fedsim", *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    shown = capsys.readouterr()
    assert stopped.value.code == 2, shown.err
    (line,) = shown.err.strip().splitlines()
    assert line.startswith("fedsim: error: ")
    assert said in line
    assert shown.out == ""
    left = [p for p in tmp_path.rglob("*") if p.is_file() and p.name not in ("a_file", "multirun.yaml")]
    assert left == [], "a refused command leaves nothing behind"


def test_a_full_disk_is_one_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk fills up while round 4 is written; with room again, the same command gives the undisturbed run."""
    from fedsim.logger.csv import Csv

    original = Csv.log

    def full(self: Csv, row: dict[str, float], layers: dict[str, list[float]]) -> None:
        original(self, row, layers)
        if row["round"] == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    args = ("rounds=6", "checkpoint.every=2")
    with monkeypatch.context() as patch:
        patch.setattr(Csv, "log", full)
        in_process(tmp_path / "a", monkeypatch, *args, code=2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "No space left on device; what was computed is kept, the same command goes on" in line
    disturbed = in_process(tmp_path / "a", monkeypatch, *args)
    assert "going on after round 2" in capsys.readouterr().err
    pd.testing.assert_frame_equal(metrics(disturbed), metrics(in_process(tmp_path / "b", monkeypatch, *args)))


def test_the_live_bar_on_a_terminal(tmp_path: Path) -> None:
    """In a pseudo-terminal: rounds, accuracy, N/E, boosted share and the time left, redrawn in place."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    environ = {k: v for k, v in environment().items() if k != "COLUMNS"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsim", *QUICK, "rounds=40"],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 4096):
            shown += chunk
    except OSError:
        pass  # Linux says so when the other side is closed
    os.close(leader)
    assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"round 40/40 .* accuracy \d+\.\d %  loss .* N/E 0\.\d+  boosted \d+ % .* left", text)


def test_flags_may_stand_anywhere(fedsim: Command, tmp_path: Path) -> None:
    result = fedsim(*QUICK, "rounds=1", "logger=[]", "-m", "seed=1,2")
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "outputs").glob("*/seed=*"))) == 2


def test_the_version(fedsim: Command) -> None:
    import fedsim as package

    assert fedsim("--version").stdout == f"fedsim {package.__version__}\n"


def test_a_reader_that_goes_away_loses_nothing(fedsim: Command, tmp_path: Path) -> None:
    """`fedsim 2>&1 | head -2`: no traceback, and the same command finishes the run."""
    process = start(*QUICK, "rounds=200", cwd=tmp_path)
    assert process.stdout
    shown = process.stdout.readline() + process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) not in (0, 2)
    assert "Traceback" not in shown
    done = len(pd.read_csv(only_folder(tmp_path) / "metrics.csv"))
    assert json.loads((only_folder(tmp_path) / "summary.json").read_text())["status"] == "failed"
    assert fedsim(*QUICK, f"rounds={done + 1}").returncode == 0
    assert len(pd.read_csv(only_folder(tmp_path) / "metrics.csv")) == done + 1


def test_bad_input_as_a_process(fedsim: Command) -> None:
    assert "did you mean aggregator.tau?" in one_line_error(fedsim("aggregator.taau=1"))
    assert "no CUDA device" in one_line_error(fedsim("device=cuda")) or _has_cuda()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def test_loggers_at_once(fedsim: Command, tmp_path: Path) -> None:
    """CSV, TensorBoard and W&B (offline) of the same run, and again when it is continued."""
    pytest.importorskip("tensorboard")
    args = (*QUICK, "logger=[csv,tensorboard,wandb]", "logger.wandb.mode=offline")
    for rounds in (2, 3):
        result = fedsim(*args, f"rounds={rounds}")
        assert result.returncode == 0, result.stderr
    folder = only_folder(tmp_path)
    assert len(pd.read_csv(folder / "metrics.csv")) == 3

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    accuracy = events.Scalars("test/accuracy")
    assert [e.step for e in accuracy] == [1, 2, 3]
    assert [e.value for e in accuracy] == pytest.approx(pd.read_csv(folder / "metrics.csv")["test/accuracy"].tolist())
    offline = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(offline) == 2
    assert len({p.name.rsplit("-", 1)[1] for p in offline}) == 1, "one W&B run id for the whole run"


def test_wandb_without_a_key_or_network_is_one_line(fedsim: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    line = one_line_error(fedsim(*QUICK, "rounds=1", "logger=wandb"))
    assert "logger.wandb.mode=online: W&B cannot start" in line
