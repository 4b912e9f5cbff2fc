"""A paper's table as one command: its cells, going on with it, the columns that take values from others, scales."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import environment, metrics
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from fedsim import check, fetch, table
from fedsim.cli import register_resolvers
from fedsim.dataset import small
from fedsim.overrides import CONF, table_name, values
from fedsim.report import duration
from fedsim.scale import SMALL

Command = Callable[..., "subprocess.CompletedProcess[str]"]

TABLES = sorted(
    path.relative_to(CONF / "experiment").with_suffix("").as_posix()
    for path in (CONF / "experiment").rglob("*.yaml")
    if "table" in yaml.safe_load(path.read_text(encoding="utf-8"))
)
OTHERWISE_SPLIT = ("fednnnn/fig3", "fednnnn/fig4", "slides/shared_data")
"""Tables whose columns are different splits: that is what they are about."""
MNIST = ("experiment=elastic/table3", "row=MNIST")
FOLDER = "outputs/experiment=elastic-table3,scale=smoke"


def cells(name: str, *typed: str) -> list[table.Cell]:
    given = [f"experiment={name}", *typed]
    register_resolvers(given, table_name)
    return table.cells(name, given)


def summaries(folder: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/summary.json")}


def refused(result: "subprocess.CompletedProcess[str]") -> str:
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.strip().splitlines()
    return line


def test_the_tables_that_are_promised_are_there() -> None:
    elastic = "table1 table2 table3 fig2_alpha fig2_participation fig2_epochs fig3 supp_table1 supp_fig1 supp_fig2"
    promised = {
        *(f"elastic/{name}" for name in (*elastic.split(), "communication", "shakespeare", "lower_bound")),
        *(f"fednnnn/{name}" for name in ("table2_mnist", "table2_cifar10", "fig3", "fig4")),
        *(f"felbab/fig{n}" for n in range(1, 6)),
        *(f"slides/{name}" for name in ("shared_data", "loadaboost", "fedasync")),
    }
    assert set(TABLES) == promised


@pytest.mark.parametrize("name", TABLES)
def test_every_table_runs_on_small_data(fedsim: Command, tmp_path: Path, name: str) -> None:
    result = fedsim(f"experiment={name}", "scale=smoke")
    assert result.returncode == 0, result.stderr[-2000:]
    wanted = cells(name, "scale=smoke")
    found = summaries(tmp_path / f"outputs/experiment={name.replace('/', '-')},scale=smoke")
    assert set(found) == {cell.folder.name for cell in wanted}
    assert {s["status"] for s in found.values()} == {"finished"}
    assert {s["rounds"] for s in found.values()} == {2}
    assert {s["table"]["scale"] for s in found.values()} == {"smoke"}
    for cell in wanted:
        assert found[cell.folder.name]["table"] == cell.place
    if name not in OTHERWISE_SPLIT:
        for row in {cell.row for cell in wanted}:
            prints = {s["partition_fingerprint"] for s in found.values() if s["table"]["row"] == row}
            assert len(prints) == 1, f"{row}: its columns must be about the same clients"


@pytest.mark.parametrize("name", TABLES)
def test_each_file_opens_with_its_command_and_says_what_it_is(name: str) -> None:
    text = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith(f"# @package _global_\n# fedsim experiment={name}\n#\n# ")
    spec = table.specification(name)
    assert set(spec) <= set(table.KEYS)
    for cell in cells(name):
        assert set(table.paired_columns(cell)) <= set(list(spec["columns"])[: list(spec["columns"]).index(cell.column)])


def test_scale_short_shrinks_rounds_and_nothing_of_the_method() -> None:
    full, short = cells("elastic/table3"), cells("elastic/table3", "scale=short")
    assert len(full) == len(short)
    share = table.specification("elastic/table3")["short"]["rounds"]
    for a, b in zip(full, short, strict=True):
        one, other = (table.resolved(c, {"elastic/mean_zeta": 1.3, "elastic/step": 1.1}) for c in (a, b))
        assert other["rounds"] == max(2, round(share * one["rounds"]))
        changed = {key for key in one if one[key] != other[key]}
        assert changed <= {"rounds", "schedule", "eval"}, "the cosine ends with the rounds there are"
        assert a.folder != b.folder


def test_what_is_typed_wins_over_row_column_and_scale() -> None:
    (cell,) = cells(
        "elastic/table3", "row=MNIST", "column=elastic", "seed=7", "scale=short", "rounds=5", "client.epochs=3"
    )
    config = table.resolved(cell)
    assert (config["rounds"], config["client"]["epochs"], config["seed"]) == (5, 3, 7)
    (smoke,) = cells("elastic/table3", "row=MNIST", "column=elastic", "scale=smoke", "rounds=4", "engine=vmap")
    assert smoke.config.rounds == 4
    assert smoke.config.engine._target_.endswith("Vmap")


@pytest.mark.parametrize("seeds", [[0], [5, 3], [0, 1, 2, 99], [0, 0]])
def test_seeds_are_an_axis(seeds: list[int]) -> None:
    found = cells("felbab/fig1", f"seed={','.join(map(str, seeds))}")
    assert {c.seed for c in found} == set(seeds)
    assert len(found) == 16 * len(set(seeds))
    assert all(c.config.seed == c.seed for c in found)
    assert len({c.folder for c in found}) == len(found)


@pytest.mark.parametrize("name", ["elastic/table2", "fednnnn/table2_mnist", "slides/fedasync"])
def test_a_cell_is_what_hydra_composes(name: str) -> None:
    for cell in cells(name, "seed=3", "client.epochs=2"):
        lines = [o for o in cell.overrides if not o.startswith("scale=")]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            expected = compose("config", lines)
        OmegaConf.set_struct(expected, False)
        del expected["table"]
        assert OmegaConf.to_container(cell.config) == OmegaConf.to_container(expected), cell.name


def test_a_table_goes_on_where_it_stopped(fedsim: Command, tmp_path: Path) -> None:
    """One seed, then two in the same folder; the first is not run again. The control takes elastic's own mean zeta."""
    assert fedsim(*MNIST, "scale=smoke", "column=naive,elastic").returncode == 0
    folder = tmp_path / FOLDER
    first = {path: path.read_bytes() for path in folder.glob("*/metrics.csv")}
    assert len(first) == 2
    again = fedsim(*MNIST, "scale=smoke", "seed=0,1")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished earlier") == 2
    assert all(path.read_bytes() == before for path, before in first.items())
    found = summaries(folder)
    assert len(found) == 8
    for seed in (0, 1):
        zeta = metrics(folder / f"column=elastic,row=MNIST,seed={seed}")["elastic/mean_zeta"].astype(float).mean()
        control = yaml.safe_load((folder / f"column=mean-zeta,row=MNIST,seed={seed}/config.yaml").read_text())
        assert control["server_optimizer"]["lr"] == pytest.approx(zeta, abs=1e-6)
        assert control["aggregator"]["_target_"] == "fedsim.aggregator.fedavg.FedAvg"


