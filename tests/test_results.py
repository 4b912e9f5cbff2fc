"""fedsim.load: every kind of folder a run can leave behind, as tidy frames."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from fabricated import run

import fedsim
from fedsim.check import InputError

ACCURACY = "test_accuracy_last"


def test_frames_of_runs_of_every_status(tmp_path: Path) -> None:
    for status in ("finished", "running", "interrupted", "diverged", "failed"):
        run(tmp_path / "outputs" / status, 0.8, status=status, seed=3, config={"aggregator": {"tau": 0.5}})
    preview = run(tmp_path / "outputs" / "preview", [], status="preview")
    (preview / "metrics.csv").unlink()
    results = fedsim.load(tmp_path)
    assert sorted(results.runs["status"]) == ["diverged", "failed", "finished", "interrupted", "preview", "running"]
    finished = results.runs.set_index("status").loc["finished"]
    assert finished["seed"] == 3
    assert finished["rounds"] == finished["rounds_asked"] == 4
    assert finished["aggregator.tau"] == 0.5
    assert finished["test_accuracy_last"] == pytest.approx(0.8)
    assert finished["test_accuracy_mean_last_10"] == pytest.approx((0.4 + 0.5333333 + 0.6666667 + 0.8) / 4)
    assert len(results.metrics) == 5 * 4
    assert set(results.metrics["run"]) < set(results.runs["run"])
    assert len(results.clients) == 6 * 2
    assert results.layers.empty
    assert results.notes == ()


def test_cells_say_their_place_and_ordinary_runs_have_none(tmp_path: Path) -> None:
    run(tmp_path / "a", 0.8, cell=("MNIST", "elastic"), scale="short")
    run(tmp_path / "b", 0.7)
    runs = fedsim.load(tmp_path).runs.set_index("name")
    assert tuple(runs.loc["a", ["experiment", "row", "column", "scale"]]) == (
        "made/table3",
        "MNIST",
        "elastic",
        "short",
    )
    assert runs.loc["b", ["experiment", "row", "column", "scale"]].isna().all()


def test_numbers_are_those_of_metrics_csv_not_of_an_old_summary(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", 0.8, status="running")
    summary = json.loads((folder / "summary.json").read_text()) | {"rounds": 0, "test_accuracy_last": 0.1}
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "metrics.csv").open("a") as stream:
        stream.write("5,0.9")  # half a line
    (known,) = fedsim.load(tmp_path).runs.to_dict("records")
    assert known["rounds"] == 4
    assert known["test_accuracy_last"] == pytest.approx(0.8)


def test_missing_files_are_no_damage(tmp_path: Path) -> None:
    bare = run(tmp_path / "bare", 0.8, config={"aggregator": {"tau": 0.1}})
    for name in ("summary.json", "clients.csv", "config.yaml"):
        (bare / name).unlink()
    only_summary = run(tmp_path / "summary", [], status="running")
    (only_summary / "metrics.csv").unlink()
    runs = fedsim.load(tmp_path).runs.set_index("run")
    assert runs.loc[str(bare), "status"] == "unknown"
    assert runs.loc[str(bare), "test_accuracy_last"] == pytest.approx(0.8)
    assert runs.loc[str(only_summary), "rounds"] == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", '{"status": "fin'),
        ("summary.json", "[1]"),
        ("summary.json", '{"seed": "one"}'),
        ("summary.json", '{"table": {"experiment": "x"}}'),
        ("summary.json", '{"table": null}'),
        ("summary.json", '{"choices": null}'),
        ("summary.json", '{"status": null}'),
        ("config.yaml", "rounds: many"),
        ("metrics.csv", ""),
        ("metrics.csv", "round,test/accuracy\n"),
        ("config.yaml", "a: [1"),
        ("metrics.csv", "round,test/accuracy\n1,0.5\n2,0.6,0.7,0.8\n"),
        ("metrics.csv", "round,test/accuracy\n1,half\n"),
        ("metrics.csv", "test/accuracy\n0.5\n"),
        ("metrics.csv", "\x00\n\x00\xff\n"),
    ],
)
def test_a_damaged_run_is_named_and_left_out(tmp_path: Path, name: str, content: str) -> None:
    run(tmp_path / "good", 0.8)
    bad = run(tmp_path / "bad", 0.8)
    (bad / name).write_bytes(content.encode("latin-1"))
    results = fedsim.load(tmp_path)
    assert list(results.runs["name"]) == ["good"]
    (note,) = results.damaged
    assert str(bad) in note
    (tmp_path / "good" / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"no run in .* can be read"):
        fedsim.load(tmp_path)


def test_a_run_without_its_config_is_named(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", 0.8)
    (folder / "config.yaml").unlink()
    results = fedsim.load(tmp_path)
    assert len(results.runs) == 1
    (note,) = results.notes
    assert note == f"{folder} has no config.yaml: nobody can tell its settings"


def test_what_metrics_csv_does_not_say_is_not_taken_from_the_summary(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", [float("nan")] * 3)
    summary = json.loads((folder / "summary.json").read_text()) | {ACCURACY: 0.9, "test_loss_last": 0.1}
    (folder / "summary.json").write_text(json.dumps(summary))
    (known,) = fedsim.load(tmp_path).runs.to_dict("records")
    assert not {ACCURACY, "test_loss_last"} & set(known)


def test_of_the_same_cell_twice_the_longer_counts_and_this_is_said(tmp_path: Path) -> None:
    cell = ("MNIST", "elastic")
    run(tmp_path / "short", 0.9, cell=cell, rounds=3, config={"aggregator": {"tau": 0.1}})
    run(tmp_path / "long", 0.8, cell=cell, rounds=6, config={"aggregator": {"tau": 0.5}})
    run(tmp_path / "other scale", 0.7, cell=cell, scale="smoke")
    run(tmp_path / "other seed", 0.7, cell=cell, seed=1)
    results = fedsim.load(tmp_path)
    assert set(results.runs["name"]) == {"long", "other scale", "other seed"}
    (note,) = results.notes
    assert "short (3 rounds) is left out" in note
    assert "aggregator.tau: 0.5 there, 0.1 here" in note


def test_a_folder_given_twice_is_read_once(tmp_path: Path) -> None:
    run(tmp_path / "a" / "b", 0.8)
    assert len(fedsim.load(tmp_path, tmp_path / "a", tmp_path / "a" / "b").runs) == 1


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no runs in"):
        fedsim.load(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        fedsim.load(tmp_path / "nowhere")


def test_layers_are_read_unless_that_is_declined(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", 0.8)
    pd.DataFrame({"round": [1], "layer": ["w"], "kind": ["conv"], "N": [1.0]}).to_csv(
        folder / "layers.csv", index=False
    )
    assert list(fedsim.load(tmp_path).layers["layer"]) == ["w"]
    assert fedsim.load(tmp_path, layers=False).layers.empty


def test_what_is_kept_is_what_the_page_says() -> None:
    docs = Path(__file__).resolve().parents[1] / "docs"
    runs = fedsim.load(docs / "results" / "experiment=elastic-table3").runs
    accuracy = 100 * runs[runs["row"] == "MNIST"].set_index("column")[ACCURACY]
    columns = ("naive", "elastic", "mean zeta", "same length")
    ours = " | ".join(f"{accuracy[c].mean():.2f} ± {accuracy[c].std():.2f}" for c in columns)
    assert f"| ours | {ours} |" in (docs / "RESULTS.md").read_text(encoding="utf-8")


def test_importing_fedsim_imports_neither_pandas_nor_torch() -> None:
    code = "import sys, fedsim; assert not {'pandas', 'torch'} & set(sys.modules); assert callable(fedsim.load)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError):
        fedsim.nothing  # noqa: B018
