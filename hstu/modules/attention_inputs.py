"""Checks of inputs that all attention backends share."""

from __future__ import annotations

import torch


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_tokens: int,
    scaling_seqlen: float,
    has_holes: bool = False,
) -> None:
    """Checks the inputs of HSTU attention.

    Args:
        q, k, v: `[total_tokens, num_heads, head_dim]` each.
        num_tokens: number of tokens in the batch's masks, or the end of the last mask if there are holes.
        scaling_seqlen: divisor of the attention weights.
        has_holes: whether there may be tokens that belong to no mask.

    Raises:
        ValueError: shapes differ, the masks' tokens do not add up, or `scaling_seqlen` is not positive.
    """
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            "q, k and v must have one shape [total_tokens, num_heads, head_dim]; "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if num_tokens > q.shape[0] or (num_tokens < q.shape[0] and not has_holes):
        raise ValueError(f"the masks have {num_tokens} tokens, but q, k and v have {q.shape[0]}")
    if not scaling_seqlen > 0:
        raise ValueError(f"scaling_seqlen is {scaling_seqlen}; expected a positive constant")


def check_fetched(k: torch.Tensor, fetched: torch.Tensor, num_locations: int) -> None:
    """Checks keys and values that were fetched from other ranks.

    Args:
        k: this rank's keys, `[total_tokens, num_heads, head_dim]`.
        fetched: `[num_fetched, 2, num_heads, head_dim]`.
        num_locations: number of own and fetched tokens that the keys of pieces require.

    Raises:
        ValueError: shapes or dtypes differ, or there are fewer than `num_locations` tokens.
    """
    if fetched.shape[1:] != (2, *k.shape[1:]) or fetched.dtype != k.dtype:
        raise ValueError(
            f"fetched has shape {tuple(fetched.shape)} and {fetched.dtype}; "
            f"expected [num_fetched, {', '.join(map(str, (2, *k.shape[1:])))}] and {k.dtype}"
        )
    if num_locations > len(k) + len(fetched):
        raise ValueError(
            f"key_tokens has location {num_locations - 1}, but there are {len(k)} tokens on this rank and "
            f"{len(fetched)} fetched ones"
        )
