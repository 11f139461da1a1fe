# make quickstart     a real model learns on this machine      make test       the tests (make test-slow: the long ones)
# make setup          the environment alone, in .venv          make check      style, types, architecture
# make bench, docs    benchmarks; the docs' code blocks        make lock       resolve requirements/*.txt again

export FOURSTROKE_STARTED_UNIX := $(shell date +%s)

# CPython 3.11, which the lock files were resolved for.
PYTHON ?= python3
# The CPU build of torch: taken from where pip looks anyway, else from TORCH_INDEX. Any build of 2.13.0 for CPU will do:
# make TORCH=torch==2.13.0, or TORCH=/path/to/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
# Compiling all of the lock to bytecode would take as long as installing it, and a run imports a quarter: each module is
# compiled when it is first imported (the surroundings may not forbid it).
export PYTHONDONTWRITEBYTECODE :=
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-compile
PYTEST := $(VENV)/bin/python -m pytest
# More of pytest's markers to leave out: make test WITHOUT=" and not browser"
WITHOUT ?=

# Files beside the benchmarks that are parts of them.
BENCH_PARTS := $(addprefix benchmarks/,report.py recorded.py trl_arm.py)

.PHONY: quickstart setup test test-slow check bench docs lock clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.ready
	@$(VENV)/bin/fourstroke train quickstart

setup: $(VENV)/.ready

test: $(VENV)/.ready-dev
	$(PYTEST) -m "not slow and not gpu$(WITHOUT)"

test-slow: $(VENV)/.ready-dev
	$(PYTEST) -m "slow and not gpu"

check: $(VENV)/.ready-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PYTEST) -q tests/test_architecture.py tests/test_public_names.py

bench: $(VENV)/.ready
	@set -e; for script in $(filter-out $(BENCH_PARTS),$(wildcard benchmarks/*.py)); do echo "$$script"; $(VENV)/bin/python "$$script"; done

docs: $(VENV)/.ready-dev
	$(VENV)/bin/python docs/generate.py
	$(PYTEST) -q tests/test_docs.py

lock: $(VENV)/.ready
	$(VENV)/bin/python requirements/lock.py "$(TORCH)"

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# --- the environment: each stamp says that a stage is whole, so that a second call does nothing ----------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "$(PYTHON) is not Python 3.11, which the pinned wheels are built for; install it and run: make PYTHON=python3.11 ..." >&2; \
	  exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; install its venv module (Debian: python3-venv)" >&2; \
	  exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@echo "installing $(TORCH)"
	@$(PIP) "$(TORCH)" || { echo "looking for $(TORCH) at $(TORCH_INDEX)"; $(PIP) --index-url "$(TORCH_INDEX)" "$(TORCH)"; } || { \
	  echo "no CPU build of torch was found; name one: make TORCH=... (a version or a wheel) or TORCH_INDEX=..." >&2; exit 1; }
	@touch $@

$(VENV)/.ready: $(VENV)/.torch requirements/cpu.txt pyproject.toml
	@echo "installing requirements/cpu.txt"
	@$(PIP) -r requirements/cpu.txt
	@$(PIP) --no-build-isolation -e .
	@touch $@

# Packages without a wheel are built here. Only pycosat (for reasoning-gym) needs a C compiler: without one its tests say
# what is missing.
$(VENV)/.ready-dev: $(VENV)/.ready requirements/dev.txt requirements/compiled.txt
	@echo "installing requirements/dev.txt"
	@$(PIP) --no-build-isolation -r requirements/dev.txt
	@$(PIP) --no-build-isolation -r requirements/compiled.txt || echo "no C compiler: the tests of reasoning-gym are skipped"
	@touch $@
