"""What docs/datasets/ shows: each dataset as loaded, one federated run on it, and the papers' partitions.

    python scripts/datasets.py FOLDER     # runs what is missing in FOLDER, then writes docs/datasets/ from it

Datasets whose files are not at $FEDSIM_DATA are left out, and the page says so.
"""

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pandas as pd
import torch
import yaml
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from omegaconf import OmegaConf
from PIL import Image

from fedsim import build
from fedsim.check import InputError
from fedsim.cli import register_resolvers
from fedsim.overrides import CONF, run_name

DOCS = Path(__file__).resolve().parents[1] / "docs" / "datasets"
WIDTH = 1100  # pixels of a picture in the docs

RUNS = {
    "mnist5k": "",
    "mnist": "",
    "mnist_writers": "rounds=40",
    "fashion_mnist": "",
    "emnist": "rounds=100 schedule.rounds=100",
    "femnist": "rounds=100 schedule.rounds=100",
    "cifar10": "rounds=300 schedule.rounds=300 eval.every=25",
    "cifar100": "rounds=150 schedule.rounds=150 eval.every=25",
    "fed_cifar100": "rounds=50 schedule.rounds=50 eval.every=10",
    "cinic10": "rounds=100 schedule.rounds=100 eval.every=25",
    "shakespeare": "rounds=60 schedule.rounds=60 eval.every=10",
}
"""A dataset's own setting, at so many rounds as two cores play in some minutes."""

PARTITIONS = {
    "elastic_mnist": ("elastic, Table 3", "dataset=mnist"),
    "elastic_cifar10": ("elastic, Table 3", "dataset=cifar10"),
    "elastic_cifar10_skewed": ("elastic, Fig. 2, most skewed", "dataset=cifar10 partition.alpha=0.5"),
    "elastic_cifar100": ("elastic, Table 3: Pachinko", "dataset=cifar100"),
    "elastic_femnist": ("elastic, Table 3: writers", "dataset=femnist"),
    "elastic_shakespeare": ("elastic, Sec. 5: roles", "dataset=shakespeare"),
    "fednnnn_balanced": (
        "FedNNNN, non-IID, balanced",
        "dataset=mnist partition=classes partition.num_clients=100 participation.clients_per_round=1.0",
    ),
    "fednnnn_unbalanced": (
        "FedNNNN, non-IID, unbalanced",
        "dataset=mnist partition=classes partition.num_clients=100 partition.power=1 "
        "participation.clients_per_round=1.0",
    ),
    "felbab_full": ("Felbab et al., full-non-iid", "dataset=fashion_mnist"),
    "felbab_99": ("Felbab et al., 99 % non-iid", "dataset=fashion_mnist partition.non_iid=0.99"),
    "mcmahan_shards": (
        "McMahan et al., 2 shards a client",
        "dataset=mnist partition=shards partition.num_clients=100 participation.clients_per_round=10",
    ),
    "mnist_writers": ("MNIST by writer", "dataset=mnist_writers"),
}


def main(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    loaded = {name: counts(name) for name in RUNS}
    here = [name for name, found in loaded.items() if found is not None]
    rows = ["| dataset | train | test | classes | clients | sample | fingerprint |", "|---|---|---|---|---|---|---|"]
    rows += [f"| `{name}` | {' | '.join(loaded[name] or ())} |" for name in here]
    absent = ", ".join(f"`{name}`" for name in RUNS if name not in here) or "none"
    runs = {name: play(work, f"dataset={name} {RUNS[name]}".strip()) for name in here}
    DOCS.mkdir(exist_ok=True)
    curves(runs)
    text = ["# Datasets as loaded, and a run on each", ""]
    text += ["Written by `python scripts/datasets.py FOLDER`. What each dataset is and where it comes from:"]
    text += ["[docs/DATA.md](../DATA.md).", "", *rows, "", f"Not to be had on this machine: {absent}."]
    text += ["", "## Accuracy", "", "![accuracy over rounds](curves.png)", ""]
    text += ["| command | rounds | last | best |", "|---|---|---|---|"]
    for folder in runs.values():
        s = json.loads((folder / "summary.json").read_text())
        accuracy = [f"{100 * s[f'test_accuracy_{which}']:.2f} %" for which in ("last", "best")]
        cells = [f"`fedsim {' '.join(s['overrides'])}`", str(s["rounds"]), *accuracy]
        text += [f"| {' | '.join(cells)} |"]
    text += [
        "",
        "Elastic aggregation (the default), one seed; rounds shortened to what two cores play in some minutes,",
    ]
    text += [f"nothing else changed. {date.today()}, torch {torch.__version__}, {os.cpu_count()} cores.", ""]
    text += ["## Partitions of the papers' settings", ""]
    for name, (title, overrides) in PARTITIONS.items():
        if overrides.split()[0].removeprefix("dataset=") not in here:
            continue
        folder = play(work, f"{overrides} partition.preview=true")
        with Image.open(folder / "partition.png") as picture:
            small = picture.convert("RGB").resize((WIDTH, round(WIDTH * picture.height / picture.width)))
            small.save(DOCS / f"{name}.png", optimize=True)
        text += [f"**{title}**: `fedsim {overrides} partition.preview=true`", "", f"![{title}]({name}.png)", ""]
    (DOCS / "README.md").write_text("\n".join(text).rstrip() + "\n")


def counts(name: str) -> tuple[str, ...] | None:
    """train, test, classes, clients and shape, as the loader gives them; None where the files are not here."""
    register_resolvers([])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", [f"dataset={name}"]), resolve=True)
    assert isinstance(config, dict)
    try:
        data = build.group(config, "dataset")
    except InputError as error:
        print(f"left out: {error}", file=sys.stderr)
        return None
    clients = len({*data.train_client.tolist()}) if data.train_client is not None else 0
    own = f"{clients:,} of its own" if clients else f"{config['partition']['num_clients']:,} (set)"
    shape = " x ".join(map(str, data.input_shape))
    sizes = [f"{n:,}" for n in (len(data.train_y), len(data.test_y), data.num_classes)]
    return (*sizes, own, shape, f"`{data.identity()}`")


def play(work: Path, overrides: str) -> Path:
    """Run a command (or find it finished), and give its folder."""
    subprocess.run([sys.executable, "-m", "fedsim", *overrides.split()], cwd=work, check=True)
    return work / "outputs" / run_name(overrides.split())


def curves(runs: dict[str, Path]) -> None:
    figure = Figure(figsize=(11, 2.4 * -(-len(runs) // 3)), layout="constrained")
    for place, (name, folder) in enumerate(runs.items(), start=1):
        axes = figure.add_subplot(-(-len(runs) // 3), 3, place)
        shown = pd.read_csv(folder / "metrics.csv")[["round", "test/accuracy"]].dropna()
        axes.plot(shown["round"], shown["test/accuracy"], marker="." if len(shown) < 20 else "")
        law = yaml.safe_load((folder / "config.yaml").read_text())["partition"]["_target_"].rpartition(".")[2]
        axes.set_title(f"{name} ({law})", fontsize=10)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(alpha=0.3)
    figure.supxlabel("round")
    figure.savefig(DOCS / "curves.png", dpi=90)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
