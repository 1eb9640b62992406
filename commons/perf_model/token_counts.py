"""Token counts, tile counts and columns of FLOPs, which the cost models share."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

Tokens = TypeVar("Tokens", "torch.Tensor", np.ndarray)

# Attention is counted in whole square tiles of this many tokens, whatever tiles a kernel uses.
ATTENTION_TILE = 32


def as_token_counts(tokens: Tokens) -> Tokens:
    """Returns `tokens` as int64, in the same container type and on the same device.

    Raises:
        TypeError: `tokens` are not a tensor or array of integers.
        ValueError: a number of tokens is negative. Checked only on the host, because the check would
            synchronize host and device on CUDA.
    """
    if isinstance(tokens, np.ndarray):
        if not np.issubdtype(tokens.dtype, np.integer):
            raise TypeError(f"tokens are {tokens.dtype}; expected integers")
        on_host = True
        as_int64 = tokens.astype(np.int64)
    else:
        import torch  # only here, because the advisor counts FLOPs of arrays without torch

        if not isinstance(tokens, torch.Tensor):
            raise TypeError(f"tokens are a {type(tokens).__name__}; expected a tensor or array of integers")
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens are {tokens.dtype}; expected integers")
        on_host = tokens.device.type == "cpu"
        as_int64 = tokens.long()
    if on_host and bool((as_int64 < 0).any()):
        raise ValueError(f"a sample has {int(as_int64.min())} tokens; expected at least 0")
    return as_int64


def num_tiles(tokens: Tokens) -> Tokens:
    """Returns the number of tiles that cover each number of tokens, in the same container type."""
    return (tokens + (ATTENTION_TILE - 1)) // ATTENTION_TILE


def as_columns(linear: Tokens, attention: Tokens) -> Tokens:
    """Stacks two `[batch_size]` counts as columns, `[batch_size, 2]`, in the same container type."""
    if isinstance(linear, np.ndarray):
        return np.stack([linear, attention], -1)
    import torch

    return torch.stack([linear, attention], -1)
