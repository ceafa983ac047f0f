# Everything a newcomer types. Each target sets up .venv by itself, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The notes' texts, where they lie beside the checkout; tests that need them skip without.
ifneq ($(wildcard ../shared/data),)
export ELMAN_DATA ?= $(abspath ../shared/data)
endif

.PHONY: setup demo test test-slow check format lint types bench wheel clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: elman needs Python 3.11 or newer, $(PYTHON) is older"; echo "hint: make PYTHON=python3.12 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[oracles]' \
		|| echo "note: some test oracles could not be installed; tests that need them will skip"
	@touch $@

demo: setup
	$(BIN)/elman datasets

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m "slow"

check: lint types test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/basedpyright

bench: setup
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build src/*.egg-info .pytest_cache .ruff_cache .hypothesis
