"""Anyone's nn.Module, by import path."""

import inspect
from collections.abc import Mapping
from typing import Any

from hydra.utils import get_object
from torch import nn

from fedsim import check


def custom(load: str, arguments: Mapping[str, Any], input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """What the class or function `load` makes of `arguments`; it is also given input_shape and num_classes, where it
    has parameters of these names (num_classes too where it takes any keyword, as torchvision's models do)."""
    check.text("load", load)
    check.mapping("arguments", arguments)
    try:
        make = get_object(load)
        parameters = inspect.signature(make).parameters
    except (ImportError, ValueError, TypeError) as error:
        raise check.BadValue("load", load, f"cannot be imported ({' '.join(str(error).split())})") from error
    given = {"input_shape": input_shape, "num_classes": num_classes}
    taken = {name: value for name, value in given.items() if name in parameters}
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        taken["num_classes"] = num_classes
    try:
        module = make(**{**taken, **arguments})
    except Exception as error:  # someone else's code: whatever it raises is told in one line
        raise check.BadValue(
            "load", load, f"failed with {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(module, nn.Module):
        raise check.BadValue("load", load, f"must make an nn.Module, not {type(module).__name__}")
    return module
