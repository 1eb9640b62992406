"""What test processes import once, in the server that they are forked from.

Not polars, nor what imports it: it starts threads, which a fork does not take along.
"""

import logging
import warnings

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

import gin  # noqa: E402, F401
import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch.utils.tensorboard  # noqa: E402, F401
import torchmetrics  # noqa: E402, F401

import commons.pipeline  # noqa: E402, F401
from commons.distributed.placement import warm_up  # noqa: E402
from commons.distributed.shuffler_settings import ShufflerSettings  # noqa: E402

warm_up(ShufflerSettings(max_tokens_per_micro_batch=1))
