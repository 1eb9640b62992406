"""Imports that test processes share, made once in the server they are forked from.

Neither hstu nor sid_gr: a configuration may name only those of the package that a process trains. Polars is
imported here and not used, because its threads would not survive a fork; they start at its first use.
"""

import contextlib
import gc
import importlib
import logging
import warnings

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch.distributed.run  # noqa: E402
import torch.utils.tensorboard  # noqa: E402, F401

import commons.pipeline  # noqa: E402, F401

for package in ("commons.datasets", "commons.training"):
    with contextlib.suppress(ModuleNotFoundError):  # a copy of the core alone has neither
        importlib.import_module(package)

from tests.compile_kernels import compile_kernels  # noqa: E402

compile_kernels()
gc.collect()
gc.freeze()  # a collection would write to every object, and with that copy the pages that forks share
