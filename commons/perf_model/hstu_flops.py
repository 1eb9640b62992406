"""FLOPs of a stack of HSTU layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from commons.perf_model.token_counts import Tokens, as_token_counts


@dataclass(frozen=True)
class HSTUFlops:
    """Forward FLOPs of the HSTU layers per sample, without embeddings and head.

    Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.

    Attributes:
        num_layers: number of HSTU layers.
        hidden_size: width of a token, d.
        num_heads: attention heads, H.
        head_dim: width of a head, dh.

    Raises:
        ValueError: a value is not positive.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")

    def per_sample(self, tokens: Tokens) -> Tokens:
        """Returns the forward FLOPs of each sample; a multiply-add counts as two.

        Per layer and sample of T tokens, `2·T·d·4·H·dh` (projections to u, v, q, k) + `4·T²·H·dh`
        (q kᵀ and A v, the masked half included) + `2·T·H·dh·d` (output).

        Args:
            tokens: `[batch_size]` integers, tokens of each sample.

        Returns:
            `[batch_size]` int64, with the container type and device of `tokens`.

        Raises:
            TypeError: `tokens` are not integers.
            ValueError: a number of tokens is negative. Checked on the host only, because the check would
                synchronize host and device on CUDA.
        """
        as_int64 = as_token_counts(tokens)
        attention_size = self.num_heads * self.head_dim
        per_token = 10 * self.hidden_size * attention_size  # 8 for the projections, 2 for the output
        return self.num_layers * as_int64 * (per_token + 4 * attention_size * as_int64)
