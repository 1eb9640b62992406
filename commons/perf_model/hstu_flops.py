"""FLOPs of a stack of HSTU layers."""

from __future__ import annotations

from dataclasses import dataclass

from ..argument_checks import require_at_least
from .token_counts import ATTENTION_TILE, Tokens, as_columns, as_token_counts, num_tiles


@dataclass(frozen=True)
class HSTUFlops:
    """The forward FLOPs of HSTU layers per sample, without embeddings and head.

    Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.

    Provisional: may change in a minor version.

    Attributes:
        num_layers: number of HSTU layers.
        hidden_size: width of a token, d.
        num_heads: number of attention heads, H.
        head_dim: width of a head, dh.
        is_causal: whether attention is causal. If not, all tokens before the candidates see each other.
        disable_contextual_mask: whether contextual tokens are causal, too. If not, they all see each other.

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

        For a sample of T tokens, each layer adds `2·T·d·4·H·dh` to the first column for the projections to u,
        v, q and k, and `2·T·H·dh·d` for the output. The second column is attention, `4·H·dh` per pair of
        tokens in whole tiles of 32 × 32. Causal attention has n·(n + 1)/2 tiles for n = ceil(T / 32), because
        the masked half is not computed.

        Args:
            tokens: `[batch_size]` integers, number of tokens of each sample.
            contextual: contextual tokens of each sample, which matter only above one tile. None means 0.
            candidates: candidate tokens of each sample, which matter only if not causal. None means 0.

        Returns:
            `[batch_size, 2]` int64, with the container type and device of `tokens`.

        Raises:
            TypeError: `tokens` are not integers.
            ValueError: a number of tokens is negative. Checked only on the host, because the check would
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
        """Returns the forward FLOPs of the first tokens, as queries against all keys of their samples.

        If the first tokens fill only part of a row of tiles, that part counts in proportion.

        Args:
            first: `[batch_size]` integers, number of first tokens of each sample, at most `tokens`.
            tokens, contextual, candidates: counts of whole samples, as `work` takes them.

        Returns:
            `[batch_size, 2]` int64, equal to `work` if `first` equals `tokens`.
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
        """Returns the number of tiles at the start of a sample whose tokens all see each other."""
        if not self.is_causal:
            return num_tiles(tokens if candidates is None else tokens - as_token_counts(candidates))
        if contextual is None or self.disable_contextual_mask:
            return 0 * tokens
        return num_tiles(as_token_counts(contextual))

    def _tiles(self, rows: Tokens, prefix: Tokens) -> Tokens:
        """Returns the number of tiles that are computed for the first `rows` rows of tiles.

        Each of the first `prefix` rows has `prefix` tiles. Each later row has one more than the row before.
        """
        in_prefix = rows.clip(max=prefix)
        return rows * (rows + 1) // 2 + in_prefix * prefix - in_prefix * (in_prefix + 1) // 2
