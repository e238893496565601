# Two commands on a fresh machine with Python 3.11 and pip: `make demo` and `make test`.
# Each makes .venv and installs what constraints-dev.txt pins; a second run installs nothing.

.NOTPARALLEL:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-benchmarks

PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PACKAGES := tdstore $(foreach plugin,$(PLUGINS),$(plugin)/$(subst -,_,$(notdir $(plugin))))

# What builds our distributions, and what tests and shows them. Versions are in constraints-dev.txt.
BUILD_TOOLS := hatchling editables
DEV_TOOLS := pytest pytest-timeout pytest-xdist hypothesis tensordict mypy 'pyright[nodejs]' ruff tqdm ale-py gymnasium \
    'moto[server]' boto3 s3fs xarray safetensors distributed loky cloudpickle redis rich pandas pyarrow hoptorch ray plotly torchdata \
    polars duckdb datasets pillow
# Of twenty thousand files a few thousand are ever imported, and compiled then: compiling all takes 90 s of CPU.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints-dev.txt

# Tests run on this many processes; PYTEST_WORKERS=0 for one, in this process. Each imports all tests first, which takes
# half a minute of CPU and a gigabyte; more of them than two cores, as tests wait for servers and for other processes.
PYTEST_WORKERS ?= 4
# What to look at when the whole takes longer than it did.
SLOWEST := --durations=20 --durations-min=10
# Each process of a tier imports all of its tests first, so more of them than cores cost more than they give, unless
# tests wait for other processes.
QUICK_WORKERS ?= 2
LOCAL_WORKERS ?= 3

# Bytecode is kept: otherwise each process compiles tdstore, and rewrites the asserts of all tests, for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-quick test-local test-cuda lint format types pytest house docs kit conformance bench bench-quick bench-compare bench-page install clean

help:
	@echo 'While you work:'
	@echo '  make pytest ARGS="tests/test_keys.py -x"   some tests'
	@echo '  make test-quick    tests without servers, processes, files and other packages: a minute'
	@echo '  make format        format the code, and mend what ruff can'
	@echo '  make house         the rules of the house: layers, names, docstrings, sizes'
	@echo 'Before you push:'
	@echo '  make lint types    ruff; mypy --strict'
	@echo '  make test-local    test-quick, and tests with files and processes of this machine: some minutes'
	@echo '  make docs          run the code blocks of the documents, and follow the tutorial'
	@echo '  make kit           the conformance kit on every local backend'
	@echo '  make test          lint, types and all tests, as CI does: with servers and the tensordict package'
	@echo '  make test-cuda     on a machine with a GPU: all tests, and those that need it (ARGS="-m cuda": only these)'
	@echo 'Others:'
	@echo '  make demo          play Atari, store it on every backend, check and compare (ARGS=--quick: a small one)'
	@echo '  make bench         the benchmarks, into bench.json and docs/images: ten minutes'
	@echo '  make bench-quick   operations and stores, into bench-quick.json: two minutes'
	@echo '  make bench-compare BEFORE=a.json AFTER=b.json   what moved between two runs'
	@echo '  make bench-page RESULTS=bench.json   tables and pictures, into docs/benchmarks.md and docs/images'
	@echo '  make conformance   run the kit on our backends, and write docs/reference/conformance.md'
	@echo '  make install       make $(VENV), which all of these do when they need it'
	@echo '  make clean         remove caches and demo-data; the environment stays (rm -r $(VENV) for that)'

demo: $(STAMP)
	$(BIN)/python examples/atari_demo $(ARGS)

# mypy has one core for half a minute: the tests have the other meanwhile. What it says comes last.
test: lint
	@said=$$(mktemp); $(BIN)/mypy --strict $(PACKAGES) >"$$said" 2>&1 & types=$$!; \
	echo '$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(SLOWEST) $(ARGS)'; \
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(SLOWEST) $(ARGS); tests=$$?; \
	wait $$types; types=$$?; echo '$(BIN)/mypy --strict $(PACKAGES)'; cat "$$said"; rm -f "$$said"; \
	exit $$((tests ? tests : types))

# Markers come from what a test uses: tests/tiers.py.
test-quick: $(STAMP)
	$(BIN)/python -m pytest -m quick -n $(QUICK_WORKERS) --dist worksteal $(ARGS)

test-local: $(STAMP)
	$(BIN)/python -m pytest -m local -n $(LOCAL_WORKERS) --dist worksteal $(ARGS)

# Each process has a CUDA context, of half a gigabyte.
test-cuda: $(STAMP)
	TDSTORE_CUDA=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(SLOWEST) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy --strict $(PACKAGES)

pytest: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

house: $(STAMP)
	$(BIN)/python -m pytest tests/house $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m pytest tests/examples/test_docs.py $(ARGS)

kit: $(STAMP)
	$(BIN)/python -m tdstore.testing memory --no-location
	$(BIN)/python -m tdstore.testing shared --location shm://kit-
	$(BIN)/python -m tdstore.testing memmap
	$(BIN)/python -m tdstore.testing h5
	$(BIN)/python -m tdstore.testing zarr
	$(BIN)/python -m tdstore.testing icechunk
	$(BIN)/python -m tdstore.testing remote --location memory://kit- --one-process "memory:// is the memory of one process"

conformance: $(STAMP)
	$(BIN)/python -m tests.testing.conformance

bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/suite.py run --json bench.json --pictures docs/images $(ARGS)

RESULTS ?= bench.json
bench-page: $(BENCH_STAMP)
	$(BIN)/python benchmarks/suite.py page $(RESULTS) docs/benchmarks.md
	$(BIN)/python benchmarks/suite.py draw $(RESULTS) docs/images

bench-quick: $(BENCH_STAMP)
	$(BIN)/python benchmarks/suite.py run --quick --json bench-quick.json $(ARGS)

bench-compare: $(STAMP)
	$(BIN)/python benchmarks/suite.py compare $(BEFORE) $(AFTER)

$(BENCH_STAMP): $(STAMP) benchmarks/requirements.txt
	$(PIP) --requirement benchmarks/requirements.txt
	@touch $@

install: $(STAMP)

# Our own distributions are given in one command, as folders: nothing is looked up by their names.
# They are built with the pinned tools rather than with whatever is newest today.
$(STAMP): constraints-dev.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	@test -x $(BIN)/python || $(MAKE) --no-print-directory $(VENV)
	$(PIP) $(BUILD_TOOLS)
	$(PIP) --no-build-isolation --editable . $(PLUGINS:%=--editable %) $(DEV_TOOLS)
	$(PIP) --no-deps agilerl torchrl  # tests read agilerl's sources; torchrl pins tensordict below 0.15, and runs with it
	@touch $@

# Debian keeps ensurepip in a package of its own; pip can fill the environment from outside instead.
$(VENV):
	@for python in $(PYTHON) python3.11 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if test -z "$$found"; then \
	    echo 'tdstore needs Python 3.11 or newer, and neither python3.11 nor python3 is one.' >&2; \
	    echo 'Hint: install it, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11' >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$found"; \
	if $$found -c 'import ensurepip' 2>/dev/null; then $$found -m venv $(VENV); \
	else $$found -m venv --without-pip $(VENV) && $$found -m pip --python $(VENV)/bin/python install pip; fi

clean:
	rm -rf demo-data build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf
