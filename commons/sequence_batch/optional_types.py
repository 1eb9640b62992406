"""Types of TorchRec and tensordict, with stand-ins for types that cannot be imported.

A controller needs neither library, because its batches may be dicts of tensors. Only the stand-in for
`JaggedTensor` has instances, which hold the rows of jagged nested tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class _Absent:
    """A stand-in for a missing type, without instances."""


try:
    from tensordict import (
        MemoryMappedTensor,
        NonTensorData,
        NonTensorStack,
        TensorDict,
        TensorDictBase,
        is_tensorclass,
    )
except ImportError:
    MemoryMappedTensor = NonTensorData = NonTensorStack = TensorDict = TensorDictBase = _Absent  # type: ignore

    def is_tensorclass(obj: type) -> bool:
        """Returns False."""
        return False


try:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from torchrec.streamable import Pipelineable
except ImportError:
    KeyedJaggedTensor = KeyedTensor = Pipelineable = _Absent

    class JaggedTensor:  # type: ignore[no-redef]
        """Rows of different lengths, one after another in `values`, without weights."""

        def __init__(
            self, values: torch.Tensor, lengths: torch.Tensor, weights: None = None, offsets: Any = None
        ) -> None:
            self.values, self.lengths = lambda: values, lambda: lengths
            self.offsets = lambda: F.pad(lengths.cumsum(0), (1, 0)) if offsets is None else offsets
            self.weights_or_none = lambda: weights
