"""One layer of HSTU.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import silu

from hstu.modules.attention_backend import Attention
from hstu.modules.recompute import recomputed_in_backward


class HSTULayer(nn.Module):
    """`u, v, q, k = split(SiLU(Linear(LayerNorm(x))))`, then `x + Dropout(Linear(LayerNorm(A v) * u))`.

    `A v` is HSTU attention, such as `jagged_hstu_attention`.

    Args:
        hidden_size: width of a token, d.
        num_heads, head_dim: number and width of the heads, H and dh; H·dh need not be d.
        dropout: dropout probability of the layer's output.
        norm_epsilon: epsilon of both layer norms.
        recompute_input_layernorm: whether backward recomputes the first layer norm from x instead of keeping
            its result, `[total_tokens, d]`.
        recompute_input_silu: whether backward recomputes u, v, q, and k from the projection, which is kept
            anyway, instead of keeping `[total_tokens, 4·H·dh]`.
        device: device of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        dropout: float,
        norm_epsilon: float,
        recompute_input_layernorm: bool = False,
        recompute_input_silu: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        attention_size = num_heads * head_dim
        self.num_heads = num_heads
        self.recompute_input_layernorm = recompute_input_layernorm
        self.recompute_input_silu = recompute_input_silu
        self.input_norm = nn.LayerNorm(hidden_size, eps=norm_epsilon, device=device)
        self.uvqk = nn.Linear(hidden_size, 4 * attention_size, device=device)
        self.output_norm = nn.LayerNorm(attention_size, eps=norm_epsilon, device=device)
        self.output = nn.Linear(attention_size, hidden_size, device=device)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Returns the output, `[total_tokens, hidden_size]` like x; `attention` is that of the batch."""
        projected = self._projected(x)
        uvqk = silu(projected)
        recompute = recomputed_in_backward(uvqk, silu, projected)
        with recompute if self.recompute_input_silu else nullcontext():
            u, v, q, k = uvqk.chunk(4, dim=-1)
            v, q, k = (part.unflatten(-1, (self.num_heads, -1)) for part in (v, q, k))
            attended = attention(q, k, v).flatten(1)
            return x + self.dropout(self.output(self.output_norm(attended) * u))

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recompute_input_layernorm:
            return self.uvqk(self.input_norm(x))
        normalized = self._normalized(x)
        with recomputed_in_backward(normalized, self._normalized, x):
            return self.uvqk(normalized)

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the first norm in autocast's dtype. Otherwise the linear layer would keep a cast copy."""
        normalized, device = self.input_norm(x), x.device.type
        if torch.is_autocast_enabled(device):
            return normalized.to(torch.get_autocast_dtype(device))
        return normalized
