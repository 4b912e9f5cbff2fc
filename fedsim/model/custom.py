"""Anyone's nn.Module, by import path."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedsim import check
from fedsim.importing import blaming, imported


def custom(load: str, arguments: Mapping[str, Any] | None, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """What the class or function `load` makes of `arguments`; it is also given input_shape and num_classes, where it
    has parameters of these names (num_classes too where it takes any keyword, as torchvision's models do)."""
    if arguments is not None:
        check.mapping("arguments", arguments)
    make, where = imported(load), f"model=custom: {load}"
    with blaming(where):
        module = make(**{**takes(make, input_shape, num_classes), **(arguments or {})})
    if not isinstance(module, nn.Module):
        raise check.BadValue("load", load, f"must make an nn.Module, not {type(module).__name__}")
    return module


def takes(make: Any, input_shape: tuple[int, ...], num_classes: int) -> dict[str, Any]:
    """Which of the two it has a place for."""
    if getattr(make, "__init__", None) is nn.Module.__init__:
        return {}  # a class without a constructor of its own, whose signature takes anything and whose code nothing
    parameters = inspect.signature(make).parameters
    any_keyword = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    given = {"input_shape": input_shape, "num_classes": num_classes}
    return {k: v for k, v in given.items() if k in parameters or (any_keyword and k == "num_classes")}
