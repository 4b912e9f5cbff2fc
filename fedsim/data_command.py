"""The `fedsim-data` command: which datasets there are, getting them, checking them, where they lie."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedsim import check, fetch, official
from fedsim.official import File, Layout

OK, NOT_GOT, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def main() -> None:
    """Every way it can end is an exit code, and one line on stderr where something is wrong."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except check.InputError as error:
        code = BAD_INPUT
        _complain(str(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
        _complain("interrupted; the same command goes on where it stopped")
    except BrokenPipeError:  # whoever read our output has gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """One command line; its exit code."""
    given = _parser().parse_args(arguments)
    root = Path(given.data_dir).expanduser()
    if given.command == "list":
        return _list(root)
    if given.command == "get":
        return _get(given.name, root, given.mirror, given.layout)
    if given.command == "where":
        return _where(given.name, root)
    return _check([given.name] if given.name else _present(root), root)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fedsim-data", description="Datasets for fedsim: get them, check them.")
    common = argparse.ArgumentParser(add_help=False)
    default = os.environ.get("FEDSIM_DATA", "~/.cache/fedsim")
    common.add_argument("--data-dir", default=default, metavar="FOLDER", help=f"where datasets lie ({default})")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", parents=[common], help="all datasets, and which of them are here")
    get = commands.add_parser("get", parents=[common], help="fetch a dataset from its site, or from a mirror")
    get.add_argument("name", metavar="NAME")
    get.add_argument("--mirror", choices=["official", *fetch.CLIENTS], help="only from there")
    get.add_argument("--layout", help="which form of it, where there are several (see `where`)")
    checked = commands.add_parser("check", parents=[common], help="compare files with their known checksums")
    checked.add_argument("name", nargs="?", metavar="NAME", help="all that are here, if not given")
    where = commands.add_parser("where", parents=[common], help="where a dataset is looked for, and its sources")
    where.add_argument("name", metavar="NAME")
    return parser


def _list(root: Path) -> int:
    table = Table("name", "what it is", "size", f"in {root}")
    for name, entry in official.DATASETS.items():
        whole, begun = _here(name, root)
        size, here = f"{entry.megabytes} MB to fetch" if entry.megabytes else "to fetch", "-"
        if whole:
            paths = {path for layout in whole for file in layout.files for path in file.find(root)}
            size, here = f"{sum(path.stat().st_size for path in paths) / 1e6:,.0f} MB here", _names(whole)
        elif begun:
            here = "incomplete"
        table.add_row(name, f"{entry.what}\n({entry.note})" if entry.note else entry.what, size, here)
    Console().print(table)
    return OK


def _get(name: str, root: Path, mirror: str | None, layout: str | None) -> int:
    layouts = official.entry(name).layouts
    if layout and layout not in [known.name for known in layouts]:
        raise check.BadValue("--layout", layout, f"must be one of {_names(layouts)}")
    wanted = [layout] if layout else None
    already = "already " if fetch.complete(name, root, wanted) else ""
    try:
        got, _ = fetch.get(name, root, mirror, wanted, say=_tell)
    except fetch.DiskFull as error:
        _complain(f"{name} could not be got: {error}")
        return NOT_GOT
    except fetch.Unavailable:  # why, was told as it happened
        wrong = [file.path for file in official.among(name, wanted)[0].files if fetch.broken(file, root)]
        _complain(f"{name} could not be got; put by hand into {root}: {', '.join(wrong)} (fedsim-data where {name})")
        return NOT_GOT
    print(f"{name}: {already}here in {root} and verified (layout {got})")
    return OK


def _check(names: Sequence[str], root: Path) -> int:
    """A line a file: of each layout that is complete, or else of the one that is nearest to it."""
    if not names:
        print(f"nothing in {root}")
    sound = True
    for name in names:
        whole, begun = _here(name, root)
        for layout in whole or begun or official.entry(name).layouts[:1]:
            for file in layout.files:
                state, good = _state(file, root)
                sound = sound and good
                print(f"{name} ({layout.name}): {state}")
    return OK if sound else NOT_GOT


def _state(file: File, root: Path) -> tuple[str, bool]:
    """How a file is, and whether that is good."""
    paths = file.find(root)
    if not paths:
        return f"missing: {root / file.path}", False
    if problem := official.fault(file, paths):
        return f"damaged: {problem}", False
    at = f"{len(paths)} files {file.path}" if file.many else str(paths[0])
    return f"{'ok' if file.count or file.checksum(paths[0]) else 'no known checksum'}: {at}", True


def _where(name: str, root: Path) -> int:
    entry = official.entry(name)
    for layout in entry.layouts:
        print(f"layout {layout.name}, in {root} (in the folder named here, or directly in it):")
        for file in layout.files:
            found = file.find(root)
            here = "missing" if not found else f"{len(found)} files" if file.many else f"here: {found[0]}"
            print(f"  {file.path}{'[.gz]' if file.gzip else ''}  {here}")
    for source in entry.sources:
        print(f"source of {source.layout}, {source.files}: {source.kind} {source.name} {source.digest}".rstrip())
    if entry.note:
        print(f"note: {entry.note}")
    return OK


def _here(name: str, root: Path) -> tuple[list[Layout], list[Layout]]:
    """The layouts that are complete; and, of the others, the one that is nearest to it, if there is anything of it."""
    layouts = official.entry(name).layouts
    share = {layout: sum(bool(file.find(root)) for file in layout.files) / len(layout.files) for layout in layouts}
    begun = [layout for layout in layouts if 0 < share[layout] < 1]
    return [layout for layout in layouts if share[layout] == 1], sorted(begun, key=lambda layout: -share[layout])[:1]


def _present(root: Path) -> list[str]:
    """The datasets that are here, sound or not; not those of which there is only what a sound one has as well (some
    share files, some only names)."""
    sound = {name: done[1] for name in official.DATASETS if (done := fetch.complete(name, root))}
    explained = {path for paths in sound.values() for path in paths}
    return [name for name in official.DATASETS if name in sound or _paths(name, root) - explained]


def _paths(name: str, root: Path) -> set[Path]:
    return {path for layout in official.entry(name).layouts for file in layout.files for path in file.find(root)}


def _names(layouts: Sequence[Layout]) -> str:
    return ", ".join(layout.name for layout in layouts)


def _tell(line: str) -> None:
    print(" ".join(line.split()), file=sys.stderr, flush=True)


def _complain(message: str) -> None:
    _tell(f"fedsim-data: error: {message}")


if __name__ == "__main__":
    main()
