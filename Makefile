# Two commands for a fresh clone: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A worker for each core and two more, each with one thread of torch unless the caller wants more: tests wait
# for processes, clusters and servers that they start, and no core is to be idle meanwhile. A file's tests stay
# together, as they share what is expensive to make, and conftest.py puts the long ones first.
WORKERS ?= $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 2)")
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test nightly lint style types boundaries site tests fast slow coverage lock bench clean

# torch first, by its version alone: which build of it fits is the machine's matter, and each has a hash of its
# own. All else is what the lock says, byte by byte, also what our own packages are built with. uv takes half a minute
# for it and pip four; pip does it where pip alone is told of an index. Python compiles what is imported when it
# is; all of it would take a minute, for which most is never asked.
$(VENV)/.ready: export PIP_DISABLE_PIP_VERSION_CHECK := 1
$(VENV)/.ready: pyproject.toml lab/pyproject.toml requirements/torch.txt requirements/uv.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -r requirements/torch.txt
	$(BIN)/python -m pip install --quiet --no-compile --require-hashes -r requirements/uv.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes --no-deps -r requirements/dev.txt || \
		$(BIN)/python -m pip install --quiet --no-compile --require-hashes --no-deps -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e . -e ./lab
	touch $@

# Takes uv and a network. Versions stay what they are as long as they fit; without the file, all are the newest.
# tests/test_lock.py says when it is due.
lock: export UV_CUSTOM_COMPILE_COMMAND := make lock
lock:  ## requirements/dev.txt, from pyproject.toml and lab/pyproject.toml
	printf '%s\n' '-e .[dev]' '-e ./lab[dev]' | uv pip compile --quiet --universal --python-version 3.11 \
		--generate-hashes --default-index https://pypi.org/simple --constraint requirements/torch.txt \
		$(addprefix --no-emit-package ,torch covmerge covmerge-lab) --output-file requirements/dev.txt - >/dev/null

demo: $(VENV)/.ready  ## fine-tune eight experts of a real model, merge them by every method, show the table
	$(BIN)/covmerge bench text --kind full --seeds 1 --cache demo-output/cache --out demo-output

# Each part runs, whichever failed before it, and make fails if one did. The types, which keep one core
# busy, are checked beside the others.
PARTS := types lint style boundaries site tests
test: $(VENV)/.ready  ## everything CI runs
	$(MAKE) --no-print-directory --keep-going --jobs=2 $(PARTS)

nightly: $(VENV)/.ready  ## the same with every test: all combinations of parameters, and what is rare
	$(MAKE) --no-print-directory --keep-going --jobs=2 $(PARTS) WHICH=--nightly

lint: $(VENV)/.ready
	$(BIN)/ruff check

style: $(VENV)/.ready
	$(BIN)/ruff format --check

types: $(VENV)/.ready  ## of the code, and of the Python in README.md and docs/
	$(PYTHON) tests/examples.py build/examples
	$(BIN)/pyright --pythonpath $(BIN)/python src lab/src build/examples

boundaries: $(VENV)/.ready
	$(BIN)/lint-imports

# NO_MKDOCS_2_WARNING: material's words on its own future, at every build.
site: export NO_MKDOCS_2_WARNING := 1
site: $(VENV)/.ready  ## the documentation, into build/site; a warning is an error
	$(BIN)/mkdocs build --strict

# Tests start processes that would otherwise compile all of covmerge each. In a new environment each worker
# would compile all tests and what they import, too: one process does it before, beside the types.
unexport PYTHONDONTWRITEBYTECODE
$(VENV)/.compiled: $(VENV)/.ready
	-$(BIN)/python -m pytest --collect-only --quiet > /dev/null
	touch $@

tests fast slow: export OMP_NUM_THREADS ?= 1
tests: $(VENV)/.compiled
	$(PYTEST) $(WHICH)

fast: $(VENV)/.compiled
	$(PYTEST) -m "not slow"

slow: $(VENV)/.compiled
	$(PYTEST) -m slow

# The tests of what reads or writes files (pyproject.toml has the list of it), and which branches of it they
# take, also in the processes that they start: of branches alone at least 95 %. It takes half as long as all
# tests do, so CI does not run it.
COVERED := $(addprefix tests/,campaigns/test_hostile.py campaigns/test_findings.py checkpoints remote quantised export \
	verification vocabulary recipe statistics engine inspection tensors e2e cli mergekit viewer \
	test_addresses.py) \
	$(addprefix src/covmerge/,files/stores files/checkpoints run/export files/quantised run/verification \
	plan/vocabulary plan/recipe plan/statistics)
coverage: export OMP_NUM_THREADS ?= 1
coverage: $(VENV)/.ready
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --nightly --quiet --numprocesses $(WORKERS) --dist loadfile $(COVERED)
	$(BIN)/coverage combine --quiet
	mkdir -p build
	$(BIN)/coverage json --quiet -o build/coverage.json
	$(BIN)/python -m tests.branches build/coverage.json

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
	$(BIN)/python -m benchmarks.reports
	$(BIN)/python -m benchmarks.adapters
	$(BIN)/python -m benchmarks.comparison
	$(BIN)/python -m benchmarks.performance

clean:
	rm -rf $(VENV) build demo-output lab/benchmarks/work
