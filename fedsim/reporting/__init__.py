"""What `fedsim-report` writes: papers' tables filled with our runs, verdicts and figures.

results -> runs, experiment -> board (a table's cells) -> verdicts, sheets, charts -> Markdown, LaTeX, CSV, HTML"""
