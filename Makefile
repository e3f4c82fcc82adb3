# Every target sets up its own environment on first use; later runs start at once.
#   PYTHON=python3.12   the Python to build it with (3.11 or later)      VENV=folder   where it lives
#   FUZZ=2000           how many random models make fuzz draws           FUZZ_SEED=n   draw those of an earlier run
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=
FUZZ ?= 2000
FUZZ_SEED ?=
DEPS = setup.py pyproject.toml constraints.txt $(wildcard csrc/*)

.PHONY: demo test test-long fuzz lint docs bench-peers clean
.DEFAULT_GOAL := test

demo: $(VENV)/.stamp-demo
	$(VENV)/bin/python -m fastlr.demo

test: $(VENV)/.stamp-dev
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-long: $(VENV)/.stamp-dev
	$(VENV)/bin/python -m pytest -m long $(PYTEST_ARGS)

fuzz: $(VENV)/.stamp-dev
	FASTLR_FUZZ=$(FUZZ) FASTLR_FUZZ_SEED=$(FUZZ_SEED) $(VENV)/bin/python -m pytest -m long tests/test_fuzz.py $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

docs: $(VENV)/.stamp-dev
	$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo docs/_build/index.html

bench-peers: $(VENV)/.stamp-bench
	$(VENV)/bin/python -m bench.peers

$(VENV)/.stamp-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11, which constraints.txt needs: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and the rest into $(VENV): about 5 GB, some minutes the first time"
	$(PIP) install -q -c constraints.txt torch torchvision setuptools wheel
	@touch $@

# torch is there already, so the optional extension can be built against it
$(VENV)/.stamp-%: $(VENV)/.stamp-torch $(DEPS)
	$(PIP) install -q --no-build-isolation -c constraints.txt -e '.[$*]'
	@touch $@

.PRECIOUS: $(VENV)/.stamp-torch $(VENV)/.stamp-demo $(VENV)/.stamp-dev $(VENV)/.stamp-bench

clean:
	rm -rf build docs/_build demo-output demo-network *.egg-info .pytest_cache .ruff_cache .mypy_cache