def test_an_interrupted_table_ends_as_an_undisturbed_one(fedsim: Command, tmp_path: Path) -> None:
    args = [*MNIST, "scale=smoke", "rounds=60", "column=naive,elastic", "checkpoint.every=1"]
    folder = tmp_path / "outputs/experiment=elastic-table3,rounds=60,scale=smoke"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsim", *args], cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL
    )
    second = folder / "column=elastic,row=MNIST,seed=0" / "metrics.csv"
    deadline = time.monotonic() + 120
    while (not second.exists() or len(second.read_text().splitlines()) < 4) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    rounds = summaries(folder)[second.parent.name]["rounds"]
    assert 0 < rounds < 60
    assert fedsim(*args).returncode == 0
    other = tmp_path / "other"
    other.mkdir()
    assert fedsim(*args, cwd=other).returncode == 0
    undisturbed = metrics(other / second.parent.relative_to(tmp_path))
    assert metrics(second.parent).equals(undisturbed)


def test_other_rounds_are_another_table(fedsim: Command, tmp_path: Path) -> None:
    """A paper's finished cell must not be made another by `rounds`."""
    assert fedsim(*MNIST, "scale=smoke", "column=naive").returncode == 0
    before = (tmp_path / FOLDER / "column=naive,row=MNIST,seed=0" / "summary.json").read_bytes()
    assert fedsim(*MNIST, "scale=smoke", "column=naive", "rounds=3").returncode == 0
    assert (tmp_path / FOLDER / "column=naive,row=MNIST,seed=0" / "summary.json").read_bytes() == before
    (other,) = summaries(tmp_path / "outputs/experiment=elastic-table3,rounds=3,scale=smoke").values()
    assert (other["rounds"], other["table"]["scale"]) == (3, "smoke, rounds=3")


