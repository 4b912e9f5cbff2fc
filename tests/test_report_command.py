"""fedsim-report: tables filled with ours, verdicts, figures and the check, against numbers worked by hand."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import environment
from fabricated import PAPER, TABLE, cells, run
from hypothesis import given
from hypothesis import strategies as st

import fedsim.table
from fedsim import papers, report_command
from fedsim.check import InputError
from fedsim.reporting import experiment, figures, verdicts
from fedsim.reporting.board import Board, together
from fedsim.reporting.experiment import PaperTable
from fedsim.reporting.latex import escaped
from fedsim.reporting.runs import PICKS, Run
from fedsim.reporting.statistics import difference, estimate
from fedsim.reporting.writing import Report, read

NUMBERS = PAPER + "".join(
    f"table3,{row},{column},test accuracy,{value},%,Table 3,\n"
    for row, column, value in [("MNIST", "naive", 70.14), ("MNIST", "elastic", 73.64)]
)


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes an experiment's file and the paper's numbers, in place of those of the package."""
    conf, numbers = tmp_path / "conf", tmp_path / "papers"
    monkeypatch.setattr(fedsim.table, "CONF", conf)
    monkeypatch.setattr(papers, "files", lambda _: numbers)

    def write(table: dict[str, Any] | None = None, csv: str | None = NUMBERS, name: str = "made/table3") -> None:
        path = conf / "experiment" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"table": TABLE | (table or {})}, sort_keys=False))
        if csv is not None:
            numbers.mkdir(exist_ok=True)
            (numbers / "made_up.csv").write_text(csv)

    return write


def report(root: Path, pick: str = "last") -> Report:
    return read([str(root)], pick)


def board(root: Path, pick: str = "last") -> Board:
    (only,) = report(root, pick).boards
    return only


NAIVE, ELASTIC = ("MNIST", "naive"), ("MNIST", "elastic")
GOOD = {NAIVE: [0.69, 0.70, 0.71], ELASTIC: [0.72, 0.74, 0.73]}


# Statistics


def test_the_paired_t_test_is_the_one_worked_by_hand() -> None:
    """Differences 3, 4, 2: mean 3, sd 1, t = 3 sqrt(3); two degrees of freedom have p = 1 - t / sqrt(t^2 + 2) and a
    97.5 % quantile of 4.302653."""
    ours = estimate([3.0, 4.0, 2.0])
    assert (ours.n, ours.mean, ours.sd) == (3, pytest.approx(3), pytest.approx(1))
    assert ours.p == pytest.approx(1 - math.sqrt(27 / 29))
    assert ours.high - 3 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert 3 - ours.low == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_equal_differences_have_an_interval_of_no_width() -> None:
    assert (estimate([0.1 + 0.2, 0.3]).low, estimate([0.3, 0.3]).p) == (pytest.approx(0.3), 0.0)
    assert (estimate([0.0, 0.0]).p, estimate([0.0, 0.0]).sd) == (1.0, 0.0)
    assert math.isnan(estimate([1.0]).low)
    assert estimate([]).n == 0


def test_welch_against_its_formula() -> None:
    a, b = [1.0, 2.0, 4.0], [0.0, 0.5]
    x, y = np.var(a, ddof=1) / 3, np.var(b, ddof=1) / 2
    ours = difference(a, b)
    assert ours.mean == pytest.approx(7 / 3 - 0.25)
    assert (ours.high - ours.low) / 2 > 1.96 * math.sqrt(x + y)
    assert difference([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert math.isnan(difference([1.0], [0.0, 2.0]).low)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.floats(-50, 50))
def test_an_interval_holds_its_mean_and_moves_with_it(values: list[float], by: float) -> None:
    ours, moved = estimate(values), estimate([value + by for value in values])
    assert ours.low <= ours.mean <= ours.high
    assert 0 <= ours.p <= 1
    assert moved.low == pytest.approx(ours.low + by, abs=1e-6)


# Tables


def test_a_cell_has_mean_deviation_the_papers_value_and_the_difference(
    tmp_path: Path, paper: Callable[..., None]
) -> None:
    paper()
    runs = cells(tmp_path / "outputs", GOOD)
    assert report_command.run([str(runs)]) == 0
    table = pd.read_csv(runs / "report" / "table_made_table3.csv").set_index(["row", "column"])
    ours = table.loc[ELASTIC]
    assert (ours["mean"], ours["sd"], ours["seeds"]) == (pytest.approx(73), pytest.approx(1), 3)
    assert (ours["paper"], ours["difference"]) == (73.64, pytest.approx(-0.64))
    assert (ours["rounds"], ours["state"], ours["scale"]) == ("4/4", "finished", "full")
    assert ours["mean_last_10"] == pytest.approx(100 * np.mean([np.linspace(a / 2, a, 4) for a in GOOD[ELASTIC]]))
    text = (runs / "report" / "report.md").read_text()
    assert "73.00 ± 1.00<br>paper 73.64 (-0.64)<br>3 seeds, 4/4 rounds" in text


def test_another_pick_is_another_number(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    run(tmp_path / "outputs" / "a", [0.2, 0.9, 0.4], cell=NAIVE)
    picked = {pick: board(tmp_path / "outputs", pick).ours(*NAIVE, "test accuracy").mean for pick in PICKS}
    assert picked == {"last": pytest.approx(40), "best": pytest.approx(90), "mean_last_10": pytest.approx(50)}


def test_metrics_other_than_accuracy(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    columns = {
        **{"elastic/boosted_by_layer": [0.5, 0.6, 0.7, 0.8], "personal/accuracy_after": 0.9, "train/accuracy": 0.7},
        **{"comm/down_bytes": 10 * 420, "comm/up_bytes": 2 * 10 * 420, "clients/arrived": 10},  # 5 % of it are buffers
    }
    run(tmp_path / "outputs" / "a", 0.8, cell=NAIVE, columns=columns, parameters=100)
    (only,) = board(tmp_path / "outputs").runs(*NAIVE)
    names = ("boosted", "personal accuracy", "train accuracy", "traffic", "emd", "loss", "client_lr", "no such thing")
    values = [only.value(name) for name in names]
    assert values[:6] == [pytest.approx(v) for v in (65, 90, 70, 3, 0.6, 0.2)]
    assert all(math.isnan(value) for value in values[6:])


def test_scaffold_sends_two_models_each_way(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    columns = {"comm/down_bytes": 2 * 10 * 400, "comm/up_bytes": 2 * 10 * 400, "clients/arrived": 10}
    run(tmp_path / "outputs" / "a", 0.8, cell=NAIVE, columns=columns, parameters=100)
    assert board(tmp_path / "outputs").ours(*NAIVE, "traffic").mean == pytest.approx(4)


def test_a_table_without_its_file_or_its_paper_is_reported_from_its_cells(
    tmp_path: Path, paper: Callable[..., None]
) -> None:
    runs = cells(tmp_path / "outputs", GOOD)
    assert report_command.run([str(runs)]) == 0
    assert "has no file in conf/ any more" in (runs / "report" / "report.md").read_text()
    paper(csv=None)
    assert report_command.run([str(runs)]) == 0
    assert "no published numbers of 'made\\_up'" in (runs / "report" / "report.md").read_text()


def test_an_experiment_takes_over_the_table_of_one_in_its_defaults(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    own = {"defaults": ["made/table3", "_self_", {"override /model": "mlp"}], "table": {"figures": ["loss"]}}
    (tmp_path / "conf" / "experiment" / "made" / "fig3.yaml").write_text(yaml.safe_dump(own))
    table = experiment.paper_table("made/fig3")
    assert (table.rows, table.figures, len(table.claims)) == (("MNIST",), ("loss",), 1)


def test_a_damaged_experiment_file_is_said(tmp_path: Path, paper: Callable[..., None]) -> None:
    for wrong in ({"rows": 3}, {"claims": [{"better": "a"}]}, {"tolerance": "much"}, {"seeds": None}):
        paper(wrong)
        (note,) = experiment.paper_table("made/table3").notes
        assert "cannot be read as a table" in note


def test_many_columns_are_turned(tmp_path: Path, paper: Callable[..., None]) -> None:
    taus = {f"tau {i / 10}": [] for i in range(11)}
    paper({"columns": {"naive": [], **taus}, "claims": [], "metrics": ["test accuracy", "boosted"]})
    runs = cells(tmp_path / "outputs", {NAIVE: [0.6], ("MNIST", "tau 0.5"): [0.7]})
    sheet = report(runs).document.sections[1].sheets[0]
    assert sheet.header == ("", "MNIST: test accuracy (last), %", "MNIST: boosted, %")
    assert [row[0].text for row in sheet.rows] == ["naive", *taus]


def test_published_keeps_labels_as_text(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper(csv=PAPER + "table1,0.10,NA,test accuracy,60.5,%,Table 1,\n")
    (known,) = papers.published("made_up").to_dict("records")
    assert (known["row"], known["column"], known["value"]) == ("0.10", "NA", 60.5)
    with pytest.raises(InputError, match="no published numbers"):
        papers.published("nobody")


# Verdicts


def verdict(root: Path) -> verdicts.Verdict:
    return verdicts.verdicts(board(root))[0]


@pytest.mark.parametrize(
    ("elastic", "word"),
    [
        ([0.72, 0.74, 0.73], verdicts.AGREES),
        ([0.75, 0.70, 0.72], verdicts.AGREES_NOISE),
        ([0.69, 0.70, 0.71], verdicts.EQUAL),
        ([0.65, 0.70, 0.68], verdicts.CONTRADICTS_NOISE),
        ([0.66, 0.66, 0.68], verdicts.CONTRADICTS),
        ([0.72], verdicts.AGREES_ONE),
        ([0.65], verdicts.CONTRADICTS_ONE),
        ([0.70, 0.71, 0.72], verdicts.AGREES),  # the same difference in every seed
        ([], verdicts.MISSING),
    ],
)
def test_every_verdict(tmp_path: Path, paper: Callable[..., None], elastic: list[float], word: str) -> None:
    paper()
    found = verdict(cells(tmp_path / "outputs", {NAIVE: GOOD[NAIVE], ELASTIC: elastic}))
    assert found.word == word
    assert found.paper == pytest.approx(3.5)
    assert found.ours.n == len(elastic)
    assert set(verdicts.LEGEND) >= {word}


def test_the_difference_is_taken_seed_by_seed(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    found = verdict(cells(tmp_path / "outputs", GOOD))
    assert found.ours.mean == pytest.approx(3)
    assert found.ours.p == pytest.approx(1 - math.sqrt(27 / 29))


def test_only_seeds_that_both_have_are_paired(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    runs = cells(tmp_path / "outputs", {NAIVE: [0.69, 0.70], ELASTIC: [0.72, 0.74, 0.1]})
    found = verdict(runs)
    assert (found.ours.n, found.ours.mean) == (2, pytest.approx(3.5))
    assert "seed 2: no naive" in found.note


def test_other_data_are_not_paired(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    run(tmp_path / "outputs" / "a", 0.7, cell=NAIVE, fingerprint="one")
    run(tmp_path / "outputs" / "b", 0.8, cell=ELASTIC, fingerprint="two")
    found = verdict(tmp_path / "outputs")
    assert (found.word, found.ours.n) == (verdicts.INCOMPARABLE, 0)
    assert "not the same partition (one, two)" in found.note


def test_columns_that_divide_the_data_differently_are_tested_unpaired(
    tmp_path: Path, paper: Callable[..., None]
) -> None:
    paper()
    for seed in range(3):
        for column, beta, accuracy in (("naive", 0.0, 0.7), ("elastic", 0.1, 0.8)):
            run(
                tmp_path / "outputs" / f"{column}{seed}",
                accuracy + 0.01 * seed,
                seed=seed,
                cell=("MNIST", column),
                fingerprint=f"{column}{seed}",
                config={"shared_data": {"beta": beta}},
            )
    found = verdict(tmp_path / "outputs")
    assert (found.word, found.ours.n) == (verdicts.AGREES, 3)
    assert "Welch" in found.note
    # 10 +- t(0.975; 4) sqrt(1/3 + 1/3)
    assert found.ours.high == pytest.approx(10 + 2.776445 * math.sqrt(2 / 3), rel=1e-5)


def test_an_unfinished_run_is_compared_where_it_stands(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    run(tmp_path / "outputs" / "a", [0.1, 0.2, 0.3, 0.9], cell=NAIVE)
    run(tmp_path / "outputs" / "b", [0.2, 0.5], cell=ELASTIC, asked=4, status="interrupted")
    found = verdict(tmp_path / "outputs")
    assert found.ours.mean == pytest.approx(100 * (0.5 - 0.2))
    assert "after round 2" in found.note
    filled = board(tmp_path / "outputs")
    assert (filled.state(*ELASTIC), filled.rounds(*ELASTIC)) == ("interrupted", "2/4")


def test_finished_runs_of_different_lengths_are_compared_at_their_ends(
    tmp_path: Path, paper: Callable[..., None]
) -> None:
    """FedAsync's rounds are one client's, FedAvg's are ten clients'."""
    paper()
    run(tmp_path / "outputs" / "a", [0.1, 0.2, 0.3, 0.9], cell=NAIVE)
    run(tmp_path / "outputs" / "b", [0.2, 0.5], cell=ELASTIC)
    assert verdict(tmp_path / "outputs").ours.mean == pytest.approx(-40)


def test_a_diverged_run_has_no_value(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    run(tmp_path / "outputs" / "a", 0.7, cell=NAIVE)
    run(tmp_path / "outputs" / "b", [0.8, 0.9, math.nan], cell=ELASTIC, status="diverged", asked=4)
    found = verdict(tmp_path / "outputs")
    assert found.word == verdicts.DIVERGED
    assert "elastic diverged" in found.note
    assert report_command.run([str(tmp_path / "outputs"), "--check"]) == 1


def test_the_papers_own_sign_counts_where_it_differs_from_the_claim(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper(csv=NUMBERS.replace("73.64", "70.04"))
    found = verdict(cells(tmp_path / "a", GOOD))
    assert (found.word, found.paper) == (verdicts.CONTRADICTS, pytest.approx(-0.1))
    paper(csv=NUMBERS.replace("73.64", "70.14"))
    assert verdict(cells(tmp_path / "b", GOOD)).word == verdicts.NOT_CLAIMED


def test_a_lower_loss_is_better(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper({"metrics": ["loss"]})
    assert verdict(cells(tmp_path / "outputs", GOOD)).word == verdicts.AGREES


@pytest.mark.parametrize(
    ("claim", "word"),
    [
        ({"at_most": 80}, verdicts.AGREES),
        ({"at_most": 73.5}, verdicts.AGREES_NOISE),
        ({"at_most": 72.5}, verdicts.CONTRADICTS_NOISE),
        ({"at_most": 60}, verdicts.CONTRADICTS),
        ({"at_least": 60}, verdicts.AGREES),
        ({"at_least": 80}, verdicts.CONTRADICTS),
        ({"about": 74, "within": 5}, verdicts.AGREES),
        ({"about": 74, "within": 1.5}, verdicts.AGREES_NOISE),
        ({"about": 90, "within": 5}, verdicts.CONTRADICTS),
        ({"metric": "loss", "at_most": 0.28}, verdicts.AGREES_NOISE),  # 0.27 +- 0.0248
        ({"metric": "loss", "at_most": 0.3}, verdicts.AGREES),
    ],
)
def test_claims_on_a_value(tmp_path: Path, paper: Callable[..., None], claim: dict[str, Any], word: str) -> None:
    """Elastic has 72, 74, 73: an interval of 73 +- 2.48."""
    paper({"claims": [{"column": "elastic", **claim}]})
    (found,) = verdicts.verdicts(board(cells(tmp_path / "outputs", GOOD)))
    assert found.word == word


def test_rows_that_nobody_has_begun_are_named_not_judged(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper({"rows": {"MNIST": [], "EMNIST": []}, "claims": [{"column": "elastic", "row": "EMNIST", "at_most": 80}]})
    root = cells(tmp_path / "outputs", GOOD)
    assert verdicts.verdicts(board(root)) == []
    (section,) = (s for s in report(root).document.sections if s.title.startswith("made/"))
    assert "Rows not run: EMNIST." in section.lines


def controlled(rows: dict[str, list[Any]], *claims: dict[str, Any]) -> dict[str, Any]:
    control = ["aggregator=fedavg", "server_optimizer.lr=${paired:elastic,elastic/step}"]
    columns = TABLE["columns"] | {"same length": control, "other": []}
    return {"rows": rows, "columns": columns, "claims": list(claims)}


def test_a_gain_is_split_into_what_the_control_has_and_the_rest(tmp_path: Path, paper: Callable[..., None]) -> None:
    """The plain method is that of the first claim about the method, in its row."""
    first = ({"better": "elastic", "than": "other", "row": "EMNIST"}, {"better": "elastic", "than": "naive"})
    paper(controlled({"MNIST": []}, *first, {"better": "elastic", "than": "other"}))
    runs = cells(tmp_path / "outputs", GOOD | {("MNIST", "same length"): [0.71, 0.72]})
    (split,) = verdicts.splits(board(runs))
    assert (split.plain, split.control, split.method) == ("naive", "same length", "elastic")
    assert (split.gain.mean, split.shared.mean, split.own.mean) == (
        *(pytest.approx(3.5), pytest.approx(2.0)),  # seeds 0 and 1 only
        pytest.approx(1.5),
    )
    assert "seed 2: no same length" in split.note
    assert math.isnan(split.share), "two differences, 3 and 4: the interval has 0 in it"
    known = report_command.run([str(runs)]), pd.read_csv(runs / "report" / "verdicts.csv").set_index("claim")["ours"]
    assert known[1]["what the control gains"] == pytest.approx(2.0)
    assert known[1]["what the method has beyond it"] == pytest.approx(1.5)
    whole = cells(tmp_path / "whole", GOOD | {("MNIST", "same length"): [0.70, 0.71, 0.72]})
    (split,) = verdicts.splits(board(whole))
    assert split.share == pytest.approx(1 / 3)
    report_command.run([str(whole)])
    text = (whole / "report" / "report.md").read_text()
    assert "33 %" in text
    assert "mean over rounds of elastic/step in the run of elastic" in text


def test_a_gain_is_split_in_the_metric_it_is_claimed_in(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper(controlled({"MNIST": []}, {"better": "elastic", "than": "naive", "metric": "loss"}))
    runs = cells(tmp_path / "outputs", GOOD | {("MNIST", "same length"): GOOD[NAIVE]})
    (split,) = verdicts.splits(board(runs))
    assert (split.metric, split.gain.mean, split.shared.mean) == ("loss", pytest.approx(-0.03), pytest.approx(0))


def test_a_control_that_is_more_than_a_rate_has_no_share(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper(controlled({"MNIST": []}, {"better": "elastic", "than": "naive"}))
    for column, aggregator in (("naive", "fedavg"), ("elastic", "fednnnn"), ("same length", "momentum")):
        for seed in range(3):
            accuracy = {"naive": 0.6, "elastic": 0.7, "same length": 0.69}[column] + 0.01 * seed
            folder = tmp_path / "outputs" / f"{column}{seed}"
            run(folder, accuracy, seed=seed, cell=("MNIST", column), choices={"aggregator": aggregator})
    (split,) = verdicts.splits(board(tmp_path / "outputs"))
    assert split.shared.mean == pytest.approx(9)
    assert math.isnan(split.share)
    assert split.unlike == ("same length also has aggregator=momentum, naive aggregator=fedavg",)


def test_claims_on_rows_on_the_best_column_and_on_what_is_larger(tmp_path: Path, paper: Callable[..., None]) -> None:
    claims: list[dict[str, Any]] = [
        {"column": "elastic", "row": "b", "than_row": "a"},
        {"best_of": ["naive", "elastic"], "row": "b", "about": 80, "within": 1},
        {"larger": "naive", "than": "elastic", "row": "a", "metric": "loss"},
        {"better": "elastic", "than": "naive", "row": "a", "by": 3},
        {"better": "elastic", "than": "naive", "row": "a", "by": 1},
    ]
    paper({"rows": {"a": [], "b": []}, "claims": claims}, csv=PAPER)
    values = {("a", "naive"): [0.60], ("a", "elastic"): [0.62], ("b", "naive"): [0.70], ("b", "elastic"): [0.80]}
    rows, best, larger, by_three, by_one = verdicts.verdicts(board(cells(tmp_path / "outputs", values)))
    assert (rows.word, rows.ours.mean) == (verdicts.AGREES_ONE, pytest.approx(18))
    assert (best.word, best.column, best.ours.mean) == (verdicts.AGREES_ONE, "elastic", pytest.approx(80))
    assert (larger.word, larger.ours.mean) == (verdicts.AGREES_ONE, pytest.approx(0.02))
    assert (by_three.word, by_one.word) == (verdicts.CONTRADICTS_ONE, verdicts.AGREES_ONE)


def test_bounds_on_accuracies_wait_for_the_papers_rounds(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper({"claims": [{"column": "elastic", "at_least": 90}, {"column": "elastic", "metric": "emd", "at_most": 0.1}]})
    words = [v.word for v in verdicts.verdicts(board(cells(tmp_path / "outputs", GOOD, scale="short")))]
    assert words == [verdicts.NOT_YET, verdicts.CONTRADICTS], "the clients are what they are after any round"


def test_finished_seeds_count_and_unfinished_ones_wait(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    root = cells(tmp_path / "outputs", {NAIVE: [0.70, 0.70], ELASTIC: [0.74, 0.76]})
    run(root / "n2", [0.1, 0.2, 0.3, 0.7], seed=2, cell=NAIVE)
    run(root / "e2", [0.0, 0.1], seed=2, cell=ELASTIC, asked=4, status="running")
    found = verdict(root)
    assert (found.ours.n, found.ours.mean) == (2, pytest.approx(5))
    assert "seed 2: left out, elastic running" in found.note
    assert board(root).ours(*ELASTIC, "test accuracy").mean == pytest.approx(75)


def test_seeds_that_are_all_unfinished_are_read_after_the_same_round(
    tmp_path: Path, paper: Callable[..., None]
) -> None:
    paper()
    for seed, rounds in ((0, 3), (1, 2)):
        for column, step in (("naive", 0.1), ("elastic", 0.2)):
            curve = [step * (r + 1) for r in range(rounds)]
            run(tmp_path / "o" / f"{column}{seed}", curve, seed=seed, cell=("MNIST", column), asked=4, status="running")
    found = verdict(tmp_path / "o")
    assert (found.ours.n, found.ours.mean) == (2, pytest.approx(20)), "after round 2, both"
    assert board(tmp_path / "o").ours(*ELASTIC, "test accuracy").mean == pytest.approx(40)


def test_samples_that_differ_are_not_paired(tmp_path: Path, paper: Callable[..., None]) -> None:
    """Two splits by the same indices, of other images."""
    paper()
    for column, images in (("naive", "one"), ("elastic", "two")):
        run(tmp_path / "outputs" / column, 0.7, cell=("MNIST", column), fingerprint="x", data=images)
    assert verdict(tmp_path / "outputs").word == verdicts.INCOMPARABLE


def test_differences_of_both_signs_are_no_equality(tmp_path: Path, paper: Callable[..., None]) -> None:
    paper()
    found = verdict(cells(tmp_path / "outputs", {NAIVE: [0.70, 0.70], ELASTIC: [0.71, 0.69]}))
    assert found.word == verdicts.CONTRADICTS_NOISE


@given(st.dictionaries(st.integers(0, 9), st.floats(0.1, 0.9)), st.dictionaries(st.integers(0, 9), st.floats(0.1, 0.9)))
def test_pairs_are_the_seeds_both_have(a: dict[int, float], b: dict[int, float]) -> None:
    def runs(values: dict[int, float]) -> list[Run]:
        about = {"status": "finished", "rounds": 1, "rounds_asked": 1, "partition_fingerprint": "x"}
        empty = pd.DataFrame(columns=["round"])
        return [Run({**about, "seed": s, "test_accuracy_last": v}, empty, empty) for s, v in values.items()]

    filled = Board(PaperTable("x"), "full", "last", {("r", "a"): runs(a), ("r", "b"): runs(b)})
    pairs = together(filled, [("r", "a"), ("r", "b")], "test accuracy")
    assert pairs.values == {s: (100 * a[s], 100 * b[s]) for s in sorted(a.keys() & b.keys())}
    missing = {"no a": sorted(b.keys() - a.keys()), "no b": sorted(a.keys() - b.keys())}
    notes = (note.removeprefix("seeds ").removeprefix("seed ").split(": ") for note in pairs.notes)
    named = {reason: [int(s) for s in seeds.split(", ")] for seeds, reason in notes}
    assert named == {reason: seeds for reason, seeds in missing.items() if seeds}


# The check


def checked(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = report_command.run([str(root), "--check"])
    return code, capsys.readouterr().out


def test_the_check_passes_and_fails(
    tmp_path: Path, paper: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    paper()
    code, out = checked(cells(tmp_path / "good", GOOD), capsys)
    assert (code, "check: passes (1 of 1 tables were checked)" in out) == (0, True)
    code, out = checked(cells(tmp_path / "direction", {NAIVE: [0.71], ELASTIC: [0.705]}), capsys)
    assert (code, "elastic better than naive: contradicts, one seed (-0.50)" in out) == (1, True)
    far = {NAIVE: [0.75], ELASTIC: [0.76]}
    code, out = checked(cells(tmp_path / "far", far), capsys)
    assert code == 1
    assert "MNIST, naive: test accuracy 75.00, the paper has 70.14: +4.86, tolerance 3" in out
    code, _ = checked(cells(tmp_path / "short", far, scale="short"), capsys)
    assert code == 0, "the paper's values are not expected of fewer rounds"
    code, out = checked(cells(tmp_path / "smoke", {NAIVE: [0.8], ELASTIC: [0.1]}, scale="smoke"), capsys)
    assert (code, "nothing to check" in out) == (1, True)
    code, out = checked(tmp_path, capsys)
    assert "smoke: not checked" in out


def test_a_run_that_cannot_be_read_fails_the_check(
    tmp_path: Path, paper: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    paper()
    root = cells(tmp_path / "outputs", GOOD)
    bad = root / "row=MNIST,column=elastic,seed=2" / "summary.json"
    bad.write_text("")
    code, out = checked(root, capsys)
    assert code == 1
    assert f"check: {bad.parent} is left out: summary.json" in out


def test_seeds_of_one_cell_with_different_settings(
    tmp_path: Path, paper: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody typed it: the experiment's file was changed between two seeds. Only a control's rate may differ."""
    control = ["aggregator=fedavg", "server_optimizer.lr=${paired:elastic,elastic/step}"]
    paper({"columns": TABLE["columns"] | {"same length": control}})
    root = cells(tmp_path / "outputs", {NAIVE: [0.70], ELASTIC: [0.72], ("MNIST", "same length"): [0.71]})
    for (_, column), config in {
        NAIVE: {"eval": {"batch_size": 7}, "engine": {"workers": 3}, "younger": {"key": 1}},
        ELASTIC: {"partition": {"alpha": 0.1}},
        ("", "same length"): {"server_optimizer": {"lr": 1.3}},
    }.items():
        run(root / f"1 {column}", 0.72, seed=1, cell=("MNIST", column), config=config)
    made = board(root)
    assert made.state(*NAIVE) == made.state("MNIST", "same length") == ""
    assert made.state(*ELASTIC) == "of different settings (partition.alpha 0.1, 0.5)"
    code, out = checked(root, capsys)
    assert (code, "MNIST, elastic: of different settings" in out) == (1, True)


def test_what_is_missing_or_unfinished_fails_the_check(
    tmp_path: Path, paper: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    paper({"claims": [], "tolerance": None})
    code, out = checked(cells(tmp_path / "missing", {NAIVE: [0.7]}), capsys)
    assert (code, "MNIST, elastic: missing" in out) == (1, True)
    paper({"rows": {"MNIST": [], "EMNIST": []}, "claims": [{"better": "elastic", "than": "naive"}]})
    code, out = checked(cells(tmp_path / "begun", GOOD), capsys)
    assert (code, "not run, so not checked: EMNIST" in out) == (0, True)
    paper({"claims": [{"better": "elastic", "then": "naive"}]})
    code, out = checked(cells(tmp_path / "mistyped", GOOD), capsys)
    assert (code, "its file cannot be read" in out) == (1, True)
    paper({"claims": [], "tolerance": None})
    code, out = checked(cells(tmp_path / "unfinished", GOOD, status="interrupted", asked=9), capsys)
    assert (code, "MNIST, elastic: interrupted (4/9 rounds)" in out) == (1, True)
    code, out = checked(cells(tmp_path / "silent", GOOD), capsys)
    assert code == 0
    assert "nothing is stated of it" in out
    assert "check: passes (0 of 1 tables were checked)" in out
    run(tmp_path / "ordinary" / "a", 0.7)
    code, out = checked(tmp_path / "ordinary", capsys)
    assert (code, "nothing to check" in out) == (1, True)
    paper({"claims": [], "paper": "nobody"})
    code, out = checked(cells(tmp_path / "no paper", GOOD), capsys)
    assert (code, "no published numbers to compare with" in out) == (1, True)


# Ordinary runs


def test_ordinary_runs_are_labelled_by_what_they_differ_in(tmp_path: Path) -> None:
    for seed in (0, 1):
        for tau, accuracy in ((0.1, 0.5), (0.9, 0.7)):
            config = {"aggregator": {"tau": tau, "mu": 0.95}, "dataset": {"seed": seed}, "data_dir": f"here{seed}"}
            run(tmp_path / "sweep" / f"{tau}-{seed}", accuracy + 0.02 * seed, seed=seed, config=config)
    (section,) = report(tmp_path).document.sections
    sheet = section.sheets[0]
    assert sheet.header[:2] == ("aggregator.tau", "accuracy, last")
    assert [[cell.text for cell in row][:2] for row in sheet.rows] == [["0.1", "51.00 ± 1.41"], ["0.9", "71.00 ± 1.41"]]
    assert [cell.text for cell in sheet.rows[0]][-3:] == ["0, 1", "4/4", "finished"]


# Figures


def test_every_kind_of_figure(tmp_path: Path, paper: Callable[..., None]) -> None:
    columns = {
        **{"elastic/boosted_by_layer": 0.7, "norm/N_integrated": [1, 2, 3, 4], "time/virtual_s": [2, 4, 6, 8]},
        **{f"norm/{part}": 1.0 for part in ("N_server", "E", "N_server_conv", "E_conv", "N_server_linear", "E_linear")},
        "clients/arrived": 10,
    }
    paper(
        {
            "rows": {"alpha 0.5": [], "alpha 100": []},
            "columns": {"naive": [], "tau 0.5": []},
            "claims": [],
            "figures": [*figures.KINDS, "pie"],
        },
        PAPER + "table3,alpha 0.5,naive,test accuracy,61,%,Fig. 2,\n",
    )
    values = {(row, column): [0.6, 0.8] for row in ("alpha 0.5", "alpha 100") for column in ("naive", "tau 0.5")}
    runs = cells(tmp_path / "outputs", values, columns=columns)
    drawn, notes = figures.charts(board(runs))
    by_kind = {chart.name.removeprefix("made_table3_full_"): chart for chart in drawn}
    assert list(by_kind) == list(figures.KINDS)
    assert "Unknown figure 'pie'" in notes[0]
    curves = by_kind["curves"]
    assert [panel.title for panel in curves.panels] == ["alpha 0.5", "alpha 100"]
    line, _, level = curves.panels[0].series
    assert (line.x, line.y[-1]) == ((1, 2, 3, 4), pytest.approx(70))
    assert line.high[-1] - line.y[-1] == pytest.approx(math.sqrt(200))
    assert (level.name, level.y, level.style) == ("paper: naive", (61, 61), "paper")
    against = by_kind["against"]
    assert (against.x, against.log, against.panels[0].series[0].x) == ("alpha", "x", (0.5, 100))
    assert [panel.title for panel in by_kind["norms"].panels][:3] == [
        *("alpha 0.5, all layers", "alpha 0.5, conv layers", "alpha 0.5, linear layers"),
    ]
    assert by_kind["work"].panels[0].series[0].x == (10, 20, 30, 40), "ten clients in each of four rounds"
    assert by_kind["time"].panels[0].series[0].x[0] == 2
    assert by_kind["emd"].panels[0].series[0].y == (pytest.approx(0.6),) * 2
    assert report_command.run([str(runs)]) == 0
    assert len(list((runs / "report").glob("*.png"))) == len(figures.KINDS)


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    metrics = pd.DataFrame({"round": np.arange(1.0, 4001), "test/accuracy": np.linspace(0, 1, 4000)})
    chart = figures.run_curves("x", "x", {"a": [Run({}, metrics, metrics.iloc[:0])]})
    (line,) = chart.panels[0].series
    assert len(line.x) == figures.POINTS
    assert (line.x[0], line.x[-1], line.y[-1]) == (1, 4000, 100)


def test_labels_as_numbers() -> None:
    assert figures.positions(["alpha 0.5", "5 %", "1e-3", "naive"]) == {"alpha 0.5": 0.5, "5 %": 5.0, "1e-3": 0.001}
    assert figures.positions(["eta 0.1", "eta 0.1 decayed"]) == {}


def test_ordinary_runs_in_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Two sweeps called alike, and a copy of a run, which is no second seed."""
    for where, accuracy in (("a", 0.5), ("b", 0.9)):
        for tau in (0.1, 0.5):
            run(tmp_path / where / "sweep" / f"tau={tau}", accuracy, config={"aggregator": {"tau": tau}})
    run(tmp_path / "b" / "sweep" / "copy", 0.9, config={"aggregator": {"tau": 0.5}})
    one, other = report(tmp_path).document.sections
    assert (one.title, other.title) == ("Runs in a/sweep", "Runs in b/sweep")
    assert one.charts[0].name != other.charts[0].name
    assert [row[-3].text for row in other.sheets[0].rows] == ["0", "0"]


# Formats

NASTY = r"50% of $x$ & <b>a_b</b> #1 {y} ~ ^ \ | `q` ü 数 [red]"


def test_latex_is_escaped() -> None:
    assert escaped("50% & a_b") == r"50\% \& a\_b"
    assert escaped("τ ± ü 数") == r"$\tau$ $\pm$ u ?"
    assert escaped("[100]") == "{[}100{]}", "after \\midrule it would be its width"
    bare = re.sub(r"\\textbackslash\{\}|\\text\w+\{\}|\\[&%$#_{}]|\{\[\}|\{\]\}", "", escaped(NASTY))
    assert not set(bare) & set("&%$#_{}~^\\<>|`")
    assert bare.isascii()


class Loads(HTMLParser):
    """Everything in a page that a browser would fetch, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [f"{tag} {k}={v}" for k, v in attributes if k in ("src", "srcset", "data", "action", "poster")]
        self.found += [f"{tag} {k}={v}" for k, v in attributes if k == "href" and not str(v).startswith("#")]


def test_the_page_needs_nothing_else_and_labels_are_text(tmp_path: Path, paper: Callable[..., None]) -> None:
    nasty = NASTY + "</script><script>alert(1)</script>"
    paper({"rows": {nasty: []}, "columns": {"naive": [], nasty: []}, "claims": [{"better": nasty, "than": "naive"}]})
    runs = cells(tmp_path / "outputs", {})
    for i, column in enumerate(("naive", nasty)):
        run(runs / str(i), 0.5, cell=(nasty, column))
    assert report_command.run([str(runs)]) == 0
    page = (runs / "report" / "report.html").read_text()
    loads = Loads()
    loads.feed(page)
    assert loads.found == []
    assert loads.tags.count("script") == 3, "one chart, plotly.js once, our own"
    assert "link" not in loads.tags
    assert "default-src 'none'" in page
    assert "showSendToCloud: false" in page
    styles = page[: page.index("</style>")]
    assert "url(" not in styles
    assert "@import" not in styles
    (chart,) = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert {trace["name"] for trace in json.loads(chart)["data"]} >= {"naive"}


def test_latex_is_well_formed(tmp_path: Path, paper: Callable[..., None]) -> None:
    """No LaTeX is needed for this: every brace and environment is closed, and every row has its columns."""
    paper({"rows": {NASTY: []}, "columns": {"naive": [], NASTY: []}, "claims": [{"better": NASTY, "than": "naive"}]})
    for i, column in enumerate(("naive", NASTY)):
        run(tmp_path / "outputs" / str(i), 0.5, cell=(NASTY, column))
    report_command.run([str(tmp_path / "outputs")])
    text = (tmp_path / "outputs" / "report" / "report.tex").read_text()
    bare = re.sub(r"\\[\\{}&%$#_]", "", text)  # without what is escaped
    depth = 0
    for c in bare:
        depth += {"{": 1, "}": -1}.get(c, 0)
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    opened: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    for columns, body in re.findall(r"\\begin\{tabular\}\{(l+)\}\n(.*?)\n\\end\{tabular\}", text, re.DOTALL):
        lines = [line for line in body.splitlines() if "&" in re.sub(r"\\&", "", line)]
        assert lines
        assert {re.sub(r"\\&", "", line).count("&") for line in lines} == {len(columns) - 1}


# The command


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedsim.report_command", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )


def test_a_real_report_of_real_runs(tmp_path: Path, fedsim: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    sweep = fedsim("-m", "dataset=synthetic", "model=logistic", "rounds=2", "aggregator=fedavg,elastic", "seed=0,1")
    assert sweep.returncode == 0, sweep.stderr
    out = tmp_path / "page"
    made = command(tmp_path / "outputs", "--out", out)
    assert (made.returncode, made.stderr) == (0, "")
    assert re.search(r"│ elastic +│ \d\d\.\d\d ± \d+\.\d\d", made.stdout)
    assert {"report.html", "report.md", "report.tex"} < {path.name for path in out.iterdir()}
    assert sorted(pd.read_csv(out / "runs.csv")["aggregator"]) == ["elastic", "elastic", "fedavg", "fedavg"]

    for path in tmp_path.rglob("summary.json"):  # the same runs as cells of a table that has no file
        summary = json.loads(path.read_text())
        column = summary["choices"]["aggregator"]
        summary["table"] = {"experiment": "no/file", "row": "synthetic", "column": column, "scale": "smoke"}
        path.write_text(json.dumps(summary))
    made = command(tmp_path / "outputs", "--check")
    assert (made.returncode, made.stderr) == (1, "")
    assert "all of these are smoke runs" in made.stdout
    table = pd.read_csv(tmp_path / "outputs" / "report" / "table_no_file.csv").set_index("column")
    lasts = [
        pd.read_csv(path)["test/accuracy"].iloc[-1]
        for path in tmp_path.glob("outputs/*/aggregator=elastic*/metrics.csv")
    ]
    assert table.loc["elastic", "mean"] == pytest.approx(100 * np.mean(lasts))
    assert (table.loc["elastic", "rounds"], table.loc["elastic", "seeds"]) == ("2/2", 2)


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    good, bad = run(tmp_path / "good", 0.7), run(tmp_path / "bad" / "a", 0.7)
    (bad / "summary.json").write_text("{")
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ((tmp_path / "nowhere",), "no such folder"),
        ((tmp_path / "empty",), "no runs in"),
        ((tmp_path / "bad",), "can be read"),
        ((good, "--out", tmp_path / "file"), "cannot be written to"),
    ):
        made = command(*arguments)
        assert (made.returncode, made.stdout if "out" not in str(arguments[1:]) else "") == (2, "")
        assert made.stderr.startswith("fedsim-report: error: ")
        assert message in made.stderr
        assert made.stderr.count("\n") == 1
