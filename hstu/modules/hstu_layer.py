"""One layer of HSTU.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from hstu.modules.attention_backend import Attention
from hstu.modules.hstu_config import HSTUConfig


class HSTULayer(nn.Module):
    """`u, v, q, k = split(SiLU(Linear(LayerNorm(x))))`, then `x + Dropout(Linear(LayerNorm(A v) * u))`.

    `A v` is HSTU attention, such as `jagged_hstu_attention`.
    """

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        attention_size = config.num_attention_heads * config.kv_channels
        self.input_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self.uvqk = nn.Linear(config.hidden_size, 4 * attention_size)
        self.output_norm = nn.LayerNorm(attention_size, eps=config.norm_epsilon)
        self.output = nn.Linear(attention_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Returns the output, `[total_tokens, hidden_size]` like x; `attention` is that of the batch."""
        if self.config.recompute_input_layernorm:
            # Backward stops at the linear layer, which saves only its inputs, so its product runs once.
            projected = checkpoint(
                self._projected, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
        else:
            projected = self._projected(x)
        uvqk = silu(projected)
        with _recomputed(uvqk, projected) if self.config.recompute_input_silu else nullcontext():
            u, v, q, k = uvqk.chunk(4, dim=-1)
            v, q, k = (part.unflatten(-1, (self.config.num_attention_heads, -1)) for part in (v, q, k))
            attended = attention(q, k, v).flatten(1)
            return x + self.dropout(self.output(self.output_norm(attended) * u))

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        return self.uvqk(self.input_norm(x))


# Shape, stride, and offset of a view.
_View = tuple[torch.Size, tuple[int, ...], int]


def _recomputed(uvqk: torch.Tensor, projected: torch.Tensor) -> saved_tensors_hooks:
    """Returns a context in which autograd saves no view of `uvqk`; backward computes `silu(projected)` again.

    All views share one computation per backward. `checkpoint` would also run attention again, and in steps
    with pieces the exchange of keys and values.
    """
    kept, dtype = projected.detach(), uvqk.dtype
    # While `uvqk` is alive, no other storage has its address, except that empty and meta ones share 0.
    address = uvqk.untyped_storage().data_ptr()
    recomputed, num_views, num_unused = kept, 0, 0

    def pack(saved: torch.Tensor) -> torch.Tensor | _View:
        nonlocal num_views
        if not address or saved.untyped_storage().data_ptr() != address or saved.dtype != dtype:
            return saved
        num_views += 1
        return saved.shape, saved.stride(), int(saved.storage_offset())

    def unpack(packed: torch.Tensor | _View) -> torch.Tensor:
        nonlocal recomputed, num_unused
        if isinstance(packed, torch.Tensor):
            return packed
        if not num_unused:
            recomputed, num_unused = silu(kept), num_views
        view, num_unused = recomputed.as_strided(*packed), num_unused - 1
        if not num_unused:
            recomputed = kept
        return view

    return saved_tensors_hooks(pack, unpack)
