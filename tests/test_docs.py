"""docs/methods says what conf/ and the command do: pages, keys and defaults, columns, commands, refusals, links."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import config

from fedsim import build, check
from fedsim.metrics import METRICS
from fedsim.overrides import CONF
from fedsim.runner import initial_state

DOCS = Path(__file__).parent.parent / "docs" / "methods"
PAGES = sorted(p.stem for p in DOCS.glob("*.md") if p.stem != "README")

GROUPS = ("client", "aggregator", "server_optimizer", "participation", "privacy", "shared_data", "experiment")
ELSEWHERE = {
    "client/sgd": "fedavg",
    "server_optimizer/sgd": "fedavg",
    "participation/uniform": "participation",
    "participation/async": "fedasync",
    "privacy/gaussian": "privacy_gaussian",
    "privacy/masked": "privacy_masked",
    "privacy/none": None,
    "shared_data/global": "shared_data",
    "shared_data/none": None,
    "experiment/quickstart": None,  # three methods, each with a page
}
"""Choices whose page has another name than they have, or that need none."""
WITHOUT_CHOICE = {"personal"}
"""Pages about keys of conf/config.yaml."""

SECTIONS = ["Command", "Keys", "What is logged", "Combines with", "Deviations and readings"]

CHOICES = [f"{group}/{path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def page_of(choice: str) -> str | None:
    return ELSEWHERE.get(choice, choice.partition("/")[2])


def choices_of(page: str) -> list[str]:
    return [choice for choice in CHOICES if page_of(choice) == page]


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    return re.split(r"^## ", text_of(page).partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def rows(text: str, *header: str) -> Iterator[list[str]]:
    """The cells of every table that has this header."""
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if cells[0] == list(header):
            for row in cells[2:]:
                assert len(row) == len(header), row
                yield row


def plain(cell: str) -> str:
    assert re.fullmatch(r"`[^`]+`", cell), f"{cell} is not one piece of code"
    return cell.strip("`")


def documented(page: str) -> dict[str, Any]:
    """key -> default, from the page's table of keys."""
    table = rows(section(page, "Keys"), "key", "symbol in the paper", "default", "meaning")
    found = [(plain(key), yaml.safe_load(plain(default))) for key, _, default, _ in table]
    assert len(dict(found)) == len(found), "a key stands there twice"
    return dict(found)


def leaves(node: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for name, value in node.items():
            if not str(name).startswith("_") and name not in ("defaults", "hydra"):
                yield from leaves(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, node


def own(choice: str) -> dict[str, Any]:
    """key -> default, as a choice's file has them."""
    raw = (CONF / f"{choice}.yaml").read_text(encoding="utf-8")
    everywhere = re.search(r"^# @package _global_$", raw, flags=re.MULTILINE)
    return dict(leaves(yaml.safe_load(raw), "" if everywhere else choice.partition("/")[0]))


@cache
def composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    return config(*overrides)


def commands(text: str) -> list[str]:
    """Lines of code blocks and pieces of code in the text that start with fedsim."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    return re.findall(r"^(fedsim\b.*)$", blocks, flags=re.MULTILINE) + re.findall(r"`(fedsim [^`\n]*)`", text)


def overrides_of(command: str) -> tuple[str, ...]:
    """What a single run, or the first job of a sweep, is composed from."""
    words = shlex.split(command, comments=True)
    given = [w for w in words[1:] if w != "-m"]
    assert all("=" in w for w in given), command
    if "-m" in words:
        given = [w if "[" in w else w.partition(",")[0] for w in given]
    return tuple(sorted(given))


def is_same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_has_a_page(choice: str) -> None:
    page = page_of(choice)
    assert page is None or page in PAGES, f"docs/methods/{page}.md is missing"


def test_every_page_is_about_something() -> None:
    assert set(PAGES) == {page for page in map(page_of, CHOICES) if page} | WITHOUT_CHOICE
    assert set(CHOICES) >= ELSEWHERE.keys()


@pytest.mark.parametrize("page", PAGES)
def test_every_key_has_its_default(page: str) -> None:
    table = documented(page)
    for choice in choices_of(page):
        for key, value in own(choice).items():
            assert key in table, f"{key} of conf/{choice}.yaml is not in the table"
            assert is_same(table[key], value), f"{key} is {value!r} in conf/{choice}.yaml, {table[key]!r} in the table"


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_key_exists(page: str) -> None:
    """Also those that a page borrows, such as client.epochs: their default goes with the first command's choices."""
    command = overrides_of(commands(text_of(page))[0])
    choices = tuple(word for word in command if (CONF / word.partition("=")[0]).is_dir())
    for key, default in documented(page).items():
        node: Any = composed(choices)
        for part in key.split("."):
            assert part in node, f"{key} is no key of fedsim {' '.join(choices)}"
            node = node[part]
        assert is_same(node, default), f"{key} is {node!r}, {default!r} in the table"


@pytest.mark.parametrize("page", PAGES)
def test_columns_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+)`", section(page, "What is logged"))
    columns = [name for name in named if "/" in name or name in METRICS]
    assert columns
    for name in columns:
        assert name in METRICS, f"{name} is no column of metrics.csv"


@pytest.mark.parametrize("page", ["README", *PAGES])
def test_commands_compose(page: str) -> None:
    found = commands(text_of(page))
    assert found
    for command in found:
        assert composed(overrides_of(command))["rounds"] >= 1, command


def refusals() -> list[tuple[str, str]]:
    table = [row for page in PAGES for row in rows(text_of(page), "refused", "message")]
    return sorted({(plain(command), plain(message)) for command, message in table})


@pytest.mark.parametrize(("command", "message"), refusals())
def test_refusals_are_said_as_they_are(command: str, message: str) -> None:
    with pytest.raises(check.InputError) as error:
        initial_state(build.experiment(composed(overrides_of(command)), torch.device("cpu")))
    assert str(error.value) == message


def test_the_index_has_every_page() -> None:
    """With its first command."""
    table = list(rows(text_of("README"), "method", "command", "paper", "page"))
    assert sorted(link for *_, link in table) == sorted(f"[{page}]({page}.md)" for page in PAGES)
    for _, command, _, link in table:
        assert plain(command) == commands(text_of(link[1:].partition("]")[0]))[0]


@pytest.mark.parametrize("page", ["README", *PAGES])
def test_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(page)):
        assert re.match(r"https?://", target) or (DOCS / target).is_file(), f"{target} does not exist"


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_one_form(page: str) -> None:
    text = text_of(page)
    assert re.match(r"# \S", text)
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == SECTIONS
    head = text.partition("\n## ")[0]
    assert re.search(r"^```\n.+?^```$", head, flags=re.DOTALL | re.MULTILINE), "no equation before the first section"
    assert len(text.splitlines()) <= 70


@pytest.mark.parametrize("page", ["README", *PAGES])
def test_lines_are_short_and_plain(page: str) -> None:
    for line in text_of(page).splitlines():
        assert len(line) <= 120 or line.startswith("|"), line
        assert "—" not in line, line
        assert not re.search(r"(?<![\w.])/(?:work|tmp|home|root|Users)\b", line), f"a path of one machine: {line}"
