"""Configuration of the HSTU models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hstu.modules.attention_backend import BACKENDS


@dataclass(frozen=True)
class HSTUConfig:
    """Sizes and settings shared by all HSTU models and their modules.

    Attributes:
        num_layers: number of HSTU layers.
        hidden_size: width of a token.
        num_attention_heads: number of attention heads.
        kv_channels: width of a head; `num_attention_heads * kv_channels` need not be `hidden_size`.
        scaling_seqlen: divisor of the attention weights, a constant such as `full_sequence_length`. A value
            taken from the batch would make a sample's result depend on the samples it is batched with.
        item_embedding_dim: width of item and action embeddings; −1 for `hidden_size`.
        contextual_embedding_dim: width of contextual embeddings; −1 for `hidden_size`.
        hidden_dropout: dropout probability of the embedded tokens, and after each layer.
        norm_epsilon: epsilon of all layer norms.
        is_causal: whether attention is causal. False lets history tokens attend to later ones.
        dtype: torch.bfloat16 and torch.float16 run the dense part under autocast with float32 parameters;
            torch.float32 runs it without.
        num_position_buckets: number of positions with their own embedding; later positions share the last.
        disable_contextual_mask: whether contextual tokens are causal, too; otherwise they all attend to each
            other.
        kernel_backend: "pytorch", or "triton", which needs CUDA.
        recompute_input_layernorm: whether backward recomputes the result of each layer's first layer norm,
            `[total_tokens, hidden_size]`, instead of keeping it.
        recompute_input_silu: whether backward recomputes each layer's u, v, q, and k from the projection,
            which is kept anyway, instead of keeping `[total_tokens, 4·num_attention_heads·kv_channels]`.

    Raises:
        ValueError: a size is not positive, or `dtype` or `kernel_backend` is not supported.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    kv_channels: int
    scaling_seqlen: int
    item_embedding_dim: int = -1
    contextual_embedding_dim: int = -1
    hidden_dropout: float = 0.2
    norm_epsilon: float = 1e-5
    is_causal: bool = True
    dtype: torch.dtype = torch.bfloat16
    num_position_buckets: int = 8192
    disable_contextual_mask: bool = False
    kernel_backend: str = "pytorch"
    recompute_input_layernorm: bool = False
    recompute_input_silu: bool = False

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "scaling_seqlen")
        for name in (*sizes, "num_position_buckets"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name in ("item_embedding_dim", "contextual_embedding_dim"):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, self.hidden_size)
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected at least 1, or -1 for hidden_size"
                )
        if self.kernel_backend not in BACKENDS:
            raise ValueError(f"kernel_backend is {self.kernel_backend!r}; expected one of {list(BACKENDS)}")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"dtype is {self.dtype}; expected torch.float32, torch.bfloat16 or torch.float16"
            )

    def autocast(self, device: torch.device) -> torch.autocast:
        """Returns the autocast context of the dense part."""
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)


@dataclass(frozen=True)
class HSTUFeatures:
    """Names of the features of a sample.

    Attributes:
        item: items of the history, then candidates.
        action: the user's action on each item; None for items without actions.
        contextual: features that describe the user, in the order of their tokens.
        negatives: items to contrast with the targets. They are looked up but are not tokens. None for a
            model without negatives.
    """

    item: str
    action: str | None = None
    contextual: tuple[str, ...] = ()
    negatives: str | None = None

    def embedding_dims(self, config: HSTUConfig) -> dict[str, int]:
        """Returns the embedding width of each feature by name."""
        item_features = [name for name in (self.item, self.action, self.negatives) if name is not None]
        return {name: config.contextual_embedding_dim for name in self.contextual} | {
            name: config.item_embedding_dim for name in item_features
        }


def full_sequence_length(num_contextual: int, max_history: int, max_candidates: int) -> int:
    """Returns the length of the longest sample with actions: contextual + 2 × (history + candidates)."""
    return num_contextual + 2 * (max_history + max_candidates)
