"""Import this before torch and torchrec to spare the terminal their start-up warnings.

Only entry points do: a library that changes the loggers of its host is not a good guest.
"""

import logging
import os
import warnings

# Says at import that a function's meaning has changed; nothing here calls it.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
# TorchRec announces its own deprecations, and every step of sharding, as warnings.
logging.getLogger("torchrec").setLevel(logging.ERROR)
# Ours are whole sentences: no level, no logger's name before them.
logging.basicConfig(format="%(message)s")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|torchmetrics)\b.*")
