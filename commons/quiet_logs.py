"""Silences the start-up warnings of torch and torchrec when imported before them, and makes stdout forgiving.

Only entry points import it, because a library should not change the loggers and streams of its host.
"""

import io
import logging
import os
import sys
import warnings
from contextlib import suppress

if isinstance(sys.stdout, io.TextIOWrapper):  # not a test's
    with suppress(OSError):  # its descriptor may have become a pipe, whose position is unknown
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: no character may end a run

# This logger warns at import that a function's meaning has changed. Nothing here calls the function.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
# TorchRec logs its own deprecations, and every step of sharding, as warnings.
logging.getLogger("torchrec").setLevel(logging.ERROR)
# Our messages are whole sentences, so they need neither a level nor a logger's name before them.
logging.basicConfig(format="%(message)s")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|torchmetrics)\b.*")