def test_a_changed_setting_is_refused_with_the_difference(fedsim: Command, tmp_path: Path) -> None:
    assert fedsim(*MNIST, "scale=smoke", "column=naive,elastic").returncode == 0
    path = tmp_path / FOLDER / "column=elastic,row=MNIST,seed=0" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["aggregator"]["tau"] = 0.25
    path.write_text(yaml.safe_dump(config))
    before = {p: p.read_bytes() for p in (tmp_path / FOLDER).glob("*/metrics.csv")}
    line = refused(fedsim(*MNIST, "scale=smoke", "column=naive,elastic"))
    assert "aggregator.tau: 0.25 there, 0.5 here" in line
    listed = fedsim(*MNIST, "scale=smoke", "column=naive,elastic", "--dry-run")
    assert "made by another config (aggregator.tau: 0.25 there, 0.5 here)" in " ".join(listed.stdout.split())
    assert sum("finished" in row for row in listed.stdout.splitlines()) == 1
    assert all(p.read_bytes() == content for p, content in before.items())


def test_a_control_without_its_partner_says_what_to_run(fedsim: Command, tmp_path: Path) -> None:
    line = refused(fedsim(*MNIST, "scale=smoke", "column=mean zeta"))
    assert line.startswith(
        "fedsim: error: MNIST, mean zeta, seed 0 (smoke): takes elastic/mean_zeta from column elastic"
    )
    assert line.endswith("is missing; run that one first")
    assert not list(tmp_path.glob("outputs/*/*/metrics.csv"))


def test_a_dry_run_lists_every_cell_and_writes_none(fedsim: Command, tmp_path: Path) -> None:
    assert fedsim(*MNIST, "scale=smoke", "column=naive").returncode == 0
    result = fedsim(*MNIST, "scale=smoke", "seed=0,1", "--dry-run")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "MNIST" in line]
    assert len(lines) == 8
    assert sum("finished" in line for line in lines) == 1
    assert sum(" new " in line for line in lines) == 7
    assert "GiB of memory" in result.stdout
    assert len(list((tmp_path / FOLDER).iterdir())) == 1, "the run that was made before"


def test_what_cannot_be_run_here_does_not_hold_up_the_rest(fedsim: Command, tmp_path: Path) -> None:
    """Full scale wants data that are not there."""
    nowhere = (f"data_dir={tmp_path / 'nothing'}", "seed=0", "column=naive")
    listed = fedsim("experiment=elastic/table3", "--dry-run", *nowhere)
    assert listed.returncode == 0, listed.stderr
    assert "impossible (1)" in listed.stdout
    result = fedsim("experiment=elastic/table3", *nowhere)
    assert result.returncode == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == len(set(lines)) > 3, "a line for each thing that is wrong"


def test_what_is_wrong_with_all_cells_is_said_once(fedsim: Command) -> None:
    result = fedsim("experiment=elastic/table3", "scale=smoke", "seed=0", "client_optimizer.lr=-1")
    assert result.returncode == 2
    first, second = result.stderr.strip().splitlines()
    assert "client_optimizer.lr=-1" in first
    rows = len(table.specification("elastic/table3")["rows"])
    assert f"{2 * rows} cells left out (column mean zeta, same length)" in second


