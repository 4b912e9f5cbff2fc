# make demo | test | lint | types | check | bench | clean. The environment is made once, in .venv (VENV=... for another place).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types check bench clean

demo: $(VENV)/installed
	$(BIN)/fedsim experiment=quickstart

test: $(VENV)/installed
	$(BIN)/pytest -n auto

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

check: lint types test

bench: $(VENV)/installed
	$(BIN)/python scripts/benchmark.py

# pip cannot say "nothing changed" quickly, a time stamp can.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
