# Two commands matter: `make demo` and `make test`. Both set up .venv first; nothing else is needed than Python 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test setup lint format types unit simulation store crash containment cluster chaos bench scaling docs clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

demo: setup  ## a small RL run, killed and resumed bit for bit (ARGS="--steps 9 --keep /tmp/kept" goes to `lastgood demo`)
	@$(BIN)/lastgood demo $(ARGS)

# What needs one core runs two at a time; what starts clusters, or freezes disks, runs alone.
test: setup  ## everything that CI runs
	@$(MAKE) --no-print-directory -j2 --output-sync lint types unit simulation store crash
	@$(MAKE) --no-print-directory -j1 containment cluster

setup: $(READY)  ## .venv with the pinned dependencies

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "$(PYTHON) must be Python 3.11 or newer with venv (Debian: apt-get install python3-venv)."; \
	    echo "Another one: make PYTHON=/path/to/python3.11 ..."; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[demo,dev]'
	touch $@

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The type checker sees the checkout under its import name (CONTRIBUTING.md, "Layout").
types: setup  ## basedpyright in standard mode
	mkdir -p build/types/lastgood
	ln -sfnr __init__.py py.typed client coordinator storage workers build/types/lastgood/
	ln -sfnr tests benchmarks build/types/
	$(BIN)/basedpyright

unit: setup  ## tests of pure code: seconds
	$(BIN)/python -m pytest -q tests/unit

simulation: setup  ## the protocol under simulated crashes: under a minute
	$(BIN)/python -m pytest -q tests/simulation

store: setup  ## one conformance suite over all stores
	$(BIN)/python -m pytest -q tests/store

crash: setup  ## a kill, a power loss and errors at every file operation: two minutes
	$(BIN)/python -m pytest -q tests/crash

containment: setup  ## full, read-only, frozen and lost disks, stalled members: under a minute; mounts need root
	$(BIN)/python -m pytest -q tests/containment

cluster: setup  ## real Ray, real FSDP2, real SIGKILLs: minutes
	$(BIN)/python -m pytest -q --durations=10 tests/cluster
	$(BIN)/python -m pytest -q tests/chaos

chaos: setup  ## the kill campaign (make chaos TRIALS=300 SEED=7; docs/chaos.md): hours if you like
	$(BIN)/python -m tests.chaos --trials $(or $(TRIALS),30) --seed $(or $(SEED),1) $(ARGS)

bench: setup  ## everything docs/performance.md tells, on a quiet machine (ARGS="--gb 1 --only stall,peers"): long
	$(BIN)/python -m benchmarks $(ARGS)

scaling: setup  ## what a commit costs with 10 to 10,000 members: minutes (ARGS="--json")
	$(BIN)/python -m benchmarks.scaling $(ARGS)

docs: setup  ## pages that are made from code
	mkdir -p build
	$(BIN)/python -m lastgood.client.options_page > build/options.md
	cp build/options.md docs/options.md

clean:  ## everything that was made, except .venv
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
