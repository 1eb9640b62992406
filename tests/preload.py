"""Imports that test processes share, made once in the server they are forked from.

Neither hstu nor sid_gr: a configuration may name only those of the package that a process trains. Polars is
imported here and not used, because its threads would not survive a fork; they start at its first use.
"""

import gc
import logging
import warnings

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch.distributed.run  # noqa: E402
import torch.utils.tensorboard  # noqa: E402, F401

import commons.datasets  # noqa: E402
import commons.pipeline  # noqa: E402
import commons.training  # noqa: E402, F401
from commons.distributed.placement import warm_up  # noqa: E402
from commons.distributed.shuffler_settings import ShufflerSettings  # noqa: E402

warm_up(ShufflerSettings(max_tokens_per_micro_batch=1), has_groups=True)
warm_up(ShufflerSettings(equal_rows=False, split=True))
gc.collect()
gc.freeze()  # a collection would write to every object, and with that copy the pages that forks share
