"""The report as LaTeX: booktabs tables, compiled by any LaTeX."""

import unicodedata

from fedsim.reporting.document import Cell, Document, Section, Sheet

HEAD = r"""\documentclass[a4paper,10pt]{article}
\usepackage[margin=2cm,landscape]{geometry}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage{xcolor}
\setlength{\parindent}{0pt}
\begin{document}
"""
TONES = {"good": "green!45!black", "weak": "orange!70!black", "bad": "red!75!black", "faint": "gray"}
LINES = 33
"""Of a table on a page: a longer one goes on in the next."""

SPECIAL = {
    **{"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{c: "\\" + c for c in "&%$#_"},
    **{"[": "{[}", "]": "{]}"},  # after \\midrule or \\\\ they would be its argument
    **{
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': "''",
        "`": r"\textasciigrave{}",
    },
    **{
        "±": r"$\pm$",
        "\N{MINUS SIGN}": "$-$",
        "×": r"$\times$",
        "≤": r"$\le$",
        "≥": r"$\ge$",
        "→": r"$\to$",
        "…": r"\dots{}",
    },
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "τ": r"$\tau$", "μ": r"$\mu$", "σ": r"$\sigma$"},
    **{
        "ζ": r"$\zeta$",
        "λ": r"$\lambda$",
        "\N{GREEK SMALL LETTER RHO}": r"$\rho$",
        "η": r"$\eta$",
        "Ω": r"$\Omega$",
        "—": "---",
    },
}


def latex(document: Document) -> str:
    parts = [HEAD, rf"\section*{{{escaped(document.title)}}}", _lines(document.lines)]
    parts += [_section(section) for section in document.sections]
    return "\n".join([*parts, r"\end{document}", ""])


def escaped(text: str) -> str:
    """What LaTeX would read as a command is text; letters that its fonts lack lose their accents, or become `?`."""
    return "".join(SPECIAL.get(c) or (c if c.isascii() else _nearest(c)) for c in text)


def _nearest(letter: str) -> str:
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return "".join(SPECIAL.get(c, c) for c in plain) or "?"


def _section(section: Section) -> str:
    figures = [
        rf"\begin{{center}}\includegraphics[width=\linewidth,height=.85\textheight,keepaspectratio]{{{chart.name}.png}}"
        r"\end{center}"
        for chart in section.charts
    ]
    tables = [_table(sheet) for sheet in section.sheets if not sheet.detail]
    return "\n".join([rf"\subsection*{{{escaped(section.title)}}}", _lines(section.lines), *tables, *figures])


def _table(sheet: Sheet) -> str:
    parts = []
    step = LINES // max((1 + cell.text.count("\n") for row in sheet.rows for cell in row), default=1)
    for start in range(0, max(len(sheet.rows), 1), step):
        columns = "l" * len(sheet.header)
        body = "\n".join(
            " & ".join(map(_cell, row)) + r" \\ \addlinespace[2pt]" for row in sheet.rows[start : start + step]
        )
        header = " & ".join(map(escaped, sheet.header))
        inner = f"\\toprule\n{header} \\\\\n\\midrule\n{body}\n\\bottomrule"
        table = f"\\begin{{tabular}}{{{columns}}}\n{inner}\n\\end{{tabular}}"
        fitted = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%" + f"\n{table}}}"
        title = escaped(sheet.title) + (" (continued)" if start else "")
        parts.append(f"\\medskip\n\\textbf{{{title}}}\\par\\nopagebreak\\smallskip\n{fitted}\\par")
    return "\n".join([*parts, rf"{{\footnotesize {escaped(sheet.note)}}}\par" if sheet.note else ""])


def _cell(cell: Cell) -> str:
    """The lines below the first are small."""
    first, *below = cell.text.split("\n")
    text = escaped(first)
    if cell.tone:
        text = rf"\textcolor{{{TONES[cell.tone]}}}{{{text}}}"
    small = "".join(rf"\\ {{\scriptsize {escaped(line)}}}" for line in below)
    return rf"\begin{{tabular}}[t]{{@{{}}l@{{}}}}{text}{small}\end{{tabular}}" if below else text


def _lines(lines: tuple[str, ...]) -> str:
    return "\n".join(rf"{escaped(line.replace('`', ''))}\par" for line in lines)
