# The two commands of the README are `make quickstart` and `make test`; both make .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS ?= runs

.PHONY: quickstart test test-slow test-matrix test-gpu check install dev clean

quickstart: $(VENV)/.installed
	$(BIN)/python tools/quickstart.py --runs-dir $(RUNS)

test: check
	$(BIN)/python -m pytest -m "not slow and not gpu and not matrix"

test-slow: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m "slow"

test-matrix: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m "matrix" --timeout 3600

# Skips, with the reason, what the machine has no accelerator for.
test-gpu: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m "gpu" -rs

check: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.installed
dev: $(VENV)/.dev-installed

$(VENV)/.installed: requirements/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet -r requirements/requirements.txt
	touch $@

$(VENV)/.dev-installed: requirements/requirements-dev.txt $(VENV)/.installed
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet -r requirements/requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) $(RUNS) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
