# Every target works as the first command in a fresh clone: what it needs is installed into .venv first.
#
# TORCH_INDEX_URL  a package index to take torch from; without a GPU, PyTorch's CPU index saves a download
#                  of several gigabytes. Unset: the default index.
# PYTHON           the interpreter that .venv is made with.
# MODEL            the demo's model: hstu or sid_gr.
# SETS             for versions: versions of torch, as in 2.14.1, or 2.13.0/3.12 for one Python of several; unset: all.
# DATA             a folder with MovieLens 100K's u.data, for bench-loading, bench-partition and bench-shuffle;
#                  without, they only print.
# GPU_PYTHON       for gpu-check: the Python of an environment with torch for CUDA, into which nothing is installed;
#                  unset: .venv, whose fbgemm is for CPUs.

PYTHON ?= python3.11
TORCH_INDEX_URL ?=
MODEL ?= hstu
SETS ?=
DATA ?=
GPU_PYTHON ?=
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format tables bench-attention bench-calibration bench-checkpoint bench-gather bench-kuairand bench-learning bench-loading bench-lookups bench-micro-batch bench-padding bench-partition \
	bench-recompute bench-shuffle bench-split bench-split-samples bench-window check-kernels cluster-check gpu-check soak versions clean

demo: $(INSTALLED)
	$(RUN) -m benchmarks.demo out/demo/$(MODEL) --model $(MODEL)

test: $(INSTALLED)
	$(RUN) -m pytest

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Writes the tables between markers on all pages, from benchmarks/results.
tables: $(INSTALLED)
	$(RUN) -m benchmarks.tables

bench-attention: $(INSTALLED)
	$(RUN) -m benchmarks.attention

bench-calibration: $(INSTALLED)
	$(RUN) -m benchmarks.calibration

bench-checkpoint: $(INSTALLED)
	$(RUN) -m benchmarks.checkpoint_stall

bench-gather: $(INSTALLED)
	$(RUN) -m benchmarks.plan_gather

bench-kuairand: $(INSTALLED)
	$(RUN) -m benchmarks.kuairand_preprocess

bench-learning: $(INSTALLED)
	$(RUN) -m benchmarks.learning

bench-loading: $(INSTALLED)
	$(RUN) -m benchmarks.bucket_loading $(DATA)

bench-lookups: $(INSTALLED)
	$(RUN) -m benchmarks.lookups

bench-micro-batch: $(INSTALLED)
	$(RUN) -m benchmarks.micro_batch

bench-padding: $(INSTALLED)
	$(RUN) -m benchmarks.padding

bench-partition: $(INSTALLED)
	$(RUN) -m benchmarks.partition $(DATA)

bench-recompute: $(INSTALLED)
	$(RUN) -m benchmarks.recompute

bench-shuffle: $(INSTALLED)
	$(RUN) -m benchmarks.shuffle $(DATA)

# Needs no GPU.
check-kernels: $(INSTALLED)
	$(RUN) -m ci.check_kernels

cluster-check: $(INSTALLED)
	$(RUN) -m benchmarks.cluster_check

ifeq ($(GPU_PYTHON),)
gpu-check: $(INSTALLED)
	$(RUN) -m benchmarks.gpu_check
else
gpu-check:
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m benchmarks.gpu_check
endif

soak: $(INSTALLED)
	$(RUN) -m benchmarks.soak

bench-window: $(INSTALLED)
	$(RUN) -m benchmarks.window

bench-split-samples: $(INSTALLED)
	$(RUN) -m benchmarks.split_samples

bench-split: $(INSTALLED)
	$(RUN) -m benchmarks.controller_split

# Needs python3.11, python3.12 and python3.13.
versions: $(INSTALLED)
	$(RUN) -m ci.versions $(SETS) $(if $(TORCH_INDEX_URL),--torch-index-url "$(TORCH_INDEX_URL)")

$(INSTALLED): pyproject.toml ci/install ci/constraints.txt
	ci/install $(VENV) "$(PYTHON)" "$(TORCH_INDEX_URL)"
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
