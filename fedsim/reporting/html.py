"""The report as one page that needs nothing else: styles, plotly.js and all numbers are in it."""

import json
from html import escape
from importlib.resources import files

from plotly.offline import get_plotlyjs

from fedsim.reporting.charts import Chart
from fedsim.reporting.document import Cell, Document, Section, Sheet
from fedsim.reporting.draw import plotly

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
"""The browser itself refuses to load anything from elsewhere."""


def html(document: Document) -> str:
    contents = "".join(f'<a href="#s{i}">{escape(s.title)}</a>' for i, s in enumerate(document.sections))
    sections = "".join(_section(i, section) for i, section in enumerate(document.sections))
    library = f"<script>{get_plotlyjs()}</script>" if any(section.charts for section in document.sections) else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(document.title)}</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<nav><strong>{escape(document.title)}</strong>{contents}</nav>
<main>
<h1>{escape(document.title)}</h1>
{_list(document.lines)}
{sections}
</main>
{library}
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _section(number: int, section: Section) -> str:
    sheets = "".join(_sheet(sheet) for sheet in section.sheets)
    charts = "".join(_chart(chart) for chart in section.charts)
    return f'<section><h2 id="s{number}">{escape(section.title)}</h2>{_list(section.lines)}{sheets}{charts}</section>\n'


def _sheet(sheet: Sheet) -> str:
    header = "".join(f"<th>{escape(title)}</th>" for title in sheet.header)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in sheet.rows)
    note = f'<p class="note">{escape(sheet.note)}</p>' if sheet.note else ""
    table = f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>{note}\n'
    if sheet.detail:
        return f"<details><summary>{escape(sheet.title)}</summary>{table}</details>"
    return f"<h3>{escape(sheet.title)}</h3>{table}"


def _cell(cell: Cell) -> str:
    first, *below = cell.text.split("\n")
    small = "".join(f"<small>{escape(line)}</small>" for line in below)
    tone = f' class="{cell.tone}"' if cell.tone else ""
    return f"<td{tone}>{escape(first)}{small}</td>"


def _chart(chart: Chart) -> str:
    """`<` as an escape, so that no label can end the script."""
    values = json.dumps(plotly(chart), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    script = f'<script type="application/json">{values}</script>'
    return f'<figure aria-label="{escape(chart.title)}"><div></div>{script}</figure>\n'


def _list(lines: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{_with_code(line)}</li>' for line in lines)}</ul>" if lines else ""


def _with_code(line: str) -> str:
    pieces = escape(line).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 and i < len(pieces) - 1 else p for i, p in enumerate(pieces))


def _asset(name: str) -> str:
    return (files("fedsim.reporting") / name).read_text(encoding="utf-8")
