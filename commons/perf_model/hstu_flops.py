"""FLOPs of a stack of HSTU layers."""

from __future__ import annotations

from dataclasses import dataclass

from commons.perf_model.token_counts import ATTENTION_TILE, Tokens, as_token_counts, num_tiles


@dataclass(frozen=True)
class HSTUFlops:
    """Forward FLOPs of the HSTU layers per sample, without embeddings and head.

    Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.

    Attributes:
        num_layers: number of HSTU layers.
        hidden_size: width of a token, d.
        num_heads: attention heads, H.
        head_dim: width of a head, dh.
        is_causal: False if the tokens before the candidates all see each other.
        disable_contextual_mask: True if contextual tokens are causal too, and do not all see each other.

    Raises:
        ValueError: a size is not positive.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    is_causal: bool = True
    disable_contextual_mask: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")

    def per_sample(
        self, tokens: Tokens, contextual: Tokens | None = None, candidates: Tokens | None = None
    ) -> Tokens:
        """Returns the forward FLOPs of each sample; a multiply-add counts as two.

        Per layer and sample of T tokens: `2·T·d·4·H·dh` for the projections to u, v, q and k, `2·T·H·dh·d`
        for the output, and for attention `4·H·dh` per pair of tokens in whole tiles of 32 × 32. Where it is
        causal, these are n·(n + 1)/2 tiles for n = ceil(T / 32); the masked half is not computed.

        Args:
            tokens: `[batch_size]` integers, tokens of each sample.
            contextual: contextual tokens of each sample, which matter above one tile; None for none.
            candidates: candidate tokens of each sample, which matter without causal attention; None for none.

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
        tiles = self._tiles(as_int64, contextual, candidates)
        pairs = ATTENTION_TILE * ATTENTION_TILE * tiles
        return self.num_layers * (as_int64 * per_token + 4 * attention_size * pairs)

    def _tiles(self, tokens: Tokens, contextual: Tokens | None, candidates: Tokens | None) -> Tokens:
        """Returns the tiles that are computed.

        The first rows of tiles all see one prefix, and each later one sees a tile more than the one before.
        """
        rows = num_tiles(tokens)
        if not self.is_causal:
            prefix = num_tiles(tokens if candidates is None else tokens - as_token_counts(candidates))
        elif contextual is None or self.disable_contextual_mask:
            prefix = 0 * rows
        else:
            prefix = num_tiles(as_token_counts(contextual))
        return rows * (rows + 1) // 2 + prefix * (prefix - 1) // 2
