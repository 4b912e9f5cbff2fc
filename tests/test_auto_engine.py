"""engine=auto: the written rule, that it is recorded, and that a run that goes on keeps what it began with."""

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import experiment, metrics, play, small

from fedsim.check import InputError
from fedsim.engine import auto
from fedsim.engine.auto import CALLS, FEWER_CALLS, Auto, settle
from fedsim.evaluation import TEST, TRAIN
from fedsim.native import X86
from fedsim.runner import extent, first_work
from fedsim.task import Evaluation

Command = Callable[..., subprocess.CompletedProcess[str]]
MLP = ["dataset=mnist5k", "model=mlp"]
CNN = ["dataset=mnist5k", "model=cnn_mnist"]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores and a compiler, whatever this one has."""
    monkeypatch.setattr(auto.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(auto, "no_compiler", lambda device: "")


def choice(*keys: str, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    exp = experiment(*keys)
    return settle(Auto(None, None, 1, "auto"), first_work(exp), extent(exp), before or {})[1]


LONG = "rounds=100000"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([*MLP, "rounds=20"], {"name": "sequential", "workers": 1, "compile": False}),
        ([*MLP, LONG], {"name": "vmap", "stack": 5, "workers": 1, "compile": True, "evaluation": 200}),
        # 101,770 parameters x 10 clients x 500 samples is a long round: a worker a core
        ([*MLP, LONG, "partition=iid", "partition.num_clients=10", "participation.clients_per_round=10"],
         {"name": "vmap", "stack": 5, "workers": 2, "compile": True}),
        ([*MLP, "rounds=5", "partition=iid", "partition.num_clients=10", "participation.clients_per_round=10"],
         {"name": "process", "workers": 2, "compile": False}),
        (["dataset=mnist5k", "model=logistic", "rounds=20"], {"name": "vmap", "workers": 1, "compile": False}),
        (["dataset=mnist5k", "model=logistic", LONG], {"name": "vmap", "workers": 1, "compile": True}),
        (["dataset=mnist5k", "model=logistic", LONG, "client.batch_size=null"], {"name": "vmap", "compile": False}),
        ([*CNN, "rounds=20"], {"name": "process", "workers": 2, "compile": False}),
        ([*CNN, LONG], {"name": "process", "workers": 2, "compile": True}),
        ([*CNN, "participation.clients_per_round=1"], {"name": "sequential"}),
        ([*CNN, "participation=async", "aggregator=fedasync"], {"name": "sequential"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_the_rule(keys: list[str], expected: dict[str, Any]) -> None:
    found = choice(*keys)
    assert {k: found[k] for k in expected} == expected


LSTM = ["model=lstm_shakespeare", "model.hidden=4"]


@pytest.mark.parametrize(
    ("keys", "compiled"),
    [(LSTM, X86), ([*LSTM, "precision=bf16"], False), (["model=custom", "model.load=sequences.Gru"], False)],
    ids=["ours", "bf16", "another"],
)
def test_recurrent_layers_are_not_unrolled(keys: list[str], compiled: bool) -> None:
    """Our own LSTM has a kernel, for one thread and for training; what else loops over time has none."""
    words = ["dataset=custom", "dataset.load=sequences.counting", "partition=natural", LONG]
    exp = experiment(*words, *keys, "participation.clients_per_round=3")
    for threads in (1, 2):
        found = settle(Auto(None, None, threads, "auto"), first_work(exp), extent(exp), {})[1]
        assert (found["name"], found["compile"]) == ("process", compiled and threads == 1)
        assert "evaluation" not in found


def test_compiling_begins_where_a_run_has_enough_steps() -> None:
    exp = experiment("dataset=mnist5k", "model=logistic")
    work, whole = first_work(exp), extent(exp)
    enough = CALLS / whole.steps  # one stack a round

    def compiled(rounds: float) -> bool:
        _, found = settle(Auto(None, None, 1, "auto"), work, replace(whole, rounds=int(rounds), clients=10), {})
        return bool(found["compile"])

    assert compiled(enough + 1)
    assert not compiled(enough - 1)


@pytest.mark.parametrize("rounds", [FEWER_CALLS - 1, FEWER_CALLS])
def test_short_batches_that_come_often_are_compiled_for(rounds: int) -> None:
    """80 clients of 50 samples, 5 of them B_k: 45 are 4 batches of 10 and one of 5; 2 clients a round, 2 workers."""
    keys = ["partition=iid", "partition.num_clients=80", "participation.clients_per_round=2", "client.batch_size=10"]
    found = choice(*CNN, *keys, f"rounds={rounds}", "eval.every=1000")
    often = rounds == FEWER_CALLS
    assert found == {"name": "process", "workers": 2, "compile": True} | ({"short": [5]} if often else {})
    # what a run began with stays, however long it grows
    assert "short" not in choice(*CNN, *keys, LONG, before={"name": "process", "compile": True})
    assert choice(*CNN, *keys, "rounds=1", before=found) == found


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # 1,000 test samples every 15 rounds of 3,000, in two processes
        (["eval.every=15"], 200),
        (["eval.every=16"], None),
        (["eval.every=16", "eval.batch_size=50", "aggregator=fednnnn"], 50),  # two models each time
        (["eval.every=65", "eval.train=true", "partition.sensitivity_fraction=0.1"], 200),  # 3,600 to train on, or so
        (["eval.every=15", "engine.compile=false"], None),
    ],
    ids=str,
)
def test_long_evaluations_are_compiled(keys: list[str], expected: int | None) -> None:
    exp = experiment(*CNN, "engine=auto", "rounds=3000", "eval.train=false", *keys)
    assert exp.engine_choice.get("evaluation") == expected
    assert exp.engine.evaluation == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn_mnist", "resnet20"])
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_compiled_evaluation(model: str, engine: str) -> None:
    """1,000 test samples and 3,600 to train on, in batches of 300; the last ones are short."""
    keys = ["dataset=mnist5k", f"model={model}", "partition=iid", "eval.batch_size=300", "rounds=1"]
    exp = experiment(*keys, f"engine={engine}", "engine.compile=true")
    compiled = replace(exp.engine, evaluation=300)  # type: ignore[type-var]
    for part in (TEST, TRAIN):
        expected = experiment(*keys, "engine=sequential").engine.evaluate(first_work(exp), part, 300)
        found = compiled.evaluate(first_work(exp), part, 300)
        assert isinstance(expected, Evaluation)
        assert isinstance(found, Evaluation)
        assert found.count == expected.count
        assert found.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-5)
        assert found.correct is not None
        assert expected.correct is not None
        assert abs(found.correct.item() - expected.correct.item()) <= 1  # where two classes are as likely


def test_compiled_evaluation_of_what_has_no_accuracy() -> None:
    exp = experiment("dataset=quadratic", "engine=vmap", "engine.compile=true", "rounds=1")
    found = replace(exp.engine, evaluation=2).evaluate(first_work(exp), TRAIN, 2)  # type: ignore[type-var]
    assert isinstance(found, Evaluation)
    assert found.correct is None


@pytest.mark.parametrize("before", [{"name": "process", "compile": False}, {"name": "vmap", "compile": True}])
def test_a_run_keeps_what_it_began_with(before: dict[str, Any]) -> None:
    found = choice("dataset=mnist5k", "model=logistic", "rounds=20", before=before)
    assert {k: found[k] for k in before} == before


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "no_compiler", lambda device: "a C++ compiler (g++ or clang++)")
    assert not choice("dataset=mnist5k", "model=logistic", LONG)["compile"]
    with pytest.raises(InputError, match=r"engine\.compile=True: needs a C\+\+ compiler"):
        small("engine=vmap", "engine.compile=true")


def test_summary_says_which_and_growing_a_run_does_not_change_it(fedsim: Command, tmp_path: Path) -> None:
    keys = ["dataset=synthetic", "checkpoint.every=1"]
    assert fedsim(*keys, "rounds=3").returncode == 0
    (folder,) = (tmp_path / "outputs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["engine"] == {"name": "vmap", "stack": 10, "workers": 1, "compile": False}
    assert set(summary["round_s"]) == {"first", "median_later"}
    summary["engine"] |= {"name": "sequential"}  # as if another machine's rule had begun it
    (folder / "summary.json").write_text(json.dumps(summary))
    assert fedsim(*keys, "rounds=5").returncode == 0
    assert json.loads((folder / "summary.json").read_text())["engine"]["name"] == "sequential"
    assert len(metrics(folder)) == 5


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_bfloat16_learns_and_is_not_float32(engine: str) -> None:
    keys = ["rounds=8", f"engine={engine}"]
    (_, exact), (_, rough) = (play(small(*keys, f"precision={p}")) for p in ("fp32", "bf16"))
    assert rough[-1]["client/loss"] < 0.8 * rough[0]["client/loss"]
    assert rough[-1]["client/loss"] != exact[-1]["client/loss"]
    assert rough[-1]["client/loss"] == pytest.approx(exact[-1]["client/loss"], rel=0.05)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.compile=perhaps", "engine.compile=perhaps: must be auto, true or false"),
        ("engine.compile=1", "engine.compile=1: must be auto, true or false"),
        ("engine.memory=0", "engine.memory=0: must be"),
        ("engine.memory=big", "engine.memory=big: must be"),
        ("engine.workers=0", "engine.workers=0: must be"),
        ("engine.threads=none", "engine.threads=none: must be"),
        ("engine=warp", "warp"),
        ("precision=fp16", "precision=fp16: must be one of fp32, bf16, tf32"),
        ("precision=tf32", "precision=tf32: needs CUDA"),
    ],
)
def test_bad_values_are_one_line(fedsim: Command, override: str, said: str) -> None:
    result = fedsim("dataset=synthetic", override)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
