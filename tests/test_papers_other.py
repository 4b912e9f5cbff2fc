"""The FedNNNN paper, Felbab et al. and the slides: their numbers in fedsim/papers, their tables in conf/experiment."""

import csv
import re
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

import fedsim
from fedsim.overrides import CONF

PAPERS = Path(fedsim.__file__).parent / "papers"
EXPERIMENTS = (
    *("fednnnn/table2_mnist", "fednnnn/table2_cifar10", "fednnnn/fig3", "fednnnn/fig4"),
    *(f"felbab/fig{n}" for n in range(1, 6)),
    *("slides/shared_data", "slides/loadaboost", "slides/fedasync"),
)

# Word for word from the project's reading of the papers, PAPERS.md, of which tests know nothing.
TABLE_2 = """
| | IID-B | nonIID-B | IID-UB | nonIID-UB |
|---|---|---|---|---|
| FedAvg | 99.0 / 81.3 | 98.2 / 72.6 | 99.1 / 83.5 | 93.5 / 56.6 |
| FedProx | 99.0 / 81.4 | 98.1 / 74.2 | 99.1 / 83.2 | 87.9 / 55.6 |
| Norm-Norm | 99.1 / 81.2 | 99.0 / 76.7 | 99.2 / 83.3 | 97.1 / 55.5 |
| Momentum | 99.1 / 83.1 | 99.2 / 74.3 | 99.1 / 84.2 | 96.9 / 62.0 |
| FedNNNN | 99.2 / 84.7 | 99.1 / 76.7 | 99.2 / 84.0 | 98.9 / 61.9 |
"""
TABLE_5 = """FedProx mu .005/.015, .015/.015, .005/.005, .02/.01;
Norm-Norm beta 1.1/.6, 1.0/.6, 1.0/.7, .9/.7; Momentum gamma .8/.9, .9/.9, .7/.9, .8/.8;
FedNNNN beta .6/.7, .7/.6, .7/.8, .7/.7; FedNNNN gamma .7/.8, .8/.7, .7/.8, .8/.6."""
FINDINGS = """
GD reaches about 75 % on full-non-iid in 30 rounds; Nesterov better and faster on both, higher beta better;
AdaGrad best on 99 % but at most 25 % on full-non-iid; RMSProp and Adam good on 99 %, at best about 50 % on full-non-iid
"""

CONDITIONS = ("IID-B", "nonIID-B", "IID-UB", "nonIID-UB")
HALVES = ("table2_mnist", "table2_cifar10")
PAIRED = 1.25  # stands for what another run would give
FIGURES = {"curves", "against", "norms", "integrated", "grid", "time", "work", "loss", "emd"}
KEYS = {"paper", "table", "metrics", "seeds", "rows", "columns", "cells", "short", "claims", "tolerance", "figures"}


def published(paper: str) -> list[dict[str, str]]:
    with (PAPERS / f"{paper}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def composed(groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    """The files that these choices bring together, and the table in them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", list(groups))
    with open_dict(config):
        return config, cast(dict[str, Any], OmegaConf.to_container(config.pop("table")))


def settings_of(overrides: list[str]) -> dict[str, Any]:
    """As Hydra has it: choices of groups first, then single values. A hundred cells share a few sets of choices, and
    composing is what takes time."""
    values = [o for o in OverridesParser.create().parse_overrides(overrides) if not (CONF / o.key_or_group).is_dir()]
    config = deepcopy(composed(tuple(o for o in overrides if o not in {v.input_line for v in values}))[0])
    for value in values:
        OmegaConf.update(config, value.key_or_group, value.value())
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))


def table_of(experiment: str) -> dict[str, Any]:
    return composed((f"experiment={experiment}",))[1]