def test_a_dry_run_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "get", lambda *_, **__: pytest.fail("it was asked for"))
    with fetch.only_what_is_here(), pytest.raises(check.InputError, match="not found"):
        fetch.ensure("cifar100", tmp_path)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["row=MNST"], "(did you mean MNIST or EMNIST?)"),
        (["row=CINIC-10"], "CINIC-10 at 4000 rounds"),
        (["column=elastik"], "column=elastik: must be one of naive, elastic, mean zeta, same length (did you mean"),
        (["aggregator.layer=module"], "unknown key aggregator.layer"),
        (["aggregator.layer=module"], "column naive; row= and column= choose others)"),
        (["scale=tiny"], "scale=tiny: must be one of full, short, smoke"),
        (["seed=-1"], "seed=-1: must be a whole number >= 0"),
        (["client.epochs=1,2"], "only row, column and seed take several values"),
        (["aggregator.taau=1"], "unknown key aggregator.taau"),
        (["table.colour=1"], "table.colour"),
        (["experiment=quickstart"], "one experiment at a time"),
    ],
)
def test_bad_input_is_one_line(fedsim: Command, typed: list[str], said: str) -> None:
    assert said in refused(fedsim("experiment=elastic/table3", *typed))


def test_keys_that_only_the_cells_have() -> None:
    """The experiment's own file chooses neither a dataset nor, with that, a schedule."""
    register_resolvers([])
    typed = ["experiment=elastic/table3", "row=CIFAR-10", "column=elastic", "seed=0"]
    (cell,) = table.cells("elastic/table3", [*typed, "dataset.augment=true", "schedule.factor=1.0"])
    assert (cell.config.dataset.augment, cell.config.schedule.factor) == (True, 1.0)


@pytest.mark.parametrize("name", TABLES)
def test_every_label_can_be_typed_alone_and_beside_others(name: str) -> None:
    for axis in ("row", "column"):
        labels = list(table.specification(name)[f"{axis}s"])
        for some in (labels, *([label] for label in labels)):
            (override,) = OverridesParser.create().parse_overrides([f"{axis}={','.join(some)}"])
            assert values(override) == some


def test_a_dry_run_of_an_ordinary_run_is_refused(fedsim: Command) -> None:
    assert "--dry-run lists the runs of a paper's table" in refused(fedsim("rounds=2", "--dry-run"))


def test_cfg_shows_the_table(fedsim: Command) -> None:
    result = fedsim("experiment=elastic/table3", "scale=short", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "paired:elastic,elastic/mean_zeta" in result.stdout


def test_seed_by_seed_and_a_control_after_its_partner() -> None:
    found = cells("elastic/table3", "seed=3,1")
    assert [c.seed for c in found] == sorted((c.seed for c in found), key=[3, 1].index)
    for seed in (1, 3):
        columns = [c.column for c in found if (c.seed, c.row) == (seed, "MNIST")]
        assert columns == ["naive", "elastic", "mean zeta", "same length"]


def test_two_labels_must_not_share_a_folder() -> None:
    with pytest.raises(check.InputError, match="share a folder"):
        cells("elastic/table3", '++table.rows={a b: ["dataset=mnist"], a-b: ["dataset=mnist"]}')


@pytest.mark.parametrize("name", SMALL)
def test_small_data_have_the_form_of_the_real(name: str) -> None:
    values = OmegaConf.to_container(OmegaConf.create({"seed": 0, "dataset": SMALL[name]}), resolve=True)
    assert isinstance(values, dict)
    kind = {k: v for k, v in values["dataset"].items() if k != "_target_"}
    data = getattr(small, values["dataset"]["_target_"].rpartition(".")[2])(**kind)
    assert int(data.train_y.max()) < data.num_classes
    assert data.input_shape == {1: (1, 28, 28), 3: (3, 32, 32), 80: (80,)}[data.input_shape[0]]
    assert data.train_client is not None
    if data.tokens:
        assert (data.train_x[:, 1:] == data.train_y[:, :-1]).all(), "every target is the next character"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (80, "80 s"), (120, "2.0 min"), (7200, "2.0 h"), (2e5, "2.3 days")]
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
