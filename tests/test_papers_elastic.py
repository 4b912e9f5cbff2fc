"""The elastic paper's numbers (fedsim/papers/elastic.csv) and the experiments that reproduce them.

The tables below are the project's reading of the paper as Markdown, copied by hand. The CSV is checked against them,
experiment files against the CSV, and every cell of every experiment is composed and held against the paper's settings.
Nothing is trained, and nothing but this repository is read.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from fedsim.cli import register_resolvers
from fedsim.overrides import CONF, PACKAGE

FOLDER = CONF / "experiment" / "elastic"
TABLES = (
    *("table1", "table2", "table3", "fig2_alpha", "fig2_participation", "fig2_epochs", "fig3", "supp_table1"),
    *("supp_fig1", "supp_fig2", "communication", "shakespeare", "lower_bound"),
)
UNITS = {
    **{"test accuracy": "%", "train accuracy": "%", "personal accuracy": "%", "boosted": "%", "compute": "%"},
    **{"traffic": "models", "improvement": "points"},
}
OURS = {"test accuracy", "train accuracy", "personal accuracy", "boosted", "traffic", "emd", "loss"}
"""Metrics that a run gives a number for; the paper's others (improvement, compute) are only quoted."""
FIGURES = {
    *("curves", "against", "boosted", "boosted_against", "norms", "integrated", "grid", "time", "loss", "emd"),
}
CONTROLS = {"mean zeta": "elastic/mean_zeta", "same length": "elastic/step"}


# The paper, as Markdown.

TABLE_1 = """
| tau | naive | 0.0 | 0.1 | 0.2 | 0.3 | 0.4 | 0.5 | 0.6 | 0.7 | 0.8 | 0.9 | 1.0 |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
| train | 58.36 | 57.21 | 58.33 | 58.76 | 60.66 | 60.47 | 61.44 | 60.66 | 60.55 | 61.01 | 59.27 | 58.96 |
| test | 60.74 | 58.30 | 59.76 | 61.17 | 61.91 | 63.39 | 62.74 | 63.39 | 63.23 | 63.22 | 60.83 | 61.37 |
| boosted | - | 0.0 | 11.45 | 27.24 | 43.75 | 59.74 | 74.43 | 84.57 | 89.93 | 93.53 | 96.26 | 97.38 |
"""
TABLE_2 = (
    "FedAvg 49.34/52.37, FedAvgM 62.52/64.48, FedProx 51.52/53.64, SCAFFOLD 72.10/75.42, "
    "AdaOpt 78.00/80.34, PFNM 71.23/73.64, Per-FedAvg 50.44/53.24, pFedMe 83.20/85.63"
)
IMPROVEMENT = "3.03 1.96 2.12 3.32 2.34 2.41 2.80 2.43"  # Table 2's last line, from the paper itself
TABLE_3 = """
| data | rounds | clients | sampled | batch | rate | model | naive | elastic |
|---|---|---|---|---|---|---|---|---|
| CIFAR-100 (Pachinko, balanced) | 4000 | 500 | 10 | 10 | 0.05 | ResNet-20 | 32.31 | 56.64 |
| MNIST (alpha 100, unbalanced) | 20 | 1000 | 100 | 100 | 0.1 | logistic regression | 70.14 | 73.64 |
| EMNIST (writers) | 1000 | 3400 | 10 | 100 | 0.1 | 2 conv + 2 linear | 88.71 | 89.82 |
| CIFAR-10 (alpha 100, unbalanced) | 4000 | 1000 | 10 | 10 | 0.05 | ResNet-20 | 66.84 | 68.74 |
| CINIC-10 (alpha 100, unbalanced) | 200 | 1000 | 100 | 10 | 0.05 | ResNet-20 | 35.81 | 36.29 |
| CINIC-10 (alpha 100, unbalanced) | 4000 | 1000 | 10 | 10 | 0.05 | ResNet-20 | 68.68 | 69.25 |
"""
SHAKESPEARE = "62.14 / 64.73"
SUPPLEMENT_TABLE_1 = "naive 55.39/61.22, elastic(average) 55.49/61.11, elastic(momentum) 58.74/61.45"
TRAFFIC = "FedAvg 2, FedAvgM 2, FedProx 2, SCAFFOLD 4, AdaOpt 2, PFNM 2, elastic 3"

