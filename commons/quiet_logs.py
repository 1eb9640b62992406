"""Import before torch and torchrec to silence their start-up warnings.

Only entry points import it, because a library should not change the loggers of its host.
"""

import logging
import os
import warnings

# Warns at import that a function's meaning has changed; nothing here calls it.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
# TorchRec logs its own deprecations, and every step of sharding, as warnings.
logging.getLogger("torchrec").setLevel(logging.ERROR)
# Our messages are whole sentences, so no level and no logger's name precedes them.
logging.basicConfig(format="%(message)s")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|torchmetrics)\b.*")
