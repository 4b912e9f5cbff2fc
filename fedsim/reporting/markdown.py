"""The report as Markdown."""

from fedsim.reporting.document import Document, Section, Sheet


def markdown(document: Document) -> str:
    parts = [f"# {document.title}", _paragraphs(document.lines), *(_section(section) for section in document.sections)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section) -> str:
    figures = [f"![{_escaped(chart.title)}]({chart.name}.png)" for chart in section.charts]
    sheets = [_sheet(sheet) for sheet in section.sheets]
    parts = [f"## {_escaped(section.title)}", _paragraphs(section.lines), *sheets, *figures]
    return "\n\n".join(part for part in parts if part)


def _sheet(sheet: Sheet) -> str:
    lines = [_line(sheet.header), "|" + "---|" * len(sheet.header)]
    lines += [_line([cell.text for cell in row]) for row in sheet.rows]
    return "\n\n".join(
        [f"### {_escaped(sheet.title)}", "\n".join(lines), *([_escaped(sheet.note)] if sheet.note else [])]
    )


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(_escaped(cell).replace("\n", "<br>") for cell in cells) + " |"


def _paragraphs(lines: tuple[str, ...]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    """Labels are the user's; code between backticks stays."""
    for mark in "\\|*_<>[]":
        text = text.replace(mark, "\\" + mark)
    pieces = text.split("`")
    for i in range(1, len(pieces) - 1, 2):
        for mark in "|*_<>[]\\":
            pieces[i] = pieces[i].replace("\\" + mark, mark)
    return "`".join(pieces)
