"""Causal attention in tiles of matrix products, whose FLOPs `FlopCounterMode` counts."""

import math

import torch
import torch.nn.functional as F

from tests.commons.perf_model.internals import ATTENTION_TILE


def tiled_attention(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
    """Computes one sample in whole tiles up to the diagonal; k and v may have fewer heads."""
    num_tokens, num_heads, head_dim = q_THD.shape
    padding = -num_tokens % ATTENTION_TILE
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, padding)).repeat_interleave(num_heads // x.shape[1], 1).transpose(0, 1)
        for x in (q_THD, k_THD, v_THD)
    )
    blocks = [q.new_empty(num_heads, 0, head_dim)]
    for first in range(0, num_tokens, ATTENTION_TILE):
        last = first + ATTENTION_TILE
        scores = q[:, first:last] @ k[:, :last].mT / math.sqrt(head_dim)
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(first)
        blocks.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, :last])
    return torch.cat(blocks, 1).transpose(0, 1)[:num_tokens]
