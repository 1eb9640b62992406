"""Samples in whole tiles of tokens: what attention computes together, and what each tile sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from commons.perf_model.hstu_flops import ATTENTION_TILE as TILE
from commons.sequence_batch.packed_rows import to_device_together
from hstu.modules.attention_mask import SampleMask

# Size of the scores of one row of tiles. On a CPU it stays in the core's own cache between the matrix
# products, with the keys and values that it meets. On CUDA a row is mostly one sample.
CPU_SCORE_BYTES = 1 << 18
CUDA_SCORE_BYTES = 1 << 28
# Tiles of query rows per product. One on a CPU, whose time is FLOPs; more on CUDA, whose time is launches.
CPU_ROW_TILES = 1
CUDA_ROW_TILES = 16


@dataclass(frozen=True)
class Chunk:
    """Samples of equally many tiles, some or all heads of them, that are computed together.

    Attributes:
        masks: of the samples.
        starts: where the tokens of each sample start.
        num_tokens: L, tokens of every sample with padding to whole tiles.
        heads: the heads.
        row_tiles: tiles of query rows per product.
        device: of the tokens.
    """

    masks: tuple[SampleMask, ...]
    starts: tuple[int, ...]
    num_tokens: int
    heads: slice
    row_tiles: int
    device: torch.device

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the part of `[total_tokens, H, D]` as `[samples · heads, L, D]`, with zeros in padding."""
        if len(self.masks) == 1:
            x = x[:, self.heads]
            padded = x.new_empty(x.shape[1], self.num_tokens, x.shape[2])
            start, end = self._only
            padded[:, : end - start] = x[start:end].transpose(0, 1)
            padded[:, end - start :] = 0
            return padded
        rows, per_token = _rows(x)
        padded = rows.index_select(0, self._rows_of(x.shape[1], per_token))
        if self._is_real is not None:
            padded.view(len(self.masks), x.shape[1], self.num_tokens, -1).mul_(self._is_real.to(x.dtype))
        return padded.view(-1, self.num_tokens, x.shape[2])

    def put(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes values to the chunk's part of a tensor; the inverse of `gathered`.

        Args:
            values: `[samples · heads, L, D]`.
            out: `[total_tokens + 1, H, D]`, contiguous; padding goes to the last.
        """
        if len(self.masks) == 1:
            start, end = self._only
            out[start:end, self.heads] = values[:, : end - start].transpose(0, 1)
            return
        num_heads, width = out.shape[1:]
        rows = self._rows_of(num_heads, num_heads, padding=len(out) - 1)
        out.view(-1, width).index_copy_(0, rows, values.view(-1, width).to(out.dtype))

    def row_blocks(self) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
        """Yields blocks of query rows: first and last row, exclusive; columns that one of them sees, all from
        0; and which of them are visible, `[samples, 1, rows, columns from the first that is not]` in float32,
        or None for the causal triangle of the last tile."""
        prefix = _padded(max(mask.prefix for mask in self.masks))
        for first in range(0, self.num_tokens, TILE * self.row_tiles):
            last = min(first + TILE * self.row_tiles, self.num_tokens)
            yield first, last, max(last, prefix), self._visible(first, last, max(last, prefix))

    def _visible(self, first: int, last: int, columns: int) -> torch.Tensor | None:
        if all(mask.is_plain(first, last) for mask in self.masks):
            return None
        first_column = min(mask.prefix_end(first) for mask in self.masks)
        rows = torch.arange(first, last, device=self.device).view(1, 1, -1, 1)
        seen = torch.arange(first_column, columns, device=self.device)
        contextual, history_end, per_candidate = (values.view(-1, 1, 1, 1) for values in self._mask_numbers)
        prefix_end = torch.minimum(torch.maximum(rows + 1, contextual), history_end)
        past_history = (rows - history_end).clamp(min=0)
        # For a row in the history, this gives columns up to the row itself, which it sees anyway.
        own_start = rows - past_history % per_candidate
        return ((seen < prefix_end) | ((seen >= own_start) & (seen <= rows))).float()

    @property
    def _only(self) -> tuple[int, int]:
        return self.starts[0], self.starts[0] + self.masks[0].num_tokens

    @cached_property
    def _mask_numbers(self) -> torch.Tensor:
        """int64 `[3, samples]`: prefix, end of the history, tokens per candidate."""
        numbers = [(mask.prefix, mask.history_end, mask.tokens_per_candidate) for mask in self.masks]
        return to_device_together([np.array(numbers).T.ravel()], self.device)[0].view(3, -1)

    def _rows_of(self, num_heads: int, per_token: int, padding: int | None = None) -> torch.Tensor:
        """Returns int64 `[samples · heads · L]`: where the values of each sample, head and token are.

        Args:
            num_heads: heads of a token.
            per_token: rows from a token to the next.
            padding: the token that stands for padding; None for the sample's first, so that a value that is
                not finite stays within its sample.
        """
        key = num_heads, per_token, padding
        if key not in self._row_indices:
            starts = np.array(self.starts)[:, None]
            stand_in = starts if padding is None else padding
            tokens = np.where(self._is_token, starts + np.arange(self.num_tokens), stand_in)[:, None]
            rows = tokens * per_token + np.arange(num_heads)[:, None]
            self._row_indices[key] = to_device_together([rows.ravel()], self.device)[0]
        return self._row_indices[key]

    @cached_property
    def _row_indices(self) -> dict[tuple[int, int, int | None], torch.Tensor]:
        return {}

    @cached_property
    def _is_token(self) -> np.ndarray:
        """bool `[samples, L]`; False for padding."""
        return np.arange(self.num_tokens) < np.array([mask.num_tokens for mask in self.masks])[:, None]

    @cached_property
    def _is_real(self) -> torch.Tensor | None:
        """int64 `[samples, 1, L, 1]`, 0 in padding; None if there is none."""
        if self._is_token.all():
            return None
        (is_real,) = to_device_together([self._is_token.ravel()], self.device)
        return is_real.view(len(self.masks), 1, -1, 1)


class AttentionTiles:
    """The samples of a batch in chunks; made once per batch, for all layers, forward and backward.

    A sample's FLOPs depend neither on the samples it is computed with nor on the device's cache: only samples
    with equally many tiles, which see equally many, are computed together.

    Args:
        masks: one per sample, with its number of tokens.
        device: of the tokens.

    Attributes:
        num_tokens: of all samples.
    """

    def __init__(self, masks: Sequence[SampleMask], device: torch.device) -> None:
        self.num_tokens = sum(mask.num_tokens for mask in masks)
        self._device = device
        self._groups: dict[tuple[int, int], list[tuple[SampleMask, int]]] = {}
        self._chunks: dict[int, list[Chunk]] = {}
        start = 0
        for mask in masks:
            if mask.num_tokens:
                size = _padded(mask.num_tokens), _padded(mask.prefix)
                self._groups.setdefault(size, []).append((mask, start))
            start += mask.num_tokens

    def chunks(self, num_heads: int) -> list[Chunk]:
        """Returns the chunks of a model with so many heads, the longest samples first."""
        if num_heads not in self._chunks:
            self._chunks[num_heads] = list(self._divided(num_heads))
        return self._chunks[num_heads]

    def _divided(self, num_heads: int) -> Iterator[Chunk]:
        is_cuda = self._device.type == "cuda"
        budget = CUDA_SCORE_BYTES if is_cuda else CPU_SCORE_BYTES
        row_tiles = CUDA_ROW_TILES if is_cuda else CPU_ROW_TILES
        for (num_tokens, _), samples in sorted(self._groups.items(), reverse=True):
            fitting = max(budget // (4 * TILE * row_tiles * num_tokens), 1)  # heads of samples
            heads, together = min(fitting, num_heads), max(fitting // num_heads, 1)
            for first in range(0, len(samples), together):
                masks, starts = zip(*samples[first : first + together], strict=True)
                for head in range(0, num_heads, heads):
                    of_heads = slice(head, head + heads)
                    yield Chunk(masks, starts, num_tokens, of_heads, row_tiles, self._device)


def _padded(num_tokens: int) -> int:
    """Returns the tokens of whole tiles."""
    return -(-num_tokens // TILE) * TILE


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the rows of width D that `[total_tokens, H, D]` consists of, and how many lie from a token to
    the next; a view, also of a part of a wider tensor, as queries are of one projection's result."""
    num_tokens, num_heads, width = x.shape
    if x.stride()[1:] != (width, 1) or x.stride(0) % width:
        x = x.contiguous()
    per_token = x.stride(0) // width
    return x.as_strided(((num_tokens - 1) * per_token + num_heads, width), (width, 1)), per_token
