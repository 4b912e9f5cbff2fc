"""partition.preview, the partition's numbers and fingerprints in every run, and runs that go on only with the data they
began with: the real command, on data of a user's own."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import experiment, metrics, small

from fedsim.session import describe_partition, draw_partition

Command = Callable[..., subprocess.CompletedProcess[str]]
OWN = ("dataset=npz", "dataset.path=mine.npz", "model=logistic", "rounds=2", "participation.clients_per_round=2")


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def write(folder: Path, seed: int = 0) -> None:
    """Three clients of 30, 20 and 10 samples in two well separated classes; ann has class 0 only."""
    r = np.random.default_rng(seed)
    client = np.repeat(["ann", "bob", "cid"], [30, 20, 10])
    y = np.where(client == "ann", 0, np.arange(60) % 2)
    np.savez(folder / "mine.npz", x=r.normal(size=(60, 4)) + 4 * y[:, None], y=y, client_id=client)


def test_a_preview_draws_and_trains_nothing(fedsim: Command, tmp_path: Path) -> None:
    write(tmp_path)
    result = fedsim(*OWN, "partition.preview=true")
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "outputs").iterdir()
    assert {p.name for p in folder.iterdir()} >= {"partition.png", "clients.csv", "summary.json"}
    assert not (folder / "metrics.csv").exists()
    found = summary(folder)["partition"]
    # A fifth of each client's samples tests, a tenth of the rest is B_k: 30 -> 24 -> 22, 20 -> 16 -> 14, 10 -> 8 -> 7.
    clients = pd.read_csv(folder / "clients.csv")
    assert clients["name"].tolist() == ["ann", "bob", "cid"]
    assert clients["samples"].tolist() == [22, 14, 7]
    assert found["size"] == {"mean": 14.333333, "min": 7.0, "q25": 10.5, "median": 14.0, "q75": 18.0, "max": 22.0}
    assert found["size_gini"] == pytest.approx(2 * (22 - 7) / (3 * 43), abs=1e-6)
    assert found["classes_per_client"]["min"] == 1.0
    assert "3 clients" in result.stdout
    assert found["fingerprint"] in result.stdout


def test_the_run_that_was_previewed_has_that_partition(fedsim: Command, tmp_path: Path) -> None:
    write(tmp_path)
    fedsim(*OWN, "partition.preview=true")
    (folder,) = (tmp_path / "outputs").iterdir()
    before = summary(folder)["partition"]
    assert fedsim(*OWN).returncode == 0
    assert summary(folder)["status"] == "finished"
    assert summary(folder)["partition"] == before
    rows = metrics(folder)
    # Looking again changes nothing of a finished run.
    assert fedsim(*OWN, "partition.preview=true").returncode == 0
    assert summary(folder)["status"] == "finished"
    assert metrics(folder).equals(rows)


def test_a_sweep_of_previews(fedsim: Command, tmp_path: Path) -> None:
    result = fedsim("-m", "partition.alpha=0.1,10", "partition.preview=true")
    assert result.returncode == 0, result.stderr
    cells = sorted(p for p in (tmp_path / "outputs").glob("*/*") if p.is_dir())
    distance = [summary(cell)["partition"]["emd"]["mean"] for cell in cells]
    assert distance[0] > 2 * distance[1], "0.1 is more skewed than 10"


def test_a_run_is_not_continued_on_other_data(fedsim: Command, tmp_path: Path) -> None:
    write(tmp_path)
    assert fedsim(*OWN).returncode == 0
    (folder,) = (tmp_path / "outputs").iterdir()
    rows = metrics(folder)
    write(tmp_path, seed=1)
    result = fedsim(*OWN, "rounds=3")
    assert result.returncode == 2
    assert "was begun with other data: data " in result.stderr
    assert result.stderr.count("\n") == 1
    assert metrics(folder).equals(rows)


def test_a_preview_of_other_data_leaves_a_run_alone(fedsim: Command, tmp_path: Path) -> None:
    write(tmp_path)
    assert fedsim(*OWN).returncode == 0
    (folder,) = (tmp_path / "outputs").iterdir()
    before = (folder / "clients.csv").read_bytes()
    write(tmp_path, seed=1)
    assert fedsim(*OWN, "partition.preview=true").returncode == 2
    assert (folder / "clients.csv").read_bytes() == before


def test_a_preview_needs_no_model_and_no_cohort(fedsim: Command, tmp_path: Path) -> None:
    write(tmp_path)
    result = fedsim("dataset=npz", "dataset.path=mine.npz", "model=resnet20", "participation.clients_per_round=50",
                    "partition.preview=true")  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_a_run_stopped_while_its_partition_is_drawn_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim import cli, plots

    draw = plots.partition

    def stopped(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        draw(*args)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "partition", stopped)
    monkeypatch.setattr("sys.argv", ["fedsim", "dataset=synthetic", "rounds=100000", "engine=sequential"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    (folder,) = (tmp_path / "outputs").iterdir()
    assert summary(folder)["status"] == "interrupted"
    assert (folder / "partition.png").exists()


def test_a_partition_that_cannot_be_drawn_costs_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim import cli, plots

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "partition", full)
    monkeypatch.setattr("sys.argv", ["fedsim", "dataset=synthetic", "rounds=2"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code != 0
    (folder,) = (tmp_path / "outputs").iterdir()
    assert (summary(folder)["status"], summary(folder)["rounds"]) == ("finished", 2)


def test_a_cache_that_may_only_be_read_is_good_enough(fedsim: Command) -> None:
    """Where nobody may write, not even root."""
    result = fedsim("dataset=synthetic", "rounds=1", "cache_dir=/sys/nowhere")
    assert result.returncode == 0, result.stderr


def test_nor_is_one_that_was_killed(fedsim: Command, tmp_path: Path) -> None:
    """What its last summary says of rounds is then not true."""
    write(tmp_path)
    assert fedsim(*OWN).returncode == 0
    (folder,) = (tmp_path / "outputs").iterdir()
    (folder / "summary.json").write_text(json.dumps(summary(folder) | {"status": "running", "rounds": 0}))
    write(tmp_path, seed=1)
    result = fedsim(*OWN, "rounds=3")
    assert (result.returncode, "was begun with other data" in result.stderr) == (2, True)


@pytest.mark.parametrize("override", ["partition.preview=1", "partition.preview=null"])
def test_preview_is_true_or_false(fedsim: Command, override: str) -> None:
    result = fedsim(override)
    assert result.returncode == 2
    assert "partition.preview=" in result.stderr
    assert "must be true or false" in result.stderr


def test_data_without_client_ids_say_so(fedsim: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.random.default_rng(0).normal(size=(60, 4)), y=np.arange(60) % 2)
    result = fedsim(*OWN)
    assert result.returncode == 2
    assert "partition=natural: this dataset does not say whose its samples are" in result.stderr
    assert fedsim(*OWN, "partition=iid", "partition.num_clients=4").returncode == 0


def test_numbers_of_many_and_of_few_clients_can_be_drawn(tmp_path: Path) -> None:
    """The picture at 2 and at 3,400 clients, the second with more clients than the picture has columns."""
    few = experiment("dataset=quadratic")
    many = small("dataset.train_samples=10000", "partition.num_clients=3400", "partition=iid")
    for exp in (few, many):
        numbers = describe_partition(tmp_path, exp.data)  # type: ignore[arg-type]
        draw_partition(tmp_path, exp.data, "law")  # type: ignore[arg-type]
        assert numbers["clients"] == exp.data.num_clients
        assert (tmp_path / "partition.png").stat().st_size > 10_000
        (tmp_path / "partition.png").unlink()
