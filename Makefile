# Everything a newcomer types. Each target sets up .venv by itself, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The notes' texts, where they lie beside the checkout; tests that need them skip without.
ifneq ($(wildcard ../shared/data),)
export ELMAN_DATA ?= $(abspath ../shared/data)
endif

KERNEL := src/elman/kernels/cpu

# Compiled Python is kept, whatever a machine's own habit: each of many processes would compile it again, and
# pytest rewrites the asserts of every test before that.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-slow test-fresh fuzz fuzz-sanitized check format lint types docs docs-serve notebooks bench sanitize wheel clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py constraints.txt $(wildcard $(KERNEL)/*.cpp $(KERNEL)/*.h src/elman/compression/*.cpp src/elman/compression/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: elman needs Python 3.11 or newer, $(PYTHON) is older"; echo "hint: make PYTHON=python3.12 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e '.[dev,docs,oracles]' \
		|| { echo "note: some test oracles could not be installed; their tests will skip"; $(INSTALL) -e '.[dev,docs]'; }
	@$(BIN)/python -c 'from elman.runs.device import remark; remark("cpu") and print(remark("cpu"))'
	@touch $@

# Three minutes: learn a book, beat counting, see the gradient, survive a kill.
demo: setup
	$(BIN)/elman demo

# As many at once as there are cores, up to four: each loads torch.
AT_ONCE := -n auto --maxprocesses 4

test: setup
	$(BIN)/python -m pytest $(AT_ONCE) -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m "slow"

# The laws, on examples nobody chose: SEED=7 repeats a run, EXAMPLES=1000 tries more. Other files are not even read.
SEED ?= $(shell date +%s)
LAWS = $(shell grep -lE "^(from|import) hypothesis" -r tests --include="test_*.py")
test-fresh: setup
	@echo "hypothesis seed $(SEED)"
	env -u CI ELMAN_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(AT_ONCE) -m "hypothesis and not slow" --hypothesis-seed=$(SEED) $(LAWS)

# Inputs that nobody would type: a minute here; ELMAN_FUZZ_SECONDS=3600 make fuzz for hours of it.
fuzz: setup
	ELMAN_FUZZ_SECONDS=$${ELMAN_FUZZ_SECONDS:-6} $(BIN)/python -m pytest -s -m fuzz tests/fuzz

# Types are one process and the site waits for its book: both at once. The tests of the site want what docs built.
check: lint
	$(MAKE) -j2 types docs
	$(MAKE) test

# The site, in build/site: guide, book (executed), reference. Nothing is fetched; a broken link, a missing
# reference, a block that fails or a public function without a docstring is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# The book as notebooks, in build/notebooks, ready to run in Jupyter.
notebooks: setup
	$(BIN)/python -m publishing.notebooks

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/basedpyright

# Short versions of what finishes here; without --quick each takes minutes, book.py and notes.py hours.
bench: setup
	for name in text counting carries forecasting cpu generation; do $(BIN)/python benchmarks/$$name.py --quick || exit 1; done
	$(BIN)/python benchmarks/glance.py

# The native kernel under AddressSanitizer and UBSan, then under ThreadSanitizer. The frames with which g++ looks for
# uses of a stack after return are not aligned for vectors of 64 bytes, and newer versions look unless told otherwise.
sanitize:
	mkdir -p build
	$(CXX) -std=c++17 -O1 -g -ffp-contract=fast -fsanitize=address,undefined -fno-sanitize-recover=all -o build/sanitize tests/sanitize.cpp $(KERNEL)/*.cpp -ldl -lpthread
	ASAN_OPTIONS=detect_stack_use_after_return=0 build/sanitize
	$(CXX) -std=c++17 -O1 -g -ffp-contract=fast -fsanitize=thread -o build/sanitize-threads tests/sanitize.cpp $(KERNEL)/*.cpp -ldl -lpthread
	build/sanitize-threads 7

# The native entries, fuzzed from Python with the kernel, and described cells, built for AddressSanitizer. Its checks
# are called, not written out at every access: a cell is compiled in ten seconds instead of minutes.
SANITIZED := -fsanitize=address -fno-omit-frame-pointer -O1 -g1 --param asan-instrumentation-with-call-threshold=0
fuzz-sanitized: setup
	rm -rf build/sanitized && mkdir -p build/sanitized && cp -r src/elman build/sanitized/elman
	printf '#!/bin/sh\nexec $(CXX) "$$@" $(SANITIZED)\n' > build/sanitized/cxx && chmod +x build/sanitized/cxx
	cd build/sanitized/elman/kernels/cpu && $(CXX) -std=c++17 -ffp-contract=fast $(SANITIZED) "-DELMAN_SOURCES=\"$$($(CURDIR)/$(BIN)/python -P -c 'from elman.built import digest; print(digest("."))')\"" -shared -fPIC -o $$(basename *.so) *.cpp -ldl -lpthread
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 PYTHONPATH=build/sanitized CXX=$(CURDIR)/build/sanitized/cxx XDG_CACHE_HOME=$(CURDIR)/build/sanitized/cache $(BIN)/python -m pytest -s -p no:cacheprovider tests/fuzz/test_native.py

wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build $(KERNEL)/*.so src/*.egg-info .pytest_cache .ruff_cache .hypothesis
