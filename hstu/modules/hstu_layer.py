"""One layer of HSTU.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

import torch
from torch import nn

from hstu.modules.attention import jagged_hstu_attention
from hstu.modules.attention_tiles import AttentionTiles
from hstu.modules.triton_attention import triton_hstu_attention
from hstu.modules.triton_work import TritonWork


class HSTULayer(nn.Module):
    """`u, v, q, k = split(SiLU(Linear(LayerNorm(x))))`, then `x + Dropout(Linear(LayerNorm(A v) * u))`.

    `A v` is the jagged attention of `jagged_hstu_attention`, or the Triton kernels'.

    Args:
        hidden_size: width of a token, d.
        num_heads, head_dim: H and dh; H·dh need not be d.
        scaling_seqlen: constant divisor of the attention weights.
        dropout: dropout probability of the layer's output.
        norm_epsilon: epsilon of both layer norms.
        device: device of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        scaling_seqlen: float,
        dropout: float,
        norm_epsilon: float,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        attention_size = num_heads * head_dim
        self.num_heads = num_heads
        self.scaling_seqlen = scaling_seqlen
        self.input_norm = nn.LayerNorm(hidden_size, eps=norm_epsilon, device=device)
        self.uvqk = nn.Linear(hidden_size, 4 * attention_size, device=device)
        self.output_norm = nn.LayerNorm(attention_size, eps=norm_epsilon, device=device)
        self.output = nn.Linear(attention_size, hidden_size, device=device)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, samples: AttentionTiles | TritonWork) -> torch.Tensor:
        """Maps `[total_tokens, hidden_size]` to the same shape; `samples` are those of `x`."""
        uvqk = nn.functional.silu(self.uvqk(self.input_norm(x)))
        u, v, q, k = uvqk.chunk(4, dim=-1)
        v, q, k = (part.unflatten(-1, (self.num_heads, -1)) for part in (v, q, k))
        if isinstance(samples, TritonWork):
            attended = triton_hstu_attention(q, k, v, samples, self.scaling_seqlen)
        else:
            attended = jagged_hstu_attention(q, k, v, samples, self.scaling_seqlen)
        attended = attended.flatten(1)
        return x + self.dropout(self.output(self.output_norm(attended) * u))
