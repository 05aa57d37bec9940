# Every target makes its own .venv, from nothing; Python 3.11 is all that must be there.
PYTHON ?= $(or $(shell command -v python3.11),python3)
BIN := .venv/bin
# So many processes share the tests; those that start a Ray stay in one (tests/conftest.py).
WORKERS ?= 2
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadgroup

.PHONY: setup quickstart check measure test test-all test-gpu format wheel clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt .ci/install
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	.ci/install .venv
	@touch $@

quickstart: setup
	$(BIN)/spot-batch demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	-$(BIN)/python .ci/measure.py

# How long, how deep and how often the same: the code's own shape, in numbers.
measure: setup
	$(BIN)/python .ci/measure.py

# The core of each area: at most 7 minutes on two cores.
test: check
	$(PYTEST) -m "not slow and not gpu and not chaos"

# The rest, whose tests may take minutes each on a busy machine; pytest's 5 is "none collected".
test-all: setup
	$(PYTEST) --timeout 900 -m "(slow or chaos) and not gpu" || [ $$? -eq 5 ]

test-gpu: setup
	$(BIN)/pytest -m gpu

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup
	$(BIN)/python -m build --wheel

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find spot_batch tests -name __pycache__ -prune -exec rm -rf {} +