Key = tuple[str, str, str, str]


def markdown(text: str) -> list[dict[str, str]]:
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    return [dict(zip(head, row, strict=True)) for row in body]


def pairs(text: str) -> dict[str, tuple[str, str]]:
    """`name a/b, name a/b`."""
    found = re.findall(r"([\w()-]+) ([\d.]+)/([\d.]+)", text)
    assert len(found) == text.count("/")
    return {name: (a, b) for name, a, b in found}


def rounds_label(row: dict[str, str]) -> str:
    name = row["data"].split(" ")[0]
    return f"{name} at {row['rounds']} rounds" if name == "CINIC-10" else name


def published() -> dict[Key, str]:
    """Every number of the Markdown above, and the two that the text gives, under the labels of the experiments."""
    found: dict[Key, str] = {}
    names = {"train": "train accuracy", "test": "test accuracy", "boosted": "boosted"}
    for row in markdown(TABLE_1):
        metric = names[row.pop("tau")]
        found |= {("table1", "CIFAR-10", column, metric): v for column, v in row.items() if v != "-"}
    for (name, (without, with_)), gain in zip(pairs(TABLE_2).items(), IMPROVEMENT.split(), strict=True):
        metric = "personal accuracy" if name in ("Per-FedAvg", "pFedMe") else "test accuracy"
        found[("table2", name, "without", metric)] = without
        found[("table2", name, "with", metric)] = with_
        found[("table2", name, "with", "improvement")] = gain
    for row in markdown(TABLE_3):
        found |= {("table3", rounds_label(row), c, "test accuracy"): row[c] for c in ("naive", "elastic")}
    for column, value in zip(("naive", "elastic"), SHAKESPEARE.split(" / "), strict=True):
        found[("shakespeare", "Shakespeare", column, "test accuracy")] = value
    for name, (train, test) in pairs(SUPPLEMENT_TABLE_1).items():
        column = name.removeprefix("elastic(").removesuffix(")")
        found[("supp_table1", "CIFAR-10", column, "train accuracy")] = train
        found[("supp_table1", "CIFAR-10", column, "test accuracy")] = test
    for method, models in (item.split(" ") for item in TRAFFIC.split(", ")):
        found[("communication", "per round", method, "traffic")] = models
    found[("table3", "CIFAR-100", "elastic", "improvement")] = "20"  # Sec. 5.1: "improved by over 20%"
    found[("communication", "per round", "elastic", "compute")] = "0.5"  # supplement Sec. 4: "only takes 0.5%"
    return found


# The CSV.


