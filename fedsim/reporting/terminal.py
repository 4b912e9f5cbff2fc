"""The report on the terminal: tables and verdicts, not the details."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedsim.reporting.document import Cell, Document, Sheet

STYLES = {"good": "green", "weak": "yellow", "bad": "bold red", "faint": "dim", "": ""}


def tell(document: Document, console: Console) -> None:
    for line in document.lines:
        console.print(line, markup=False, highlight=False)
    for section in document.sections:
        console.rule(Text(section.title), align="left")
        for line in section.lines:
            console.print(line, markup=False, highlight=False)
        for sheet in section.sheets:
            if not sheet.detail:
                console.print(Text(sheet.title, style="italic"))
                console.print(_table(sheet))


def _table(sheet: Sheet) -> Table:
    table = Table(show_lines=any("\n" in cell.text for row in sheet.rows for cell in row))
    for title in sheet.header:
        table.add_column(Text(title), overflow="fold")
    for row in sheet.rows:
        table.add_row(*(_text(cell) for cell in row))
    return table


def _text(cell: Cell) -> Text:
    first, _, below = cell.text.partition("\n")
    text = Text(first, style=STYLES[cell.tone])
    return text.append(f"\n{below}", style="dim") if below else text
