"""Samples in whole tiles of tokens, divided into chunks that attention computes together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from commons.jagged_indices import to_device_together
from commons.perf_model.token_counts import ATTENTION_TILE as TILE
from hstu.modules.attention_mask import SampleMask, consecutive_starts
from hstu.modules.key_run import KeyRun, key_runs

# Bytes in float32 of a chunk's queries, keys, or values: for several samples, which are copied, and for
# several heads of one sample. On a CPU, most of them stay in the core's own cache between matrix products.
CPU_CHUNK_BYTES, CPU_HEADS_BYTES = 512 << 10, 1200 << 10
CUDA_CHUNK_BYTES, CUDA_HEADS_BYTES = 1 << 25, 1 << 25
# Tiles of query rows per product. FLOPs limit a CPU, so it takes one. Launches limit CUDA, so it takes more.
CPU_ROW_TILES = 1
CUDA_ROW_TILES = 16


@dataclass(frozen=True)
class Place:
    """The places of samples' queries or keys in a tensor of tokens, and their padding.

    Attributes:
        starts: index of each sample's first token in the tensor.
        lengths: number of tokens of each sample.
        first: index in its sample of that first token, which is 0 if there are several samples.
        num_tokens: number of tokens of every sample, L, including padding to whole tiles.
        heads: slice of the heads.
        device: device of the tokens.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    first: int
    num_tokens: int
    heads: slice
    device: torch.device

    @property
    def end(self) -> int:
        """Index in the sample of the first token after the padding."""
        return self.first + self.num_tokens

    @property
    def num_heads(self) -> int:
        """Number of heads of all samples together, P."""
        return len(self.starts) * (self.heads.stop - self.heads.start)

    def view(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the tokens of `[total_tokens, H, D]` as `[heads, tokens, D]`, without copying or padding.

        The result is None if there are several samples.
        """
        if len(self.starts) > 1:
            return None
        return x[self._only(self.first, self.end), self.heads].transpose(0, 1)

    def gather(self, x: torch.Tensor, padded: torch.Tensor, first: int) -> torch.Tensor:
        """Copies tokens of each sample, with zeros for padding.

        Args:
            x: `[total_tokens, H, D]`.
            padded: contiguous destination of the copies, `[samples · heads, tokens, D]`.
            first: index in its sample of the first token to copy. Several samples are copied whole.

        Returns:
            `padded`.
        """
        if len(self.starts) == 1:
            x = x[self._only(first, first + padded.shape[1]), self.heads]
            padded[:, : x.shape[0]] = x.transpose(0, 1)
            padded[:, x.shape[0] :] = 0
            return padded
        rows, per_token = _rows(x)
        torch.index_select(rows, 0, self._rows_of(per_token), out=padded.flatten(0, 1))
        if self._is_real is not None:
            padded.unflatten(0, (len(self.starts), -1)).mul_(self._is_real.to(x.dtype))
        return padded

    def put(self, values: torch.Tensor, out: torch.Tensor, first: int) -> None:
        """Writes values to the tokens' places in a tensor; the inverse of `gather`.

        Args:
            values: `[samples · heads, tokens, D]`, contiguous.
            out: `[total_tokens + 1, H, D]`, contiguous; the last token takes the padding.
            first: index in its sample of the first token to write. Several samples are written whole.
        """
        if len(self.starts) == 1:
            tokens = self._only(first, first + values.shape[1])
            out[tokens, self.heads] = values[:, : tokens.stop - tokens.start].transpose(0, 1)
            return
        num_heads, width = out.shape[1:]
        rows = self._rows_of(num_heads, padding=out.shape[0] - 1)
        values = values.to(out.dtype).view(-1, width)
        _wide(out.view(-1, width)).index_copy_(0, rows, _wide(values))

    def _only(self, first: int, last: int) -> slice:
        """Returns the slice of the only sample's tokens from `first` to `last`, without padding."""
        (start,), (length,) = self.starts, self.lengths
        return slice(start + first - self.first, start + min(last - self.first, length))

    def _rows_of(self, per_token: int, padding: int | None = None) -> torch.Tensor:
        """Returns the row of each sample, head, and token, int64 `[samples · heads · L]`.

        Args:
            per_token: number of rows from one token to the next.
            padding: token that stands in for padding. None means the sample's first token, so that a value
                that is not finite stays within its sample.
        """
        key = per_token, padding
        if key not in self._row_indices:
            starts = np.array(self.starts)[:, None]
            stand_in = starts if padding is None else padding
            tokens = np.where(self._is_token, starts + np.arange(self.num_tokens), stand_in)[:, None]
            rows = tokens * per_token + np.arange(self.heads.start, self.heads.stop)[:, None]
            self._row_indices[key] = to_device_together([rows.ravel()], self.device)[0]
        return self._row_indices[key]

    @cached_property
    def _row_indices(self) -> dict[tuple[int, int | None], torch.Tensor]:
        return {}

    @cached_property
    def _is_token(self) -> np.ndarray:
        """Whether each token is real and not padding, bool `[samples, L]`."""
        return np.arange(self.num_tokens) < np.array(self.lengths)[:, None]

    @cached_property
    def _is_real(self) -> torch.Tensor | None:
        """1 for real tokens and 0 for padding, int64 `[samples, 1, L, 1]`; None without padding."""
        if self._is_token.all():
            return None
        (is_real,) = to_device_together([self._is_token.ravel()], self.device)
        return is_real.view(len(self.starts), 1, -1, 1)


@dataclass(frozen=True)
class Chunk:
    """Samples with equal numbers of tiles, and the heads of these samples, that are computed together.

    A chunk of several samples has all heads, and copies the samples whole. A chunk of one sample may have
    only some heads, and reads tokens in blocks. The same holds for one piece, whose keys are gathered first.
    Rows (queries) and columns (keys) are counted from the sample's start.

    Attributes:
        masks: masks of the samples.
        queries: places of the queries.
        keys: places of the keys and values. For a piece, these are places in its run.
        row_tiles: number of tiles of query rows per product.
        run: keys of the piece; None if the samples are whole.
    """

    masks: tuple[SampleMask, ...]
    queries: Place
    keys: Place
    row_tiles: int
    run: KeyRun | None = None

    def row_blocks(self) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
        """Yields blocks of query rows.

        A block is (first row, last row, last column, mask), where "last" is exclusive. Its rows see no later
        columns. The mask, float32 `[samples, 1, rows, last columns]`, is 1 where a row sees one of the last
        columns; rows see all columns before these. None means a causal triangle from the first row on.
        """
        for first, last, is_plain in self._row_ranges:
            columns = min(max(last, self._prefix), self.keys.end)
            visible = None
            if not is_plain:
                first_column = min(mask.prefix_end(first) for mask in self.masks)
                visible = self._visible(first, last, first_column, columns)
            yield first, last, columns, visible

    def column_blocks(self) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
        """Yields blocks of columns. With one tile per block, they have the tiles of `row_blocks`.

        A block is (first column, last column, first row, mask), where "last" is exclusive. Earlier rows see
        none of its columns. The mask, float32 `[samples, 1, columns, rows]`, is 1 where a row, from the
        first row on, sees a column; later rows see all. None means that rows see the columns up to their own.
        """
        rows = self.queries
        for first, last, is_plain in self._column_ranges:
            first_row = min(max(0 if first < self._prefix else first, rows.first), rows.end)
            visible = None
            # If a prefix ends with the block's first column, only the earlier rows are not plain.
            if not is_plain or first_row < first:
                # Rows after the block see all columns that precede the candidates.
                in_history = all(min(last, mask.num_tokens) <= mask.history_end for mask in self.masks)
                last_row = min(max(last, first_row), rows.end) if in_history else rows.end
                visible = self._visible(first_row, last_row, first, last).mT
            yield first, last, first_row, visible

    def _visible(self, first_row: int, last_row: int, first_column: int, last_column: int) -> torch.Tensor:
        """Returns `[samples, 1, rows, columns]` in float32: 1 where a row sees a column, else 0."""
        rows = torch.arange(first_row, last_row, device=self.queries.device).view(1, 1, -1, 1)
        seen = torch.arange(first_column, last_column, device=self.queries.device)
        contextual, history_end, per_candidate = (values.view(-1, 1, 1, 1) for values in self._mask_numbers)
        prefix_end = torch.minimum(torch.maximum(rows + 1, contextual), history_end)
        past_history = (rows - history_end).clamp(min=0)
        # For a row in the history, this is the row itself, which it sees anyway.
        own_start = rows - past_history % per_candidate
        return ((seen < prefix_end) | ((seen >= own_start) & (seen <= rows))).float()

    @cached_property
    def _row_ranges(self) -> list[tuple[int, int, bool]]:
        return self._ranges(self.queries)

    @cached_property
    def _column_ranges(self) -> list[tuple[int, int, bool]]:
        return self._row_ranges if self.keys is self.queries else self._ranges(self.keys)

    def _ranges(self, place: Place) -> list[tuple[int, int, bool]]:
        """Returns each block's first and last token, exclusive, and whether its rows are plain."""
        size = TILE * self.row_tiles
        ranges = [(first, min(first + size, place.end)) for first in range(place.first, place.end, size)]
        return [(*block, all(mask.is_plain(*block) for mask in self.masks)) for block in ranges]

    @cached_property
    def _prefix(self) -> int:
        """Number of tokens in the tiles that hold the longest prefix."""
        return _padded(max(mask.prefix for mask in self.masks))

    @cached_property
    def _mask_numbers(self) -> torch.Tensor:
        """Prefix, end of the history, and tokens per candidate of each sample, int64 `[3, samples]`."""
        numbers = [(mask.prefix, mask.history_end, mask.tokens_per_candidate) for mask in self.masks]
        return to_device_together([np.array(numbers).T.ravel()], self.queries.device)[0].view(3, -1)


# A mask, the index of its first query, and the keys of a piece.
_Sample = tuple[SampleMask, int, KeyRun | None]


class AttentionTiles:
    """The samples of a batch in chunks; made once per batch, for all layers, forward and backward.

    A sample's FLOPs depend neither on the samples it is computed with nor on the device's cache. Only samples
    with equal numbers of tiles and of prefix tiles are computed together. A piece is computed by itself.

    Args:
        masks: masks of the samples or pieces.
        device: device of the tokens.
        starts: index of each mask's first query; other tokens may lie between masks. None means that all
            tokens are queries, in the order of the masks.
        key_tokens: locations of the pieces' keys, as `key_runs` takes them; None for whole samples.

    Attributes:
        end: index of the first token after all queries.
        has_holes: whether there may be tokens that are not queries.
        num_locations: number of own and fetched tokens that `key_tokens` requires.

    Raises:
        ValueError: `key_tokens` does not fit the masks.
    """

    def __init__(
        self,
        masks: Sequence[SampleMask],
        device: torch.device,
        starts: Sequence[int] | None = None,
        key_tokens: np.ndarray | None = None,
    ) -> None:
        self.has_holes = starts is not None
        starts = consecutive_starts(masks) if starts is None else starts
        self.end = max((start + mask.num_rows for mask, start in zip(masks, starts, strict=True)), default=0)
        runs = [None] * len(masks) if key_tokens is None else key_runs(key_tokens, masks)
        self.num_locations = max((run.end for run in runs if run is not None), default=0)
        self._device = device
        self._groups: dict[tuple[int, int, int], list[_Sample]] = {}
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        for place, sample in enumerate(zip(masks, starts, runs, strict=True)):
            mask, _, run = sample
            if mask.num_rows:
                alone = 0 if run is None else place
                key = _padded(mask.num_tokens), max(_padded(mask.prefix), TILE), alone
                self._groups.setdefault(key, []).append(sample)

    def chunks(self, num_heads: int, head_dim: int) -> list[Chunk]:
        """Returns the chunks for this many heads of this width, the longest samples first."""
        key = num_heads, head_dim
        if key not in self._chunks:
            self._chunks[key] = list(self._divided(*key))
        return self._chunks[key]

    def _divided(self, num_heads: int, head_dim: int) -> Iterator[Chunk]:
        is_cuda = self._device.type == "cuda"
        chunk_bytes = CUDA_CHUNK_BYTES if is_cuda else CPU_CHUNK_BYTES
        heads_bytes = CUDA_HEADS_BYTES if is_cuda else CPU_HEADS_BYTES
        half = sum(num_tokens * len(samples) for (num_tokens, *_), samples in self._groups.items()) // 2
        for (num_tokens, *_), samples in sorted(self._groups.items(), reverse=True):
            head_bytes = 4 * num_tokens * head_dim
            heads = min(max(heads_bytes // head_bytes, 1), num_heads)
            # At most half the batch is copied at a time, so that the copies weigh little next to the batch.
            together = max(min(chunk_bytes // (num_heads * head_bytes), half // num_tokens), 1)
            for first in range(0, len(samples), together):
                for head in range(0, num_heads, heads):
                    part = slice(head, min(head + heads, num_heads))
                    yield self._chunk(samples[first : first + together], part)

    def _chunk(self, samples: Sequence[_Sample], heads: slice) -> Chunk:
        masks, starts, (run, *_) = zip(*samples, strict=True)
        row_tiles = CUDA_ROW_TILES if self._device.type == "cuda" else CPU_ROW_TILES
        rows = tuple(mask.num_rows for mask in masks)
        queries = Place(starts, rows, masks[0].first_row, _padded(rows[0]), heads, self._device)
        if run is None:
            return Chunk(masks, queries, queries, row_tiles)
        run_heads = slice(0, heads.stop - heads.start)
        num_keys = masks[0].num_tokens
        keys = Place((0,), (num_keys,), 0, _padded(num_keys), run_heads, self._device)
        return Chunk(masks, queries, keys, row_tiles, run)


def _padded(num_tokens: int) -> int:
    """Returns the number of tokens, rounded up to whole tiles."""
    return -(-num_tokens // TILE) * TILE


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns `[total_tokens, H, D]` as rows of width D, and the number of rows from a token to the next.

    The result is a view if the strides allow it, as they do for queries inside one projection.
    """
    num_tokens, num_heads, width = x.shape
    if x.stride()[1:] != (width, 1) or x.stride(0) % width:
        x = x.contiguous()
    per_token = x.stride(0) // width
    return x.as_strided(((num_tokens - 1) * per_token + num_heads, width), (width, 1)), per_token


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """Returns a view of contiguous rows in elements of 16 bytes, if whole elements fit.

    `index_copy_` costs the same per element, whatever its size.
    """
    fits = rows.shape[1] * rows.element_size() % 16 == 0 and rows.storage_offset() == 0
    return rows.view(torch.complex128) if fits else rows
