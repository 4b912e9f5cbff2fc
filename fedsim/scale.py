"""How much of a paper's table is run: `scale=full`, `short` (fewer rounds) or `smoke` (two rounds on small made-up
data). The method stays what it is."""

from collections.abc import Mapping, Set
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedsim import check
from fedsim.dataset.small import CLIENTS

SCALES = ("full", "short", "smoke")
A_ROUND = 2
"""Clients that take part at scale=smoke."""


def pictures(num_classes: int, groups: int = 1, colour: bool = False) -> dict[str, Any]:
    """Grey ones of 28 x 28 or, fewer since their networks take longer, colour ones of 32 x 32."""
    kind = {"shape": [3, 32, 32] if colour else [1, 28, 28], "num_classes": num_classes, "groups": groups}
    return {"_target_": "fedsim.dataset.small.pictures", **kind, "train": 100 if colour else 400, "seed": "${seed}"}


SMALL = {
    "mnist5k": pictures(10),
    "mnist": pictures(10),
    "mnist_writers": pictures(10),
    "fashion_mnist": pictures(10),
    "emnist": pictures(62),
    "femnist": pictures(62),
    "cifar10": pictures(10, colour=True),
    "cinic10": pictures(10, colour=True),
    "cifar100": pictures(100, groups=20, colour=True),
    "fed_cifar100": pictures(100, groups=20, colour=True),
    "shakespeare": {
        **{"_target_": "fedsim.dataset.small.text", "length": 80, "num_classes": 82},
        **{"train": 200, "seed": "${seed}"},
    },
}
"""What stands for each dataset at scale=smoke; one that is not here is small itself, and kept."""


def rescale(
    config: DictConfig, choices: Mapping[str, str], scale: str, short: Mapping[str, float], typed: Set[str]
) -> None:
    """Shrink a composed config in place; what was typed stays as it was typed."""
    changes: dict[str, Any] = {}
    if scale == "short":
        share = short.get("rounds")
        check.number("table.short.rounds", share, gt=0, le=1)
        assert share is not None
        changes["rounds"] = max(2, round(share * config.rounds))
    if scale == "smoke":
        clients, a_round = config.partition.num_clients, config.participation.clients_per_round
        changes |= {"rounds": 2, "dataset": SMALL.get(choices["dataset"], config.dataset)}
        changes["partition.num_clients"] = None if clients is None else min(clients, CLIENTS)
        if isinstance(a_round, float):
            a_round = max(1, round(a_round * (clients or CLIENTS)))
        changes["participation.clients_per_round"] = min(a_round, A_ROUND)
        # Worker processes and compilers would take longer to start than the table to run.
        changes["engine"] = {"_target_": "fedsim.engine.sequential.Sequential", "threads": 1, "compile": False}
    if "rounds" in changes:
        rounds = config.rounds if "rounds" in typed else changes["rounds"]
        changes["eval.every"] = rounds if scale == "smoke" else min(config.eval.every, max(1, rounds // 10))
    for key, value in changes.items():
        if not any(name == key or name.startswith(f"{key}.") for name in typed):
            OmegaConf.update(config, key, value, merge=False)
