"""Code of the user's own, by import path: whatever it raises is told in one line."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedsim import check


def imported(load: str) -> Callable[..., Any]:
    """The function or class MODULE.NAME."""
    check.text("load", load)
    module, _, name = load.rpartition(".")
    if not all(load.split(".")) or not module:
        raise check.BadValue("load", load, "must be MODULE.NAME, as in mine.make")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # a file in the folder one stands in is a module
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise check.BadValue("load", load, f"there is no module {error.name} in {here}, nor installed") from error
        raise check.BadValue("load", load, f"{module} needs a module that is not installed, {error.name}") from error
    except (Exception, SystemExit) as error:
        raise check.BadValue("load", load, f"{module} cannot be imported ({said(error)})") from error
    if found is None or not callable(found):
        raise check.BadValue("load", load, f"must be a function or a class, and {module} has none called {name}")
    return found


@contextmanager
def blaming(where: str) -> Iterator[None]:
    """Whatever the user's code raises, under its name."""
    try:
        yield
    except check.InputError:
        raise
    except (Exception, SystemExit) as error:
        raise check.InputError(f"{where} failed ({said(error)})") from error


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
