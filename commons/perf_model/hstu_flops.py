"""FLOPs of a stack of HSTU layers."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import require_at_least
from .token_counts import ATTENTION_TILE, Tokens, as_columns, as_token_counts, num_tiles


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
            require_at_least(1, name, getattr(self, name))

    def work(
        self, tokens: Tokens, contextual: Tokens | None = None, candidates: Tokens | None = None
    ) -> Tokens:
        """Returns the forward FLOPs of each sample in two columns; a multiply-add counts as two.

        Per layer and sample of T tokens, the first has `2·T·d·4·H·dh` for the projections to u, v, q and k,
        and `2·T·H·dh·d` for the output. The second has attention, `4·H·dh` per pair of tokens in whole tiles
        of 32 × 32. Where it is causal, these are n·(n + 1)/2 tiles for n = ceil(T / 32); the masked half is
        not computed.

        Args:
            tokens: `[batch_size]` integers, tokens of each sample.
            contextual: contextual tokens of each sample, which matter above one tile; None for none.
            candidates: candidate tokens of each sample, which matter without causal attention; None for none.

        Returns:
            `[batch_size, 2]` int64, with the container type and device of `tokens`.

        Raises:
            TypeError: `tokens` are not integers.
            ValueError: a number of tokens is negative. Checked on the host only, because the check would
                synchronize host and device on CUDA.
        """
        return self.prefix_work(tokens, tokens, contextual, candidates)

    def per_sample(
        self, tokens: Tokens, contextual: Tokens | None = None, candidates: Tokens | None = None
    ) -> Tokens:
        """Returns the forward FLOPs of each sample, `[batch_size]` int64: the sum of `work`'s columns."""
        return self.work(tokens, contextual, candidates).sum(-1)

    def prefix_work(
        self,
        first: Tokens,
        tokens: Tokens,
        contextual: Tokens | None = None,
        candidates: Tokens | None = None,
    ) -> Tokens:
        """Returns the forward FLOPs of the first tokens' queries, against all keys of their samples.

        A row of tiles that these tokens fill in part counts in proportion.

        Args:
            first: `[batch_size]` integers, the first tokens of each sample; at most all.
            tokens, contextual, candidates: counts of whole samples, as `work` takes them.

        Returns:
            `[batch_size, 2]` int64; those of `work` where `first` is all tokens.
        """
        first, as_int64 = as_token_counts(first), as_token_counts(tokens)
        prefix = self._prefix(as_int64, contextual, candidates)
        whole_rows = first // ATTENTION_TILE
        partial = (whole_rows + 1).clip(min=prefix)  # tiles of the row that `first` ends in
        in_row = as_int64 - whole_rows * ATTENTION_TILE
        in_row = in_row.clip(1, ATTENTION_TILE)  # tokens of that row
        added = ATTENTION_TILE**2 * partial * (first - whole_rows * ATTENTION_TILE) // in_row
        pairs = ATTENTION_TILE**2 * self._tiles(whole_rows, prefix) + added
        attention_size = self.num_heads * self.head_dim
        per_token = 10 * self.hidden_size * attention_size  # 8 for the projections, 2 for the output
        return self.num_layers * as_columns(per_token * first, 4 * attention_size * pairs)

    def _prefix(self, tokens: Tokens, contextual: Tokens | None, candidates: Tokens | None) -> Tokens:
        """Returns the tiles at the start of a sample whose tokens all see each other."""
        if not self.is_causal:
            return num_tiles(tokens if candidates is None else tokens - as_token_counts(candidates))
        if contextual is None or self.disable_contextual_mask:
            return 0 * tokens
        return num_tiles(as_token_counts(contextual))

    def _tiles(self, rows: Tokens, prefix: Tokens) -> Tokens:
        """Returns the tiles that are computed for the first rows of tiles.

        Rows up to `prefix` all see as many, and each later one sees a tile more than the one before.
        """
        in_prefix = rows.clip(max=prefix)
        return rows * (rows + 1) // 2 + in_prefix * prefix - in_prefix * (in_prefix + 1) // 2
