"""fedsim: federated-learning experiments from the command line."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim.results import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`fedsim.load`, imported when it is asked for: `fedsim --help` must not wait for pandas."""
    if name == "load":
        from fedsim.results import load

        return load
    raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
