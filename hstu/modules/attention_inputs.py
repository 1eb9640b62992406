"""Checks that all attention backends share."""

from __future__ import annotations

import torch


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_tokens: int, scaling_seqlen: float
) -> None:
    """Checks the inputs of HSTU attention.

    Args:
        q, k, v: `[total_tokens, num_heads, head_dim]` each.
        num_tokens: tokens of the batch's masks.
        scaling_seqlen: divisor of the attention weights.

    Raises:
        ValueError: shapes differ, the masks' tokens do not add up, or `scaling_seqlen` is not positive.
    """
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            "q, k and v must have one shape [total_tokens, num_heads, head_dim]; "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if num_tokens != q.shape[0]:
        raise ValueError(f"the masks have {num_tokens} tokens, but q, k and v have {q.shape[0]}")
    if not scaling_seqlen > 0:
        raise ValueError(f"scaling_seqlen is {scaling_seqlen}; expected a positive constant")
