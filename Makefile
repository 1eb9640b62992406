# Every target works as the first command in a fresh clone: what it needs is installed into .venv first.
#
# TORCH_INDEX_URL  a package index to take torch from; without a GPU, PyTorch's CPU index saves a download
#                  of several gigabytes. Unset: the default index.
# PYTHON           the interpreter that .venv is made with.
# MODEL            the demo's model: hstu or sid_gr.
# SETS             for versions: versions of torch, as in 2.14.1, or 2.13.0/3.12 for one Python of several; unset: all.
# NAME             for bench: what to measure.
# SEED             for test-random: the number that cases are drawn by; unset: today's date.
# WITHOUT          for core-alone: names of extensions to leave out; the copy has all others.
# DATA             for bench: a folder with data. loading, partition and public-data take MovieLens 100K's u.data, and
#                  only print without; movielens and retrieval need u.data and u.user.
# GPU_PYTHON       for gpu-check and gpu-report: the Python of an environment with torch for CUDA, into which nothing is
#                  installed. Unset, gpu-check runs in .venv, whose fbgemm is for CPUs, and gpu-report installs its own.

PYTHON ?= python3.11
TORCH_INDEX_URL ?=
MODEL ?= hstu
SETS ?=
SEED ?= $(shell date +%Y%m%d)
NAME ?=
WITHOUT ?=
DATA ?=
GPU_PYTHON ?=
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DOCS := out/docs-venv
# Tests that start programs, and those of models, data sets, and costs that are learned over many steps.
SLOW := e2e examples docs benchmarks recorded_cuda hstu sid_gr commons/training commons/datasets commons/advisor \
        test_gradients.py commons/extensions/learned_costs commons/partition/test_compiled.py commons/test_independence.py

.PHONY: help demo test test-fast test-random core-alone lint format docs tables bench check-kernels cluster-check gpu-check gpu-report soak versions clean

help:  ## print this list
	@echo "make TARGET first installs into $(VENV) what the target needs:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "Each NAME of make bench NAME=... writes its figures to benchmarks/results, and its tables to the pages:"
	@sed -n 's/^#- /  /p' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED)  ## train with and without balancing, replay 8 ranks, draw a picture: minutes on 2 cores, as it says at its start
	$(RUN) -m benchmarks.demo out/demo/$(MODEL) --model $(MODEL)

test: $(INSTALLED)  ## run all tests, on real gloo processes
	$(RUN) -m pytest

test-fast: $(INSTALLED)  ## run the tests of the core and of extensions, with fewer drawn cases
	$(RUN) -m pytest --hypothesis-profile=fast $(addprefix --ignore=tests/,$(SLOW))

test-random: $(INSTALLED)  ## draw 500 new cases of each property, by today's date or SEED
	@echo "SEED=$(SEED)"
	$(RUN) -m pytest -m hypothesis --hypothesis-profile=random --hypothesis-seed=$(SEED) --timeout=3600

core-alone: $(INSTALLED)  ## before a release: test the core in a copy without extensions; WITHOUT: with all but these
	$(RUN) -m ci.core_alone $(if $(WITHOUT),--without $(WITHOUT))

lint: $(INSTALLED)  ## ruff check, ruff format --check, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED)  ## let ruff fix what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# In an environment of its own. Code that build/ has kept of a deleted module would enter the wheel.
docs: $(DOCS)/.installed  ## build the documentation site, with the names of the built wheel, in out/site
	rm -rf build out/wheel
	$(DOCS)/bin/python -m pip --quiet wheel --no-deps --wheel-dir out/wheel .
	$(DOCS)/bin/python -m pip --quiet install --no-deps --force-reinstall out/wheel/*.whl
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" $(DOCS)/bin/mkdocs --quiet build --strict

$(DOCS)/.installed: ci/docs-requirements.txt
	"$(PYTHON)" -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --quiet install --requirement ci/docs-requirements.txt
	touch $@

tables: $(INSTALLED)  ## write the marked tables of all pages from benchmarks/results
	$(RUN) -m benchmarks.tables

#- attention      time of attention kernels, on the device that there is
#- checkpoint     what a checkpoint costs a step
#- exchange-kernels  kernels and host waits of an exchange, on a recorded GPU
#- first-plan     CPU time of compiling, until the first plan of a new process
#- gather         time of the planning gather by number of processes
#- getting-started  the first training of docs/getting-started.md, off and on in turns
#- groups         ranks per user, and time to plan, where samples of a user belong together
#- kuairand       memory of preparing KuaiRand's logs
#- loading        imbalance if batches are loaded by length
#- micro-batch    micro-batches: their memory and time
#- movielens      AUC on MovieLens 100K with and without the stage
#- padded         models that pad: computed loads of ranks, and steps of two
#- partition      balance, moves and time of the partition algorithms
#- pieces         samples cut into pieces on several ranks
#- plans          time of plans of 8 to 4,096 ranks, and the moves that they make
#- public-data    what balancing gains on public data sets, by their published lengths
#- retrieval      HR@10 and NDCG@10 on MovieLens 100K, beside simpler models
#- shuffle        what the stage costs a step
ifeq ($(NAME),)
bench: help  ## measure NAME; without, print this list
else
bench: $(INSTALLED)
	$(RUN) -m benchmarks $(NAME) $(DATA)
endif

check-kernels: $(INSTALLED)  ## compile the Triton kernels for GPUs: three minutes of CPU time, no GPU
	$(RUN) -m ci.check_kernels

cluster-check: $(INSTALLED)  ## 64 processes plan and exchange; one is killed
	$(RUN) -m benchmarks.cluster_check

ifeq ($(GPU_PYTHON),)
gpu-check: $(INSTALLED)  ## run on GPUs what the tests run on CPUs
	$(RUN) -m benchmarks.gpu_check
else
gpu-check:
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m benchmarks.gpu_check
endif

ifeq ($(GPU_PYTHON),)
gpu-report:  ## on two GPUs: install torch for CUDA, check, train off, on and off again, write one file; 15 minutes
	ci/gpu_report
else
gpu-report:
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m benchmarks.gpu_report
endif

soak: $(INSTALLED)  ## kill ranks at random; losses must not change
	$(RUN) -m benchmarks.soak

# Needs python3.11, python3.12 and python3.13.
versions: $(INSTALLED)  ## test the core with every set of torch, torchrec and fbgemm
	$(RUN) -m ci.versions $(SETS) $(if $(TORCH_INDEX_URL),--torch-index-url "$(TORCH_INDEX_URL)")

$(INSTALLED): pyproject.toml ci/install ci/constraints.txt
	ci/install $(VENV) "$(PYTHON)" "$(TORCH_INDEX_URL)"
	touch $@

clean:  ## remove .venv, out and build
	rm -rf $(VENV) out build *.egg-info
