"""The `fedsim-report` command: papers' tables filled with the runs in some folders, and whether they agree."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from fedsim import check

OK, DISAGREES, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def main() -> None:
    """Every way it can end is an exit code, and one line on stderr where something is wrong."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except check.InputError as error:
        code = BAD_INPUT
        print(f"fedsim-report: error: {' '.join(str(error).split())}", file=sys.stderr)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """One command line; its exit code."""
    given = _given(arguments)
    from fedsim.reporting import checking, terminal, writing  # after --help, which need not wait for pandas

    out = Path(given.out).expanduser() if given.out else Path(given.folders[0]).expanduser() / "report"
    report = writing.read(given.folders, given.metric)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    terminal.tell(report.document, console)
    written = writing.write(report, out)
    console.print(f"files: {out}  ({', '.join(written)})", markup=False, highlight=False, soft_wrap=True)
    if not given.check:
        return OK
    passed, lines = checking.check(report.boards, report.found.damaged)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return OK if passed else DISAGREES


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line."""
        raise check.InputError(f"{message}; fedsim-report --help says what there is")


def _given(arguments: Sequence[str]) -> argparse.Namespace:
    given, unknown = _parser().parse_known_args(arguments)
    if unknown:
        raise check.InputError(f"{unknown[0]}: no such option; valid: --out, --check, --metric, --help")
    if not given.folders:
        raise check.InputError("no FOLDER was given: where do the runs lie (outputs, say)?")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "fedsim-report",
        description="Papers' tables filled with your runs, finished or not: values, verdicts, figures.",
        epilog="Writes report.html (one page, opens offline), report.md, report.tex, CSV files and PNGs.",
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="where runs lie, at any depth")
    parser.add_argument("--out", metavar="DIR", help="where the report goes (report/ in the first FOLDER)")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a claim, a tolerance or a cell fails")
    parser.add_argument(
        "--metric",
        choices=("last", "best", "mean_last_10"),
        default="last",
        help="which accuracy of a run counts: its last, its best, or the mean of its last ten (last)",
    )
    return parser


if __name__ == "__main__":
    main()
