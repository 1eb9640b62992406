# Every target works as the first command in a fresh clone: what it needs is installed into .venv first.
#
# TORCH_INDEX_URL  a package index to take torch from; without a GPU, PyTorch's CPU index saves a download
#                  of several gigabytes. Unset: the default index.
# PYTHON           the interpreter that .venv is made with.
# MODEL            the demo's model: hstu or sid_gr.
# SETS             for versions: versions of torch, as in 2.14.1, or 2.13.0/3.12 for one Python of several; unset: all.
# DATA             a folder with MovieLens 100K's u.data, for bench-loading, bench-partition and bench-shuffle;
#                  without, they only print.
# CHECKOUT         for bench-first-plan: a folder with an older state of this repository, to compare with.
# GPU_PYTHON       for gpu-check: the Python of an environment with torch for CUDA, into which nothing is installed;
#                  unset: .venv, whose fbgemm is for CPUs.

PYTHON ?= python3.11
TORCH_INDEX_URL ?=
MODEL ?= hstu
SETS ?=
DATA ?=
CHECKOUT ?=
GPU_PYTHON ?=
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint format tables bench-attention bench-calibration bench-checkpoint bench-first-plan bench-gather bench-groups bench-kuairand bench-learning bench-loading bench-lookups bench-micro-batch bench-padding bench-partition \
	bench-recompute bench-shuffle bench-split bench-split-samples bench-tokens check-kernels cluster-check gpu-check soak versions clean

help:  ## print this list
	@echo "make TARGET first installs into $(VENV) what the target needs:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-20s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED)  ## train with and without balancing, replay 8 ranks, draw a picture: minutes on 2 cores, as it says at its start
	$(RUN) -m benchmarks.demo out/demo/$(MODEL) --model $(MODEL)

test: $(INSTALLED)  ## run all tests, on real gloo processes
	$(RUN) -m pytest

lint: $(INSTALLED)  ## ruff check, ruff format --check, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED)  ## let ruff fix what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

tables: $(INSTALLED)  ## write the marked tables of all pages from benchmarks/results
	$(RUN) -m benchmarks.tables

bench-attention: $(INSTALLED)  ## time of attention kernels, on the device that there is
	$(RUN) -m benchmarks.attention

bench-calibration: $(INSTALLED)  ## balance by measured costs against FLOPs
	$(RUN) -m benchmarks.calibration

bench-checkpoint: $(INSTALLED)  ## what a checkpoint costs a step
	$(RUN) -m benchmarks.checkpoint_stall

bench-first-plan: $(INSTALLED)  ## CPU time of compiling, until the first plan of a new process
	$(RUN) -m benchmarks.first_plan $(CHECKOUT)

bench-gather: $(INSTALLED)  ## time of the planning gather by number of processes
	$(RUN) -m benchmarks.plan_gather

bench-groups: $(INSTALLED)  ## ranks per user, moves and time where samples of a user belong together
	$(RUN) -m benchmarks.partition.groups_at_size

bench-kuairand: $(INSTALLED)  ## memory and time of preparing KuaiRand's logs
	$(RUN) -m benchmarks.kuairand_preprocess

bench-learning: $(INSTALLED)  ## learned costs, and a slow rank
	$(RUN) -m benchmarks.learning

bench-loading: $(INSTALLED)  ## imbalance and padding if batches are loaded by length
	$(RUN) -m benchmarks.bucket_loading $(DATA)

bench-lookups: $(INSTALLED)  ## steps in which embedding lookups take a share
	$(RUN) -m benchmarks.lookups

bench-micro-batch: $(INSTALLED)  ## micro-batches: their balance, memory and time
	$(RUN) -m benchmarks.micro_batch

bench-padding: $(INSTALLED)  ## that a batch costs the sum of its samples
	$(RUN) -m benchmarks.padding

bench-partition: $(INSTALLED)  ## balance, moves and time of the partition algorithms
	$(RUN) -m benchmarks.partition $(DATA)

bench-recompute: $(INSTALLED)  ## memory and time of recomputed activations
	$(RUN) -m benchmarks.recompute

bench-shuffle: $(INSTALLED)  ## what the stage costs a step
	$(RUN) -m benchmarks.shuffle $(DATA)

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

soak: $(INSTALLED)  ## kill ranks at random; losses must not change
	$(RUN) -m benchmarks.soak

bench-split-samples: $(INSTALLED)  ## samples cut into pieces on several ranks
	$(RUN) -m benchmarks.split_samples

bench-tokens: $(INSTALLED)  ## tokens and memory of the fullest rank under a token tolerance
	$(RUN) -m benchmarks.token_tolerance

bench-split: $(INSTALLED)  ## splitting a batch on a controller
	$(RUN) -m benchmarks.controller_split

# Needs python3.11, python3.12 and python3.13.
versions: $(INSTALLED)  ## test the core with every set of torch, torchrec and fbgemm
	$(RUN) -m ci.versions $(SETS) $(if $(TORCH_INDEX_URL),--torch-index-url "$(TORCH_INDEX_URL)")

$(INSTALLED): pyproject.toml ci/install ci/constraints.txt
	ci/install $(VENV) "$(PYTHON)" "$(TORCH_INDEX_URL)"
	touch $@

clean:  ## remove .venv, out and build
	rm -rf $(VENV) out build *.egg-info
