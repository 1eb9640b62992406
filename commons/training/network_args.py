"""Gin settings of a network, common to all models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checks import check_types
from ..datasets.gin_values import require_setting, require_settings_at_least

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class BaseNetworkArgs:
    """Layers of a sequence model. Each model's `NetworkArgs` says which of these settings it uses.

    Attributes:
        num_layers: number of layers.
        hidden_size: width of a token.
        num_attention_heads: number of attention heads.
        kv_channels: width of one attention head.
        hidden_dropout: dropout probability of the embedded tokens, and of a layer's output, before the
            residual sum.
        norm_epsilon: epsilon of all layer norms.
        is_causal: whether attention is causal.
        dtype_str: "bfloat16", "float16", or "float32". float16 trains without loss scaling, because fused
            tables update during backward, so small gradients underflow.
        kernel_backend: "pytorch" or "triton". "cutlass", which gin files of recsys-examples set, runs
            "triton". If Triton's kernels are not available, PyTorch runs. A warning names what runs instead.
        target_group_size: number of candidates that see each other. Only 1 runs.
        num_position_buckets: number of positions with their own embedding.
        recompute_input_layernorm, recompute_input_silu: whether backward recomputes the outputs of an HSTU
            layer's first layer norm and SiLU instead of keeping them. Other models have no such layers.
        item_embedding_dim, contextual_embedding_dim: widths of embeddings. −1 means `hidden_size`.
        scaling_seqlen: divisor of attention weights. −1 means the configured full length.
        disable_contextual_mask: whether contextual tokens are causal, too, instead of all seeing each other.

    Raises:
        TypeError: a value does not have the type of its annotation.
        ValueError: a value is out of range.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    kv_channels: int
    hidden_dropout: float = 0.2
    norm_epsilon: float = 1e-5
    is_causal: bool = True
    dtype_str: str = "bfloat16"
    kernel_backend: str = "pytorch"
    target_group_size: int = 1
    num_position_buckets: int = 8192
    recompute_input_layernorm: bool = False
    recompute_input_silu: bool = False
    item_embedding_dim: int = -1
    contextual_embedding_dim: int = -1
    scaling_seqlen: int = -1
    disable_contextual_mask: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "num_position_buckets")
        require_settings_at_least(1, self, *sizes)
        for name in ("item_embedding_dim", "contextual_embedding_dim", "scaling_seqlen"):
            value = getattr(self, name)
            require_setting(self, value == -1 or value >= 1, name, "at least 1, or -1")
        require_setting(self, 0 <= self.hidden_dropout < 1, "hidden_dropout", "0 to 1")
        epsilon = self.norm_epsilon
        require_setting(self, 0 < epsilon < float("inf"), "norm_epsilon", "a finite number above 0")
        require_setting(self, self.dtype_str in _DTYPES, "dtype_str", f"one of {list(_DTYPES)}")
        require_setting(self, self.target_group_size == 1, "target_group_size", "1")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `dtype_str` names."""
        return _DTYPES[self.dtype_str]

    def shared_positions(self, max_tokens: int) -> list[str]:
        """Returns one line if samples of up to `max_tokens` tokens may exceed the position embeddings."""
        if max_tokens <= self.num_position_buckets:
            return []
        return [
            f"NetworkArgs.num_position_buckets = {self.num_position_buckets}: samples have up to "
            f"{max_tokens} tokens, and all after the last bucket share its position"
        ]

    def settings_without_effect(self) -> list[str]:
        """Returns one line for each setting that does not have its usual effect."""
        if self.dtype_str != "float16":
            return []
        return [
            'NetworkArgs.dtype_str = "float16" trains without loss scaling, so small gradients are lost: '
            '"bfloat16" has the range of float32'
        ]

    def backend_line(self, running: str, reason: str) -> str:
        """Returns the warning about a backend that runs in place of `kernel_backend`."""
        return (
            f'NetworkArgs.kernel_backend = "{self.kernel_backend}" is not available here: '
            f"attention runs in {running}, because {reason}"
        )
