"""--check: whether what was stated holds. What was not looked at is said, so that it does not look verified."""

from collections.abc import Sequence

from fedsim.reporting.board import Board
from fedsim.reporting.verdicts import failures, states_something


def check(boards: Sequence[Board], damaged: Sequence[str] = ()) -> tuple[bool, list[str]]:
    """Whether all is well, and a line for each thing that is not: `damaged` runs are not."""
    if not boards:
        return False, ["check: fails: no paper's table among these runs, so there is nothing to check"]
    if all(board.smoke for board in boards):
        return False, ["check: fails: all of these are smoke runs, which show only that they run: nothing to check"]
    smoke = [board for board in boards if board.smoke]
    silent = [board for board in boards if not board.smoke and not states_something(board)]
    lines = [f"check: {board.name}: not checked (smoke runs show only that it runs)" for board in smoke]
    lines += [f"check: {board.name}: nothing is stated of it at this scale but its cells" for board in silent]
    lines += [
        f"check: {board.name}: not run, so not checked: {', '.join(absent)}"
        for board in boards
        if (absent := [row for row in board.rows if row not in board.begun]) and not board.smoke
    ]
    lines += [
        f"check: {board.name}: not held against the paper's values, which only its own setting is expected to meet"
        for board in boards
        if not (board.smoke or board.full or board.table.tolerance is None)
    ]
    failed = [f"check: {line}" for line in damaged]
    failed += [f"check: {board.name}: {why}" for board in boards for why in failures(board)]
    looked_at = len(boards) - len(smoke) - len(silent)
    end = (
        f"check: fails ({len(failed)})"
        if failed
        else f"check: passes ({looked_at} of {len(boards)} tables were checked)"
    )
    return not failed, [*lines, *failed, end]
