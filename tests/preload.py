"""Imports that test processes share, made once in the server they are forked from.

Neither hstu nor sid_gr: a configuration may name only those of the package that a process trains. Polars is
imported here and not used, because its threads would not survive a fork; they start at its first use.
"""

import gc
import importlib
import importlib.util
import logging
import warnings

gc.disable()  # collections take a third of the time that imports do
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

import hypothesis  # noqa: E402, F401
import numba  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torchrec.distributed.train_pipeline  # noqa: E402, F401

from tests.rank_server import serve_fresh_forks  # noqa: E402

serve_fresh_forks()

import commons.pipeline  # noqa: E402, F401
from tests.compiled import compile_kernels  # noqa: E402

for optional in ("torch.utils.tensorboard", "commons.datasets", "commons.training"):
    if importlib.util.find_spec(optional):
        importlib.import_module(optional)
compile_kernels()
gc.collect()
gc.freeze()  # a collection would write to every object, and with that copy the pages that forks share
gc.enable()
