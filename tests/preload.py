"""What test processes import once, in the server that they are forked from."""

import logging
import warnings

logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

import torchrec  # noqa: E402, F401
