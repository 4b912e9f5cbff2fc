"""What the user typed: the name it gives a run's folder, and what is wrong with it where it cannot be composed."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString, Transformer
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

PACKAGE = Path(__file__).resolve().parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""Inside the package when installed from a wheel, beside it in a checkout."""

UNNAMED = (
    r"[+~]*(rounds|schedule\.rounds|device|data_dir|cache_dir|partition\.preview|engine\.workers|overwrite|checkpoint|"
    r"logger|hydra)(?=[.=@]|$)"
)
"""Keys that do not name a run: the same command with another `rounds` continues it."""

OF_A_TABLE = r"(row|column|seed)=|scale=full$"
"""What does not name the folder of a paper's table: which of its cells are run, and that they are run in full."""

LONGEST_NAME = 120


def run_name(overrides: Iterable[str]) -> str:
    """The folder of a run or a sweep, from the overrides that make it what it is: same command, same folder."""
    return folder_name(o for o in overrides if not re.match(UNNAMED, o))


def table_name(typed: Iterable[str]) -> str:
    """The folder of a paper's table: the same one whichever of its cells are asked for. With other rounds it is another
    table, of which the paper's own must know nothing."""
    wanted = (o for o in typed if not re.match(OF_A_TABLE, o))
    return folder_name(o for o in wanted if "rounds=" in o or not re.match(UNNAMED, o))


def cell_name(job: Iterable[str], typed: Sequence[str]) -> str:
    """The folder of one job within its sweep's: what the sweep chose, not what was typed with a single value."""
    parsed = OverridesParser.create().parse_overrides(list(typed))
    swept = {o.key_or_group for o in parsed if o.is_sweep_override()}
    fixed = {o.key_or_group for o in parsed} - swept  # a key may be typed twice
    return folder_name(o for o in job if o.lstrip("+~").partition("=")[0] not in fixed)


def folder_name(overrides: Iterable[str]) -> str:
    return no_longer(re.sub(r"[^\w.,=+@-]+", "-", ",".join(sorted(overrides))).strip("-") or "default")


def no_longer(name: str) -> str:
    """A name that every file system takes; where it is cut, a hash tells it from others."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def misread(typed: Sequence[str]) -> str | None:
    """One line on an override that cannot be read, or a choice that no file of conf/ stands for."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(typed))
    except OverrideParseException as error:
        reason = "quote it, as in 'key=\"value\"'" if "LexerNoViableAlt" in str(error) else _brief(error)
        return f"{error.override}: cannot be read as key=value ({reason})"
    for override in overrides:
        group = str(override.key_or_group)
        if not group:
            return f"{override.input_line}: a key is missing before the ="
        if override.is_delete() or not (CONF / group).is_dir():
            continue
        files = (CONF / group).rglob("*.yaml")
        choices = sorted(p.relative_to(CONF / group).with_suffix("").as_posix() for p in files)
        for value in values(override):
            if value not in choices:
                return f"unknown choice {group}={value}; {_nearest(value, choices)}"
    return None


def explain(error: Exception, typed: Sequence[str]) -> str:
    """One line on why readable overrides could not be composed, with the nearest names that would have been valid."""
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'", str(error))
    if ambiguous:
        return f"{ambiguous[1]}: several values are a sweep, which needs -m"
    overrides = OverridesParser.create().parse_overrides(list(typed))
    groups = [o for o in overrides if (CONF / str(o.key_or_group)).is_dir()]
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            chosen = [f"{o.key_or_group}={values(o)[0]}" for o in groups if not isinstance(o.value(), list)]
            keys = _keys(OmegaConf.to_container(compose("config", chosen), resolve=False))
    except (HydraException, OmegaConfBaseException):
        return _brief(error)
    for override in overrides:
        key = str(override.key_or_group)
        if override in groups or override.is_add() or re.match(r"hydra\b", key) or key in keys:
            continue
        return f"unknown key {key}; {_nearest(key, keys)}{_elsewhere(key)}"
    return _brief(error)


def values(override: Override) -> list[str]:
    """The choices an override names: several in a sweep or a list, none in a pattern that Hydra expands."""
    value = override.value()
    if isinstance(value, Glob):
        return []
    if override.is_sweep_override():  # identity: as typed, where Hydra would put a backslash before a space
        value = list(override.sweep_iterator(transformer=Transformer.identity))
    several = value if isinstance(value, list) else [value]
    return ["null" if v is None else v.text if isinstance(v, QuotedString) else str(v) for v in several]


def _keys(config: object, prefix: str = "") -> list[str]:
    if not isinstance(config, dict):
        return []
    named = {k: v for k, v in config.items() if not k.startswith("_")}
    return [key for name, value in named.items() for key in (f"{prefix}{name}", *_keys(value, f"{prefix}{name}."))]


def _nearest(name: str, valid: Sequence[str]) -> str:
    """Among names at the same place first: aggregator.taau is compared with aggregator's own keys."""
    section, dot, leaf = name.rpartition(".")
    beside = [v for v in valid if v.rpartition(".")[:2] == (section, dot)] or [v for v in valid if "." not in v]
    near = get_close_matches(leaf, [v.rpartition(".")[2] for v in beside], n=2, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(section + dot + n for n in near)}?"
    return f"valid: {', '.join(beside)}"


def _elsewhere(key: str) -> str:
    """A key that another choice of the same group has (aggregator.tau with aggregator=fedavg)."""
    group, _, rest = key.partition(".")
    owners = [
        p.stem
        for p in sorted((CONF / group).glob("*.yaml"))
        if rest in (yaml.safe_load(p.read_text(encoding="utf-8")) or {})
    ]
    return f" ({key} belongs to {group}={','.join(owners)})" if rest and owners else ""


def _brief(error: BaseException) -> str:
    """What the error says (or what caused it, where it says nothing itself), without pointers to documentation."""
    text = re.split(r"\n?See https|\n\t|\n    ", str(error))[0].strip()
    return text or (_brief(error.__cause__) if error.__cause__ else type(error).__name__)
