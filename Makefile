# Two commands for a fresh clone: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types boundaries unit bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.ready  ## fine-tune eight experts of a real model, merge them by every method, show the table
	$(BIN)/covmerge bench text --kind full --seeds 1 --cache demo-output/cache --out demo-output

test: lint types boundaries unit  ## everything CI runs

lint: $(VENV)/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.ready
	$(BIN)/pyright --pythonpath $(BIN)/python

boundaries: $(VENV)/.ready
	$(BIN)/lint-imports

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow"
	$(BIN)/python -m pytest -m slow

bench: $(VENV)/.ready  ## memory and time, results in benchmarks/results/; comparison needs `make demo` before
	$(BIN)/python -m benchmarks.streaming
	$(BIN)/python -m benchmarks.adapters
	$(BIN)/python -m benchmarks.comparison

clean:
	rm -rf $(VENV) demo-output benchmarks/work
