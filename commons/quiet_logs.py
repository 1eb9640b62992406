"""Silences the start-up warnings of torch and torchrec when imported before them.

Only entry points import it, because a library should not change the loggers of its host.
"""

import logging
import os
import warnings

# This logger warns at import that a function's meaning has changed. Nothing here calls the function.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
# TorchRec logs its own deprecations, and every step of sharding, as warnings.
logging.getLogger("torchrec").setLevel(logging.ERROR)
# Our messages are whole sentences, so they need neither a level nor a logger's name before them.
logging.basicConfig(format="%(message)s")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|torchmetrics)\b.*")