def stored() -> list[dict[str, str]]:
    with (PACKAGE / "papers" / "elastic.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def key(row: dict[str, str]) -> Key:
    return row["table"], row["row"], row["column"], row["metric"]


def test_every_published_number_is_there_and_no_other() -> None:
    assert {key(row): row["value"] for row in stored()} == published()


def test_every_line_is_whole() -> None:
    rows = stored()
    assert len({key(row) for row in rows}) == len(rows), "no key twice"
    for row in rows:
        assert list(row) == ["table", "row", "column", "metric", "value", "unit", "where", "assumed"]
        assert all(row[name] and row[name] == row[name].strip() for name in row if name != "assumed"), row
        assert row["unit"] == UNITS[row["metric"]], row
        assert float(row["value"]) >= 0, row
        assert row["unit"] != "%" or float(row["value"]) <= 100, row
        assert re.match(r"Table [123]|Sec\. 5\.1|Supplement (Table 1|Sec\. [45])", row["where"]), row


def test_the_papers_own_sums_agree() -> None:
    value = {key(row): float(row["value"]) for row in stored()}
    for (table, row, column, metric), gain in value.items():
        if metric == "improvement" and table == "table2":
            judged = "personal accuracy" if row in ("Per-FedAvg", "pFedMe") else "test accuracy"
            assert value[table, row, column, judged] - value[table, row, "without", judged] == pytest.approx(gain)
    naive, elastic = (value["table3", "CIFAR-100", c, "test accuracy"] for c in ("naive", "elastic"))
    assert elastic - naive > value["table3", "CIFAR-100", "elastic", "improvement"]


def test_the_paper_bears_out_its_own_claims() -> None:
    """Each claim of an experiment file about two columns holds for the published numbers, where there are some."""
    value = {key(row): float(row["value"]) for row in stored()}
    compared = 0
    for name in TABLES:
        table = read(name)["table"]
        for claim in table["claims"]:
            metric = claim.get("metric", table["metrics"][0])
            for row in [claim["row"]] if "row" in claim else table["rows"]:
                sides = [value.get((name, row, claim.get(s, ""), metric)) for s in ("better", "than", "column")]
                better, than, level = sides
                if better is not None and than is not None:
                    assert better - than > claim.get("by", 0), claim
                if level is not None:
                    assert abs(level - claim["about"]) <= claim["within"], claim
                compared += level is not None or (better is not None and than is not None)
    assert compared == 5 + 8 + 7 + 1 + 2 + 7, "table1, table2, table3, shakespeare, supp_table1, communication"


# The experiment files.


@cache
def read(name: str) -> dict[str, Any]:
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


def test_the_folder_has_these_experiments() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(TABLES)
    assert {row["table"] for row in stored()} <= set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_an_experiment_file_says_what_it_is(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = [line for line in lines[1:] if line.startswith("#")]
    assert lines[0] == "# @package _global_"
    assert head[0] == f"# fedsim experiment=elastic/{name}", "the command"
    assert "elastic paper" in " ".join(head)
    assert "Assumed" in " ".join(head)
    assert max(map(len, lines)) <= 120
    assert any("tolerance" in line and "# assumed" in line for line in lines), "the tolerance is ours"


@pytest.mark.parametrize("name", TABLES)
def test_an_experiment_file_has_the_shape_of_a_table(name: str) -> None:
    table = read(name)["table"]
    needed = {"paper", "table", "metrics", "seeds", "rows", "columns", "short", "claims", "tolerance", "figures"}
    assert needed <= set(table) <= needed | {"cells", "axis", "notes"}
    assert (table["paper"], table["table"]) == ("elastic", name)
    assert table["metrics"]
    assert set(table["metrics"]) <= OURS
    assert len(set(table["seeds"])) == len(table["seeds"]) > 0
    assert 0 < table["short"]["rounds"] <= 1
    assert table["tolerance"] > 0
    assert set(table["figures"]) <= FIGURES
    labels = [*table["rows"], *table["columns"]]
    assert all(isinstance(label, str) for label in labels), "a label that looks like a number is quoted"
    for row, columns in table.get("cells", {}).items():
        assert row in table["rows"]
        assert set(columns) <= set(table["columns"])
    for claim in table["claims"]:
        named = {claim.get("better"), claim.get("than"), claim.get("column")} - {None}
        assert named <= set(table["columns"]), claim
        assert claim.get("row", next(iter(table["rows"]))) in table["rows"], claim
        assert claim.get("metric", table["metrics"][0]) in table["metrics"], claim
    if "against" in table["figures"]:
        assert all(float(row) for row in table["rows"]), "row labels are numbers"


@pytest.mark.parametrize("name", TABLES)
def test_papers_and_experiments_have_the_same_cells(name: str) -> None:
    """Both ways: a published number has its cell, and a table with published numbers has them in every cell."""
    table = read(name)["table"]
    rows = [row for row in stored() if row["table"] == name]
    for row in rows:
        assert row["row"] in table["rows"], row
        assert row["column"] in table["columns"], row
        assert row["metric"] in table["metrics"] or row["metric"] not in OURS, row
    if rows:
        filled = {(row["row"], row["column"]) for row in rows}
        assert filled == {(r, c) for r in table["rows"] for c in table["columns"] if c not in CONTROLS}


@pytest.mark.parametrize("name", TABLES)
def test_where_naive_meets_elastic_there_are_the_controls(name: str) -> None:
    """naive with elastic's own mean zeta, or with the length of its steps, as its server rate, taken from a column
    before it; and the gain that they are about is elastic's over naive."""
    table = read(name)["table"]
    columns = list(table["columns"])
    if name in ("supp_fig1", "communication"):  # nothing naive; nothing trained to an accuracy
        assert not set(CONTROLS) & set(columns)
        return
    assert columns[-2:] == list(CONTROLS)
    for row, column, overrides in cells(name):
        found = [m for o in overrides for m in PAIRED.findall(o)]
        assert bool(found) == (column in CONTROLS), (row, column)
        for source, metric, _ in found:
            assert metric == CONTROLS[column]
            assert source in columns[:-2]
            assert {"aggregator=elastic", "aggregator.tau=0.5"} & set(cell(name, row, source)), "it has a zeta"
            first = next((c for c in table["claims"] if c.get("better") == source), None)
            assert name == "lower_bound" or (first and first["than"] in ("naive", "without"))


# Every cell, composed: once, since that is what takes time here. The control's rate is taken as if mean zeta were 1.

PAIRED = re.compile(r"\$\{paired:([^,}]+),([^,}]+)(?:,([^,}]+))?\}")


def cells(name: str) -> Iterator[tuple[str, str, list[str]]]:
    """(row, column, overrides), later ones win: row, column, exception."""
    table = read(name)["table"]
    for row, first in table["rows"].items():
        for column, second in table["columns"].items():
            yield row, column, [*first, *second, *table.get("cells", {}).get(row, {}).get(column, [])]


def cell(name: str, row: str, column: str) -> list[str]:
    return next(overrides for r, c, overrides in cells(name) if (r, c) == (row, column))


def composed(name: str, overrides: list[str]) -> dict[str, Any]:
    typed = [PAIRED.sub(lambda m: m[3] or "1.0", o) for o in overrides]
    register_resolvers([])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [f"experiment=elastic/{name}", *typed])
    with open_dict(config):
        config.pop("table")  # its ${paired:...} mean something only to who runs the table
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    return {str(k): v for k, v in resolved.items()}


def target(config: dict[str, Any], group: str) -> str:
    return str(config[group]["_target_"]).rpartition(".")[2]


def setting(config: dict[str, Any]) -> tuple[Any, ...]:
    """rounds, clients, sampled, batch, rate, model, E, dataset, partition."""
    return (
        config["rounds"],
        config["partition"]["num_clients"],
        config["participation"]["clients_per_round"],
        config["client"]["batch_size"],
        config["client_optimizer"]["lr"],
        target(config, "model"),
        config["client"]["epochs"],
        target(config, "dataset"),
        target(config, "partition"),
    )


SETTINGS = {  # Table 3; clients None: as many as the data have (Fed-EMNIST's 3400 writers)
    "CIFAR-100": (4000, 500, 10, 10, 0.05, "ResNet20", 1, "cifar100", "Pachinko"),
    "MNIST": (20, 1000, 100, 100, 0.1, "Mlp", 1, "mnist", "Dirichlet"),
    "EMNIST": (1000, None, 10, 100, 0.1, "CnnEmnist", 1, "femnist", "Natural"),
    "CIFAR-10": (4000, 1000, 10, 10, 0.05, "ResNet20", 1, "cifar10", "Dirichlet"),
    "CINIC-10 at 200 rounds": (200, 1000, 100, 10, 0.05, "ResNet20", 1, "cinic10", "Dirichlet"),
    "CINIC-10 at 4000 rounds": (4000, 1000, 10, 10, 0.05, "ResNet20", 1, "cinic10", "Dirichlet"),
}
MODELS = {"ResNet-20": "ResNet20", "logistic regression": "Mlp", "2 conv + 2 linear": "CnnEmnist"}


def test_the_settings_here_are_those_of_the_markdown() -> None:
    for row in markdown(TABLE_3):
        rounds, clients, sampled, batch, rate, model, *_ = SETTINGS[rounds_label(row)]
        assert (rounds, clients or 3400) == (int(row["rounds"]), int(row["clients"]))
        assert (sampled, batch, rate) == (int(row["sampled"]), int(row["batch"]), float(row["rate"]))
        assert model == MODELS[row["model"]]


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_composes_to_the_papers_setting(name: str) -> None:
    naive, plain = "", {}
    for row, column, overrides in cells(name):
        config, label = composed(name, overrides), f"{row}, {column}"
        assert config["partition"]["sensitivity_fraction"] == 0.1, "B_k is set aside for every method"
        if column in ("elastic", "with"):
            assert (config["aggregator"]["tau"], config["aggregator"]["mu"]) == (0.5, 0.95), label
        if row != naive:
            naive, plain = row, config
        if column in CONTROLS:
            assert config == plain, f"{label}: what differs from naive is the rate alone"
        if name not in ("table2", "communication"):
            assert config["server_optimizer"]["lr"] == 1.0, label
        CHECKS[name](row, column, config)


def check_table_3(row: str, column: str, config: dict[str, Any]) -> None:
    assert setting(config) == SETTINGS[row], row
    assert config["model"].get("hidden", []) == [], "logistic regression"
    partition = config["partition"]
    if target(config, "partition") == "Dirichlet":
        assert (partition["alpha"], partition["sigma"] > 0) == (100.0, True), "unbalanced"
    if target(config, "partition") == "Pachinko":
        assert (partition["alpha"], partition["beta"], partition["sigma"]) == (0.1, 10.0, 0.0), "balanced"
    assert (target(config, "schedule"), config["schedule"]["factor"]) == ("Cosine", 0.5)
    assert config["schedule"]["rounds"] == config["rounds"]
    assert target(config, "aggregator") == ("Elastic" if column == "elastic" else "FedAvg")
    assert target(config, "client") == target(config, "client_optimizer") == target(config, "server_optimizer") == "Sgd"


def check_cifar_10(config: dict[str, Any], alpha: float = 100.0, train: bool = False, **varied: int) -> None:
    """Table 3's CIFAR-10 but for what a table varies."""
    expected = list(SETTINGS["CIFAR-10"])
    for key, place in (("rounds", 0), ("sampled", 2), ("epochs", 6)):
        expected[place] = varied.get(key, expected[place])
    assert setting(config) == tuple(expected)
    assert config["partition"]["alpha"] == alpha
    assert config["eval"]["train"] == train, "on where train accuracy is published, and only there: it costs"


def check_table_1(row: str, column: str, config: dict[str, Any]) -> None:
    check_cifar_10(config, train=True)
    assert config["aggregator"].get("tau") == (None if column in ("naive", *CONTROLS) else float(column))


def check_ways(row: str, column: str, config: dict[str, Any], train: bool) -> None:
    """B_k fits into one batch of the client's size, where both ways are the same up to a factor that cancels."""
    check_cifar_10(config, train=train)
    if column in ("average", "momentum"):
        assert (config["aggregator"]["sensitivity"], config["aggregator"]["batch_size"]) == (column, 1)


METHODS = {  # client rule, aggregator without and with elastic, server optimizer, its rate
    "FedAvg": ("Sgd", "FedAvg", "Elastic", "Sgd", 1.0),
    "FedAvgM": ("Sgd", "FedAvg", "Elastic", "FedAvgM", 1.0),
    "FedProx": ("FedProx", "FedAvg", "Elastic", "Sgd", 1.0),
    "SCAFFOLD": ("Scaffold", "FedAvg", "Elastic", "Sgd", 1.0),
    "AdaOpt": ("Sgd", "FedAvg", "Elastic", "FedYogi", 0.01),
    "PFNM": ("Sgd", "Pfnm", "Pfnm", "Sgd", 1.0),
    "Per-FedAvg": ("PerFedAvg", "FedAvg", "Elastic", "Sgd", 1.0),
    "pFedMe": ("PFedMe", "FedAvg", "Elastic", "Sgd", 1.0),
}
STEPS = {"SCAFFOLD": (60_000, 5), "Per-FedAvg": (50_000, 10), "pFedMe": (60_000, 20)}
"""Samples in all, local steps that an epoch shall have."""


def check_table_2(row: str, column: str, config: dict[str, Any]) -> None:
    client, without, with_, server, rate = METHODS[row]
    assert target(config, "client") == client, row
    assert target(config, "aggregator") == (with_ if column == "with" else without), row
    assert (config["aggregator"].get("tau") == 0.5) == (column == "with"), row
    assert (target(config, "server_optimizer"), config["server_optimizer"]["lr"]) == (server, rate), row
    if row == "FedAvgM":
        assert (config["server_optimizer"]["form"], config["server_optimizer"]["momentum"]) == ("ema", 0.9)
    if row == "PFNM":
        assert (target(config, "model"), config["model"]["hidden"]) == ("Mlp", [100]), "PFNM matches MLPs"
    if row in ("FedAvg", "FedAvgM", "FedProx"):
        check_cifar_10(config, alpha=0.5)
    if row in STEPS:
        samples, steps = STEPS[row]
        share = samples // config["partition"]["num_clients"]
        for training in (share - share // 10, share - share // 10 + (target(config, "partition") == "Classes")):
            assert math.ceil(training / config["client"]["batch_size"]) == steps, "also for who has a sample more"


def check_communication(row: str, column: str, config: dict[str, Any]) -> None:
    client, aggregator, *_ = METHODS.get(column, ("Sgd", "Elastic"))
    assert (target(config, "client"), target(config, "aggregator")) == (client, aggregator)
    server = {"FedAvgM": "FedAvgM", "AdaOpt": "FedAdam"}.get(column, "Sgd")
    assert target(config, "server_optimizer") == server
    assert config["aggregator"].get("tau") == (0.5 if column == "elastic" else None), "PFNM without elastic"


def check_shakespeare(row: str, column: str, config: dict[str, Any]) -> None:
    assert (config["rounds"], config["client"]["epochs"], config["client"]["batch_size"]) == (2000, 1, 10)
    assert (target(config, "model"), target(config, "partition")) == ("LstmShakespeare", "Natural")


def check_lower_bound(row: str, column: str, config: dict[str, Any]) -> None:
    samples, m, G = (config["dataset"][key] for key in ("samples", "m", "G"))
    assert samples - max(1, round(samples / 10)) == int(row), "rows are local steps"
    assert (config["client"]["batch_size"], target(config, "schedule")) == (1, "Constant")
    assert 0 < config["client_optimizer"]["lr"] <= 1 / m, "the theorem's rates"
    bounds = {c["at_least"] for c in read("lower_bound")["table"]["claims"] if "at_least" in c}
    assert bounds == {G**2 / (m * config["rounds"] ** 2)}


CHECKS: dict[str, Callable[[str, str, dict[str, Any]], None]] = {
    "table1": check_table_1,
    "table2": check_table_2,
    "table3": check_table_3,
    "fig2_alpha": lambda row, column, config: check_cifar_10(config, alpha=float(row)),
    "fig2_participation": lambda row, column, config: check_cifar_10(config, rounds=200, sampled=10 * int(row)),
    "fig2_epochs": lambda row, column, config: check_cifar_10(config, epochs=int(row)),
    "fig3": check_table_3,
    "supp_table1": lambda row, column, config: check_ways(row, column, config, train=True),
    "supp_fig1": lambda row, column, config: check_ways(row, column, config, train=False),
    "supp_fig2": check_table_2,
    "communication": check_communication,
    "shakespeare": check_shakespeare,
    "lower_bound": check_lower_bound,
}


def test_no_file_names_a_machine() -> None:
    for path in (*FOLDER.glob("*.yaml"), PACKAGE / "papers" / "elastic.csv", Path(__file__)):
        found = re.findall(r"(?<![\w.])/(?:tmp|home|root|work|usr|mnt)\b", path.read_text(encoding="utf-8"))
        assert found == [], path
