"""Configuration of the HSTU models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hstu.modules.attention_backend import BACKENDS
from hstu.modules.cutlass_attention import unsupported


@dataclass(frozen=True)
class HSTUConfig:
    """Sizes and settings shared by all HSTU models.

    Attributes:
        num_layers: number of HSTU layers.
        hidden_size: width of a token.
        num_heads: number of attention heads.
        head_dim: width of a head; `num_heads * head_dim` need not be `hidden_size`.
        scaling_seqlen: divisor of the attention weights, a constant such as `full_sequence_length`. A value
            taken from the batch would make a sample's result depend on the samples it is batched with.
        item_embedding_dim: width of item and action embeddings; −1 for `hidden_size`.
        contextual_embedding_dim: width of contextual embeddings; −1 for `hidden_size`.
        hidden_dropout: dropout probability after each layer.
        norm_epsilon: epsilon of all layer norms.
        is_causal: whether attention is causal. False lets history tokens attend to later ones.
        dtype: torch.bfloat16 and torch.float16 run the dense part under autocast with float32 parameters;
            torch.float32 runs it without.
        num_position_buckets: number of positions with their own embedding; later positions share the last.
        disable_contextual_mask: whether contextual tokens are causal, too; otherwise they all attend to each
            other.
        attention_backend: "pytorch", "triton", or "cutlass". The last two need CUDA. "cutlass" runs kernels
            of the package fbgemm_gpu_hstu. It needs a 16-bit `dtype`, a `head_dim` of 32, 64, 128, or 256,
            causal attention, and at most one contextual token per sample, unless these tokens are causal.
        recompute_input_layernorm, recompute_input_silu: whether backward recomputes the result of each
            layer's first layer norm, and its u, v, q, and k, instead of keeping them.

    Raises:
        ValueError: a size is not positive, `dtype` or `attention_backend` is not supported, or the backend
            does not support the other settings.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    scaling_seqlen: int
    item_embedding_dim: int = -1
    contextual_embedding_dim: int = -1
    hidden_dropout: float = 0.2
    norm_epsilon: float = 1e-5
    is_causal: bool = True
    dtype: torch.dtype = torch.bfloat16
    num_position_buckets: int = 8192
    disable_contextual_mask: bool = False
    attention_backend: str = "pytorch"
    recompute_input_layernorm: bool = False
    recompute_input_silu: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "head_dim", "scaling_seqlen"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("item_embedding_dim", "contextual_embedding_dim"):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, self.hidden_size)
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected at least 1, or -1 for hidden_size"
                )
        if self.attention_backend not in BACKENDS:
            raise ValueError(
                f"attention_backend is {self.attention_backend!r}; expected one of {list(BACKENDS)}"
            )
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"dtype is {self.dtype}; expected torch.float32, torch.bfloat16 or torch.float16"
            )
        if self.attention_backend == "cutlass":
            # `CutlassSamples` checks each batch for contextual tokens that see each other.
            reason = unsupported(self.head_dim, self.dtype, self.is_causal, num_contextual=0)
            if reason:
                raise ValueError(f'attention_backend is "cutlass", but {reason}')

    def autocast(self, device: torch.device) -> torch.autocast:
        """Returns the autocast context of the dense part."""
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)


def full_sequence_length(num_contextual: int, max_history: int, max_candidates: int) -> int:
    """Returns the length of the longest sample with actions: contextual + 2 × (history + candidates)."""
    return num_contextual + 2 * (max_history + max_candidates)
