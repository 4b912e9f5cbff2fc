"""Checkpoints: the run's state in plain tensors and numbers. Written atomically, read without unpickling code."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsim import check
from fedsim.runner import Broadcast, RunState
from fedsim.types import Model


def save(path: Path, state: RunState, elapsed_s: float) -> None:
    """A crash leaves the old checkpoint or the new one, never half of one."""
    content = {
        "round": state.round,
        "params": state.model.params,
        "buffers": state.model.buffers,
        "aggregator": state.aggregator,
        "server": state.server,
        "rule": state.rule,
        "clients": state.clients,
        "norm_integrated": state.norm_integrated,
        "clock": state.clock,
        "underway": {v: (b.model.params, b.model.buffers, b.shared) for v, b in state.underway.items()},
        "elapsed_s": elapsed_s,
    }
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        torch.save(plain(content), stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def plain(node: Any) -> Any:
    """Dicts of tensors, however an engine had them laid out."""
    if isinstance(node, Mapping):
        return {key: plain(value) for key, value in node.items()}
    if isinstance(node, tuple | list):
        return type(node)(map(plain, node))
    if not isinstance(node, Tensor):
        return node
    # Of a view torch would write all that it is a view of.
    alone = node.is_contiguous() and node.untyped_storage().nbytes() == node.nbytes
    return node if alone else node.clone(memory_format=torch.contiguous_format)


def load(path: Path, device: torch.device) -> tuple[RunState, float]:
    """(state, seconds spent so far)."""
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        state = RunState(
            round=content["round"],
            model=Model(content["params"], content["buffers"]),
            aggregator=content["aggregator"],
            server=content["server"],
            rule=content["rule"],
            clients=content["clients"],
            norm_integrated=content["norm_integrated"],
            clock=content["clock"],
            underway={v: Broadcast(Model(p, b), shared) for v, (p, b, shared) in content["underway"].items()},
        )
        return state, content["elapsed_s"]
    except (RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise check.InputError(
            f"{path} is damaged ({type(error).__name__}); overwrite=true starts the run again"
        ) from error