@cache
def cells_of(experiment: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The settings of every row x column."""
    table, found = table_of(experiment), {}
    for row, column in product(table["rows"], table["columns"]):
        own = table.get("cells", {}).get(row, {}).get(column, [])
        overrides = [f"experiment={experiment}", *table["rows"][row], *table["columns"][column], *own]
        found[row, column] = settings_of([re.sub(r"\$\{paired:.*\}", str(PAIRED), o) for o in overrides])
    return found


def at(settings: dict[str, Any], key: str) -> Any:
    """`partition.power`; of an object its class's name."""
    value: Any = settings
    for part in key.split("."):
        value = value[part]
    return value["_target_"].rpartition(".")[2] if isinstance(value, dict) else value


def check(settings: dict[str, Any], expected: dict[str, Any], cell: object) -> None:
    assert {key: at(settings, key) for key in expected} == expected, cell


def table_5(half: int) -> dict[tuple[str, str], dict[str, float]]:
    """(condition, method) -> hyper-parameters."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for entry in TABLE_5.rstrip(".").replace("\n", " ").split(";"):
        method, symbol, values = entry.split(maxsplit=2)
        for condition, pair in zip(CONDITIONS, values.split(","), strict=True):
            found.setdefault((condition, method), {})[symbol] = float(pair.split("/")[half])
    return found


# The papers' numbers


@pytest.mark.parametrize("paper", ["fednnnn", "felbab", "slides"])
def test_every_number_is_there_once_and_says_where_it_stands(paper: str) -> None:
    rows = published(paper)
    keys = [(r["table"], r["row"], r["column"], r["metric"]) for r in rows]
    assert len(set(keys)) == len(keys)
    for r in rows:
        assert list(r) == ["table", "row", "column", "metric", "value", "unit", "where", "assumed"]
        assert r["unit"] in ("%", "points")
        assert 0 < float(r["value"]) <= 100
        assert r["where"]
        table = table_of(f"{paper}/{r['table']}")
        assert r["row"] in table["rows"], r
        assert r["column"] in table["columns"], r


@pytest.mark.parametrize(("half", "table"), list(enumerate(HALVES)))
def test_fednnnns_table_2(half: int, table: str) -> None:
    header, _, *lines = (
        [c.strip() for c in line.strip("|").split("|")] for line in TABLE_2.replace("| |", "|-|").strip().splitlines()
    )
    read = {
        (row, line[0]): float(v.split("/")[half]) for line in lines for row, v in zip(header[1:], line[1:], strict=True)
    }
    accuracy = [r for r in published("fednnnn") if r["table"] == table and r["metric"] == "test accuracy"]
    assert {(r["row"], r["column"]): float(r["value"]) for r in accuracy} == read
    experiment = table_of(f"fednnnn/{table}")
    ours = {c for c in experiment["columns"] if c.endswith(" as a rate")}
    assert {(row, c) for row in experiment["rows"] for c in experiment["columns"] if c not in ours} == set(read)
    for claim in (c for c in experiment["claims"] if "metric" not in c):
        for row in [claim["row"]] if "row" in claim else experiment["rows"]:
            assert read[row, claim["better"]] > read[row, claim["than"]], (
                "a claim that the paper's own table contradicts"
            )


def test_felbabs_numbers() -> None:
    gd, adagrad, others = (float(n) for n in re.findall(r"(\d+) % on full-non-iid", FINDINGS))
    rows = published("felbab")
    assert {r["row"] for r in rows} == {"full-non-iid"}, "of 99 % the text gives no number"
    (claim,) = (c for c in table_of("felbab/fig1")["claims"] if "about" in c)
    (number,) = (r for r in rows if r["table"] == "fig1")
    assert (number["metric"], number["column"], float(number["value"])) == ("test accuracy", claim["column"], gd)
    assert (claim["row"], claim["about"]) == ("full-non-iid", gd)
    for figure, bound in (("fig3", adagrad), ("fig4", others), ("fig5", others)):
        bounds = {r["column"]: float(r["value"]) for r in rows if r["table"] == figure}
        table = table_of(f"felbab/{figure}")
        assert bounds == dict.fromkeys((c for c in table["columns"] if c.startswith("eta ")), bound)
        (claim,) = (c for c in table["claims"] if "best_of" in c)
        assert claim["best_of"] == list(bounds), "whichever rate is best"
        assert claim["row"] == "full-non-iid"
        assert claim["at_most" if figure == "fig3" else "about"] == bound
    assert not any(r["table"] == "fig2" for r in rows)


# The experiment files


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_what_an_experiment_file_says_of_itself(experiment: str) -> None:
    first, command, *_ = (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()
    assert (first, command) == ("# @package _global_", f"# fedsim experiment={experiment}")
    table = table_of(experiment)
    paper, _, name = experiment.partition("/")
    assert (table["paper"], table["table"]) == (paper, name)
    assert KEYS - {"cells"} <= table.keys() <= KEYS | {"axis", "notes"}
    assert len(set(table["seeds"])) == len(table["seeds"]) >= 2, "paired by seed"
    assert 0 < table["short"]["rounds"] < 1
    assert table["tolerance"] > 0
    assert set(table["figures"]) <= FIGURES
    assert set(table["metrics"]) <= {"test accuracy", "emd", "loss"}
    rows, columns = list(table["rows"]), list(table["columns"])
    assert all(isinstance(label, str) for label in (*rows, *columns)), "0.1 unquoted is a number"
    for claim in table["claims"]:
        named = [claim[k] for k in ("better", "larger", "than", "column") if k in claim] + claim.get("best_of", [])
        assert set(named) <= set(columns), claim
        assert {claim.get("row", rows[0]), claim.get("than_row", rows[0])} <= set(rows), claim
    for row, exceptions in table.get("cells", {}).items():
        assert row in rows
        assert set(exceptions) <= set(columns)
    for place, column in enumerate(columns):
        for override in table["columns"][column]:
            for name in re.findall(r"\$\{paired:(.*?),", override):
                assert name in columns[:place], "a pair's first half runs first"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_cell_composes_and_differs_from_its_neighbours(experiment: str) -> None:
    cells = cells_of(experiment)
    for (row, column), settings in cells.items():
        assert at(settings, "partition.sensitivity_fraction") == 0, "no method of these papers sets B_k aside"
        assert not at(settings, "aggregator").startswith("Elastic"), "the default, which every cell must replace"
        same = [c for (r, c), other in cells.items() if r == row and other == settings]
        assert same == [column], "two columns that would be the same run"


FEDNNNN = {  # Table 1
    "partition.num_clients": 100,
    "participation.clients_per_round": 1.0,
    "client.batch_size": 50,
    "client.epochs": 5,
    "client_optimizer": "Sgd",
    "client_optimizer.lr": 0.05,
    "client_optimizer.momentum": 0.0,
    "schedule": "Constant",
    "dataset.standardize": True,
    "dataset.augment": False,
    "aggregator.weighting": "uniform",
    "server_optimizer": "Sgd",
    "server_optimizer.lr": 1.0,
}
FEDNNNN_DATA = {
    "table2_mnist": {"dataset": "mnist", "model": "CnnMnist", "rounds": 100, "client_optimizer.weight_decay": 0.0},
    "table2_cifar10": {"dataset": "cifar10", "model": "CnnCifar", "rounds": 250, "client_optimizer.weight_decay": 5e-4},
}
FEDNNNN_ROWS: dict[str, dict[str, Any]] = {
    "IID-B": {"partition": "Iid", "partition.power": 0.0},
    "nonIID-B": {"partition": "Classes", "partition.power": 0.0, "partition.classes_per_client": 2},
    "IID-UB": {"partition": "Iid", "partition.power": 1.0},
    "nonIID-UB": {"partition": "Classes", "partition.power": 1.0, "partition.classes_per_client": 2},
}
FEDNNNN_COLUMNS: dict[str, dict[str, Any]] = {
    "FedAvg": {"aggregator": "FedAvg", "client": "Sgd"},
    "FedProx": {"aggregator": "FedAvg", "client": "FedProx"},
    "Norm-Norm": {"aggregator": "NormNorm", "client": "Sgd"},
    "Momentum": {"aggregator": "Momentum", "client": "Sgd"},
    "FedNNNN": {"aggregator": "FedNNNN", "client": "Sgd"},
    "Norm-Norm as a rate": {"aggregator": "FedAvg", "client": "Sgd", "server_optimizer.lr": PAIRED},
    "FedNNNN as a rate": {"aggregator": "Momentum", "client": "Sgd", "server_optimizer.lr": PAIRED},
}


@pytest.mark.parametrize(("half", "table"), list(enumerate(HALVES)))
def test_fednnnns_settings_are_tables_1_and_5(half: int, table: str) -> None:
    tuned = table_5(half)
    for (row, column), settings in cells_of(f"fednnnn/{table}").items():
        check(settings, FEDNNNN | FEDNNNN_DATA[table] | FEDNNNN_ROWS[row] | FEDNNNN_COLUMNS[column], (row, column))
        assert at(settings, "aggregator.evaluate") == "averaged", "Sec. 4.1, and the same for every method"
        own = tuned.get((row, column), {})
        if column == "FedNNNN as a rate":
            own = {"gamma": tuned[row, "FedNNNN"]["gamma"]}
        check(settings, {("client." if k == "mu" else "aggregator.") + k: v for k, v in own.items()}, (row, column))
    pairs = {c: o for c, own in table_of(f"fednnnn/{table}")["columns"].items() for o in own if "paired" in o}
    assert pairs == {
        f"{c} as a rate": f"server_optimizer.lr=${{paired:{c},norm_norm/rate}}" for c in ("Norm-Norm", "FedNNNN")
    }


def test_table_5_by_hand() -> None:
    """The parser above, against some of the paper's own table."""
    mnist, cifar10 = table_5(0), table_5(1)
    assert len(mnist) == len(cifar10) == 16
    assert mnist["nonIID-UB", "FedProx"] == {"mu": 0.02}
    assert cifar10["nonIID-UB", "FedProx"] == {"mu": 0.01}
    assert mnist["IID-B", "Norm-Norm"] == {"beta": 1.1}
    assert cifar10["IID-B", "Norm-Norm"] == {"beta": 0.6}
    assert mnist["IID-UB", "Momentum"] == {"gamma": 0.7}
    assert mnist["nonIID-B", "FedNNNN"] == {"beta": 0.7, "gamma": 0.8}
    assert cifar10["nonIID-UB", "FedNNNN"] == {"beta": 0.7, "gamma": 0.6}


@pytest.mark.parametrize("figure", ["fig3", "fig4"])
def test_fednnnns_norms_are_of_fedavg_on_mnist(figure: str) -> None:
    cells = cells_of(f"fednnnn/{figure}")
    assert [column for _, column in cells] == ["single client", "IID", "non-IID"]
    for (row, column), settings in cells.items():
        clients = {"partition.num_clients": 1 if column == "single client" else 100}
        law = {"partition": "Classes" if column == "non-IID" else "Iid", "partition.power": 0.0, "aggregator": "FedAvg"}
        check(settings, FEDNNNN | FEDNNNN_DATA["table2_mnist"] | clients | law, (row, column))
    assert cells == cells_of("fednnnn/fig3"), "two figures of the same runs"


FELBAB = {
    "dataset": "fashion_mnist",
    "model": "Mlp",
    "model.hidden": [128],
    "partition": "OneClass",
    "partition.num_clients": 10,
    "partition.sigma": 0.0,
    "partition.power": 0.0,
    "participation.clients_per_round": 1.0,
    "client": "Sgd",
    "client.epochs": 1,
    "client.batch_size": 32,
    "client_optimizer.persist_state": True,
    "client_optimizer.weight_decay": 0.0,
    "aggregator": "FedAvg",
    "server_optimizer.lr": 1.0,
    "rounds": 30,
}
GD = {"client_optimizer": "Sgd", "client_optimizer.nesterov": False, "client_optimizer.momentum": 0.0}
NESTEROV = {"client_optimizer": "Sgd", "client_optimizer.nesterov": True}
KERAS = {
    "fig1": GD,
    "fig2": NESTEROV,
    "fig3": {
        "client_optimizer": "Adagrad",
        "client_optimizer.initial_accumulator": 0.1,
        "client_optimizer.eps": 1e-7,
    },
    "fig4": {"client_optimizer": "RMSprop", "client_optimizer.rho": 0.9, "client_optimizer.eps": 1e-7},
    "fig5": {
        "client_optimizer": "Adam",
        "client_optimizer.beta1": 0.9,
        "client_optimizer.beta2": 0.999,
        "client_optimizer.eps": 1e-7,
    },
}
RATE = re.compile(r"(?:beta (?P<beta>\S+) )?eta (?P<eta>\S+)(?P<decay> decayed)?")


@pytest.mark.parametrize("figure", KERAS)
def test_felbabs_settings(figure: str) -> None:
    cells = cells_of(f"felbab/{figure}")
    assert {row for row, _ in cells} == {"full-non-iid", "99% non-iid"}
    grid = set()
    for (row, column), settings in cells.items():
        expected: dict[str, Any] = FELBAB | {"partition.non_iid": {"full-non-iid": 1.0, "99% non-iid": 0.99}[row]}
        named = RATE.fullmatch(column)
        if named:
            expected |= KERAS[figure] | {"client_optimizer.lr": float(named["eta"])}
            expected |= {"schedule": "TimeDecay" if named["decay"] else "Constant"}
            expected |= {"schedule.phi": None, "schedule.rounds": 30} if named["decay"] else {}
            expected |= {"client_optimizer.momentum": float(named["beta"])} if named["beta"] else {}
            grid.add((named["beta"], named["eta"], named["decay"]))
        else:
            momentum = {"GD": GD, "Nesterov": NESTEROV | {"client_optimizer.momentum": 0.9}}[column]
            expected |= momentum | {"client_optimizer.lr": 0.001, "schedule": "Constant"}
        check(settings, expected, (row, column))
    betas = ("0.5", "0.9", "0.99") if figure == "fig2" else (None,)
    etas = ("0.1", "0.01", "0.001", "0.0001")
    assert grid == {(b, e, d) for b in betas for e in etas for d in (None, " decayed")}
    assert ("GD" in table_of(f"felbab/{figure}")["columns"]) == (figure != "fig1")


def test_shared_data_sweeps_beta_and_alpha() -> None:
    for (row, column), settings in cells_of("slides/shared_data").items():
        expected: dict[str, Any] = {"aggregator": "FedAvg", "partition": "OneClass", "shared_data": "SharedData"}
        if column == "FedAvg":
            expected |= {"shared_data.beta": 0.0, "shared_data.warmup_epochs": 0}
        else:
            expected |= {"shared_data.beta": float(row), "shared_data.alpha": float(column.removeprefix("alpha "))}
            expected |= {"shared_data.warmup_epochs": 5}
        check(settings, expected, (row, column))


def test_loadaboost_has_fedavgs_epochs() -> None:
    for (row, column), settings in cells_of("slides/loadaboost").items():
        rule = {"FedAvg": "Sgd", "LoAdaBoost": "LoAdaBoost"}[column]
        law = {"IID": "Iid", "non-IID": "Classes"}[row]
        check(settings, {"client": rule, "client.epochs": 10, "partition": law, "aggregator": "FedAvg"}, (row, column))


def test_fedasync_has_fedavgs_work_and_fedavgs_slow_clients() -> None:
    """A round of FedAsync is one client's update."""
    for (_, column), settings in cells_of("slides/fedasync").items():
        expected: dict[str, Any] = {"participation.speed_sigma": 0.5, "participation.clients_per_round": 10}
        if column == "FedAvg":
            expected |= {"aggregator": "FedAvg", "participation": "Uniform", "client": "Sgd", "rounds": 100}
        else:
            expected |= {"aggregator": "FedAsync", "participation": "Asynchronous", "client": "FedProx", "rounds": 1000}
            expected |= {"aggregator.staleness": column}
        check(settings, expected, column)
