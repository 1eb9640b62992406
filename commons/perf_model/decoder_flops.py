"""FLOPs of a Transformer decoder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from commons.perf_model.token_counts import Tokens, as_token_counts


@dataclass(frozen=True)
class DecoderFlops:
    """What the layers of a Transformer decoder cost, forward, per sample; embeddings and heads not counted.

    Attributes:
        num_layers: layers.
        hidden_size: width of a token, d.
        num_heads: query heads, H.
        num_kv_heads: key and value heads, Hkv; H for multi-head attention, fewer where they are grouped.
        head_dim: width of a head, dh; H·dh need not be d.
        mlp_size: width of the MLP's hidden layer, f.
        gated_mlp: whether the MLP has a third matrix, whose output gates the hidden layer.
        skips_masked: whether to count only what the causal mask lets through, which fused kernels come near
            to on long samples, where it matters; PyTorch's unfused one, `SDPBackend.MATH`, computes all.

    Raises:
        ValueError: a size is not positive.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    gated_mlp: bool = False
    skips_masked: bool = False

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, bool) and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")

    def per_sample(self, tokens: Tokens) -> Tokens:
        """FLOPs of the forward pass of each sample, a multiplication and an addition as two.

        Per layer and sample of T tokens, `2·T·d·(H + 2·Hkv)·dh` (projections to q, k, v) + `4·T²·H·dh`
        (q kᵀ and A v; `2·T·(T + 1)·H·dh` if `skips_masked`) + `2·T·H·dh·d` (output) + `4·T·d·f` (MLP; 6 if
        gated).

        Args:
            tokens: `[batch]` integers, tokens of each sample.

        Returns:
            `[batch]` int64, of the kind and on the device of `tokens`.

        Raises:
            TypeError: `tokens` are not integers.
            ValueError: a number of tokens is negative; on the host only.
        """
        as_int64 = as_token_counts(tokens)
        attention_size = self.num_heads * self.head_dim
        projected = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + attention_size
        mlp_matrices = 3 if self.gated_mlp else 2
        per_token = 2 * self.hidden_size * (projected + mlp_matrices * self.mlp_size)
        # Twice the keys that a token sees on average.
        keys = as_int64 + 1 if self.skips_masked else 2 * as_int64
        return self.num_layers * as_int64 * (per_token + 2 * attention_size * keys)
