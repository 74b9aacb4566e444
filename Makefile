# Two commands for a fresh clone: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint style types boundaries fast slow bench clean

$(VENV)/.ready: pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e "./lab[dev]"
	touch $@

demo: $(VENV)/.ready  ## fine-tune eight experts of a real model, merge them by every method, show the table
	$(BIN)/covmerge bench text --kind full --seeds 1 --cache demo-output/cache --out demo-output

# Each part runs, whichever failed before it, and make fails if one did.
test: $(VENV)/.ready  ## everything CI runs
	$(MAKE) --no-print-directory --keep-going lint style types boundaries fast slow

lint: $(VENV)/.ready
	$(BIN)/ruff check

style: $(VENV)/.ready
	$(BIN)/ruff format --check

types: $(VENV)/.ready
	$(BIN)/pyright --pythonpath $(BIN)/python

boundaries: $(VENV)/.ready
	$(BIN)/lint-imports

fast: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow"

slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

# With PEERS, the authors' repositories checked out there, and PEERS_PYTHON, a Python that has mergekit and
# fusion-bench, both are measured beside covmerge (see the modules). `comparison` needs `make demo` before.
bench: export PYTHONPATH := lab
bench: $(VENV)/.ready  ## time and memory: lab/benchmarks/results/*.json, and from them lab/docs/performance.md
	$(BIN)/python -m benchmarks.kernels $(if $(PEERS),--peers $(PEERS))
	$(BIN)/python -m benchmarks.checkpoints $(if $(PEERS_PYTHON),--peers-python $(PEERS_PYTHON))
	$(BIN)/python -m benchmarks.streaming
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.routes
	$(BIN)/python -m benchmarks.timeline
	$(BIN)/python -m benchmarks.adapters
	$(BIN)/python -m benchmarks.comparison
	$(BIN)/python -m benchmarks.performance

clean:
	rm -rf $(VENV) demo-output lab/benchmarks/work
