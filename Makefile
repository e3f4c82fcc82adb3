# Every target sets up its own environment on first use; later runs start at once.
#   PYTHON=python3.12   the Python to build it with (3.11 or later)      VENV=folder   where it lives
#   PYTEST_ARGS='-n0 tests/ops'   what tests run, and on how many processes (-n)
#   TORCH=2.7.1         another torch, in .venv-2.7.1 (the table of constraints.txt; Python 3.10 or later)
#   FUZZ=2000           how many random models make fuzz draws           FUZZ_SEED=n   draw those of an earlier run
SHELL := /bin/bash
PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(TORCH:%=-%)
CONSTRAINTS = $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=
PARALLEL = -n auto
FUZZ ?= 2000
FUZZ_SEED ?=
DEPS = setup.py pyproject.toml constraints.txt $(wildcard csrc/*)

.PHONY: demo test test-long fuzz lint docs bench bench-peers reproduce-small clean
.DEFAULT_GOAL := test

demo: $(VENV)/.stamp-run
	$(VENV)/bin/python -m fastlr demo

# compiled modules are kept, whatever the environment says: each worker, and each process of a test, would make them anew
test test-long: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.stamp-dev
	$(VENV)/bin/python -m pytest $(PARALLEL) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: $(VENV)/.stamp-dev
	$(VENV)/bin/python -m pytest -m long $(PARALLEL) --dist load --maxschedchunk 1 $(PYTEST_ARGS)

fuzz: $(VENV)/.stamp-dev
	FASTLR_FUZZ=$(FUZZ) FASTLR_FUZZ_SEED=$(FUZZ_SEED) $(VENV)/bin/python -m pytest -m long tests/ghost/test_fuzz.py $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m bench.reading

docs: $(VENV)/.stamp-dev
	$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo docs/_build/index.html

BENCH = $(VENV)/bin/python -m pytest -v -rx --benchmark-columns=median,rounds

# about ten minutes on two quiet cores; a line a test
bench: $(VENV)/.stamp-bench
	$(BENCH) bench -m 'not peer' --benchmark-json=bench/results/cpu/fastlr.json

# about half an hour
bench-peers: $(VENV)/.stamp-bench
	$(BENCH) bench/test_peers.py --benchmark-json=bench/results/cpu/peers.json
	$(VENV)/bin/python -m bench.table bench/results/cpu/peers.json --figure bench/results/cpu/peers.png

# The paper's experiments, small: DATA is a folder with ETTh1.csv, ETTh2.csv and IMAGES, a folder of images by
# class (Tiny ImageNet's, say); twenty minutes on two quiet cores. It may be interrupted, and goes on.
OUT ?= reproduction
DATA ?= $(FASTLR_DATA)
IMAGES ?= $(firstword $(wildcard $(DATA)/*magenet*/ $(DATA)/*mage[Nn]et*/))
FASTLR = OMP_NUM_THREADS=1 FASTLR_DATA=$(DATA) $(VENV)/bin/python -m fastlr
resumed = $(if $(wildcard $(OUT)/$(1)),--resume)

reproduce-small: $(VENV)/.stamp-run
	@test -f "$(DATA)/ETTh1.csv" -a -e "$(IMAGES)" || \
	  { echo "make reproduce-small DATA=folder IMAGES=folder: ETTh1.csv, ETTh2.csv and images are needed" >&2; exit 1; }
	test -e $(OUT)/store/index.json || $(FASTLR) data prepare $(IMAGES) $(OUT)/store --size 32
	$(FASTLR) continual small --data $(OUT)/store --out $(OUT)/continual --seeds 2 --at-once 2 $(call resumed,continual)
	$(FASTLR) transfer small --out $(OUT)/transfer --seeds 4 --at-once 2 $(call resumed,transfer)
	$(FASTLR) memorize vision-small --out $(OUT)/vision-small $(call resumed,vision-small)
	$(FASTLR) memorize series-small --out $(OUT)/series-small $(call resumed,series-small)
	for run in continual transfer; do $(FASTLR) report $(OUT)/$$run --out $(OUT)/results/$$run || exit 1; done
	$(FASTLR) report $(OUT)/vision-small $(OUT)/series-small --out $(OUT)/results/memorization

# of constraints.txt: a line of its table exactly, the rest as the most that is allowed
OTHER_TORCH = $$2 == "torch" && $$3 == v { print $$2 "==" $$3 "\n" $$4 "==" $$5 "\n" $$6 "==" $$7; found = 1 }; \
  /^[a-z]/ && !/^(torch|torchvision|triton|setuptools)==/ { sub("==", "<="); print }; END { exit !found }

$(VENV)/.stamp-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10 if "$(TORCH)" else 11))' || \
	  { echo "$(PYTHON) is too old for constraints.txt: make PYTHON=python3.12 ..., or TORCH=2.11.0 with 3.10" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),awk -v v=$(TORCH) '$(OTHER_TORCH)' constraints.txt >$(CONSTRAINTS) || \
	  { echo "TORCH=$(TORCH) is not in the table of constraints.txt" >&2; exit 1; })
	@echo "installing PyTorch and the rest into $(VENV): about 5 GB, some minutes the first time"
	$(PIP) install -q -c $(CONSTRAINTS) torch torchvision 'setuptools>=77' wheel ninja pybind11
	@touch $@

# torch is there already, so the optional extension can be built against it
$(VENV)/.stamp-%: $(VENV)/.stamp-torch $(DEPS)
	$(PIP) install -q --no-build-isolation -c $(CONSTRAINTS) -e '.[$*]'
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-torch $(DEPS)
	$(PIP) install -q --no-build-isolation -c $(CONSTRAINTS) -e .
	@touch $@

.PRECIOUS: $(VENV)/.stamp-torch $(VENV)/.stamp-run $(VENV)/.stamp-dev $(VENV)/.stamp-bench

clean:
	rm -rf build docs/_build demo-output *.egg-info .pytest_cache .ruff_cache .mypy_cache
