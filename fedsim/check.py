"""Bad input, said in one line: the key, its value, and what would be valid."""

import math
from collections.abc import Mapping, Sequence


class InputError(Exception):
    """The user's input cannot be run. The message is one line; the command prints it and exits with 2."""


class BadValue(InputError):
    """A config value out of range. Raised by the object that owns the key, which knows only its own name for it;
    whoever builds the object puts the group in front (`tau` becomes `aggregator.tau`)."""

    def __init__(self, key: str, value: object, valid: str) -> None:
        super().__init__(f"{key}={value}: {valid}")
        self.key, self.value, self.valid = key, value, valid


def number(
    key: str,
    value: object,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> None:
    """A finite number within bounds (ge: >=, gt: >, le: <=, lt: <)."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _bounds(ok, key, value, "a number", ge, gt, le, lt)


def integer(key: str, value: object, *, ge: int | None = None, le: int | None = None) -> None:
    """A whole number within bounds."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    _bounds(ok, key, value, "a whole number", ge, None, le, None)


def choice(key: str, value: object, choices: Sequence[str]) -> None:
    """One of a few names."""
    if value not in choices:
        raise BadValue(key, value, "must be one of " + ", ".join(choices))


def automatic(key: str, value: object) -> None:
    """auto, or yes or no."""
    if value != "auto" and not isinstance(value, bool):
        raise BadValue(key, value, "must be auto, true or false")


def resources(workers: object, threads: object, compile: object) -> None:
    """What every engine may be given."""
    if workers is not None:
        integer("workers", workers, ge=1, le=1024)
    integer("threads", threads, ge=1, le=1024)
    automatic("compile", compile)


def mapping(key: str, value: object) -> None:
    """A section with keys of its own."""
    if not isinstance(value, Mapping):
        raise BadValue(key, value, f"is a section; set one of its keys, as in {key}.KEY=VALUE")


def text(key: str, value: object) -> None:
    """A word or a sentence; a name that looks like a number is quoted twice: 'key="1"'."""
    if not isinstance(value, str) or not value:
        raise BadValue(key, value, "must be text; something that looks otherwise is quoted, as in 'key=\"1\"'")


def boolean(key: str, value: object) -> None:
    """true or false, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise BadValue(key, value, "must be true or false")


def _bounds(
    ok: bool,
    key: str,
    value: object,
    what: str,
    ge: float | None,
    gt: float | None,
    le: float | None,
    lt: float | None,
) -> None:
    limits = [(">=", ge), (">", gt), ("<=", le), ("<", lt)]
    if ok and isinstance(value, int) and abs(value) >= 2**63:
        raise BadValue(key, value, f"must be {what} of at most 63 bits")
    if ok:
        assert isinstance(value, int | float)
        ok = (
            (ge is None or value >= ge)
            and (gt is None or value > gt)
            and (le is None or value <= le)
            and (lt is None or value < lt)
        )
    if not ok:
        said = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
        raise BadValue(key, value, f"must be {what} {said}".rstrip())
