"""Work lists of the Triton kernels: the visible tiles of each sample, computed on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from hstu.modules.attention_mask import SampleMask, consecutive_starts
from hstu.modules.key_run import KeyRun, key_runs
from hstu.modules.triton_tiles import TileShape


class TritonWork:
    """The masks of a batch and the kernels' work lists. Make one per batch; all layers share it.

    Args:
        masks: masks of the samples or pieces.
        starts: index of each mask's first query; other tokens may lie between masks. None means that all
            tokens are queries, in the order of the masks.
        key_tokens: locations of the pieces' keys, as `key_runs` takes them; None for whole samples.

    Attributes:
        end: index of the first token after all queries.
        has_holes: whether there may be tokens that are not queries.
        run: keys of all pieces; None for whole samples.

    Raises:
        ValueError: `key_tokens` does not fit the masks.
    """

    def __init__(
        self,
        masks: Sequence[SampleMask],
        starts: Sequence[int] | None = None,
        key_tokens: np.ndarray | None = None,
    ) -> None:
        self.has_holes = starts is not None
        starts = key_starts = consecutive_starts(masks) if starts is None else starts
        self.run: KeyRun | None = None
        if key_tokens is not None:
            runs = key_runs(key_tokens, masks)
            self.run = KeyRun(tuple(segment for run in runs for segment in run.segments))
            key_starts = list(accumulate((mask.num_tokens for mask in masks), initial=0))[:-1]
        self.end = max((start + mask.num_rows for mask, start in zip(masks, starts, strict=True)), default=0)
        self._samples = _Samples(
            *np.array(
                [
                    (
                        *(start - mask.first_row, key_start),
                        *(mask.first_row, mask.end_row, mask.num_tokens),
                        *(mask.prefix, mask.history_end, mask.tokens_per_candidate),
                    )
                    for mask, start, key_start in zip(masks, starts, key_starts, strict=True)
                ],
                np.int64,
            )
            .reshape(-1, 8)
            .T
        )
        self._on_device: dict[tuple[torch.device, tuple[TileShape, ...]], list[torch.Tensor]] = {}

    def lists(
        self, device: torch.device, by_rows: Sequence[TileShape], by_columns: Sequence[TileShape]
    ) -> list[torch.Tensor]:
        """Returns a work list on the device for each tile shape, first `by_rows`, then `by_columns`.

        The first call copies all lists in one non-blocking transfer from pinned memory. Later calls return
        the same tensors.

        Args:
            device: device of the kernels.
            by_rows: tile shapes of the kernels that compute blocks of rows.
            by_columns: tile shapes of the kernels that compute blocks of columns.

        Returns:
            The lists, `[items, 15]` int32 each, items with most tiles first. Rows, columns, and candidates
            are counted from the sample's start. Fields 0 to 7 are the fields of `_Samples`, and field 8 is
            the first row or column of the block. Fields 9 to 14 are three ranges of tiles, begin and number
            each: fully visible tiles, tiles at the mask's edge, and tiles that only candidates see. Tiles
            of rows are counted from the first row.
        """
        key = (device, (*by_rows, *by_columns))
        if key not in self._on_device:
            items = [self._by_rows(shape) for shape in by_rows]
            items += [self._by_columns(shape) for shape in by_columns]
            on_host = torch.from_numpy(np.concatenate(items).astype(np.int32))
            if device.type == "cuda" and len(on_host):
                on_host = on_host.pin_memory()
            self._on_device[key] = list(
                on_host.to(device, non_blocking=True).split([len(part) for part in items])
            )
        return self._on_device[key]

    def _by_rows(self, shape: TileShape) -> np.ndarray:
        """Returns the items of blocks of rows, which visit tiles of columns."""
        samples, first = self._samples.blocks(self._samples.first_row, self._samples.end_row, shape.rows)
        last = np.minimum(first + shape.rows, samples.end_row) - 1
        # Numbers of leading columns that the first and the last row of the block see.
        first_prefix = np.clip(first + 1, samples.prefix, samples.history_end)
        last_prefix = np.clip(last + 1, samples.prefix, samples.history_end)
        full = first_prefix // shape.columns
        edge_end = _ceil_div(last_prefix, shape.columns)
        candidate = np.maximum(first, samples.history_end)
        own = candidate - (candidate - samples.history_end) % samples.tokens_per_candidate
        own_begin = np.maximum(own // shape.columns, edge_end)
        own_end = np.maximum(_ceil_div(last + 1, shape.columns), own_begin)
        return _longest_first(
            samples, first, (np.zeros_like(full), full), (full, edge_end), (own_begin, own_end)
        )

    def _by_columns(self, shape: TileShape) -> np.ndarray:
        """Returns the items of blocks of columns, which visit tiles of rows."""
        no_column = np.zeros_like(self._samples.num_keys)
        samples, first = self._samples.blocks(no_column, self._samples.num_keys, shape.columns)
        history_end, per_candidate = samples.history_end, samples.tokens_per_candidate
        last = np.minimum(first + shape.columns, samples.num_keys) - 1
        begin = np.where(first < samples.prefix, 0, first)
        last_candidate = (last - history_end) // per_candidate
        own_end = history_end + (last_candidate + 1) * per_candidate
        end = np.where(first < history_end, samples.end_row, own_end)
        # The first row such that it and all later rows see all columns of the block.
        full = np.where(last < samples.prefix, 0, np.where(last < history_end, last, end))
        begin, full, end = (
            np.clip(row, samples.first_row, samples.end_row) - samples.first_row for row in (begin, full, end)
        )
        begin, end = begin // shape.rows, _ceil_div(end, shape.rows)
        full = np.clip(_ceil_div(full, shape.rows), begin, end)
        return _longest_first(samples, first, (full, end), (begin, full), (full, full))


@dataclass(frozen=True)
class _Samples:
    """Numbers of samples or pieces, int64 `[samples]` each, in the order of a work item's fields.

    Attributes:
        query_base: place in q of the sample's token 0, as if the sample's first tokens preceded its queries.
        key_base: place in k and v of the sample's token 0.
        first_row, end_row, num_keys, prefix, history_end, tokens_per_candidate: fields of `SampleMask`;
            `num_keys` is its `num_tokens`.
    """

    query_base: np.ndarray
    key_base: np.ndarray
    first_row: np.ndarray
    end_row: np.ndarray
    num_keys: np.ndarray
    prefix: np.ndarray
    history_end: np.ndarray
    tokens_per_candidate: np.ndarray

    @property
    def fields(self) -> list[np.ndarray]:
        """All fields, in order."""
        return list(vars(self).values())

    def blocks(self, first: np.ndarray, end: np.ndarray, size: int) -> tuple[_Samples, np.ndarray]:
        """Returns the sample and the first token of each block of `size` tokens from `first` to `end`."""
        num_blocks = _ceil_div(end - first, size)
        ends = num_blocks.cumsum()
        blocks = np.arange(num_blocks.sum()) - (ends - num_blocks).repeat(num_blocks)
        samples = _Samples(*(numbers.repeat(num_blocks) for numbers in self.fields))
        return samples, first.repeat(num_blocks) + blocks * size


def _longest_first(
    samples: _Samples, first: np.ndarray, *ranges: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Returns the items, `[blocks, 15]`, most tiles first, so that the programs that start last are short."""
    bounds = [(begin, end - begin) for begin, end in ranges]
    num_tiles = sum(number for _, number in bounds)
    fields = [*samples.fields, first, *(field for both in bounds for field in both)]
    return np.stack(fields, 1)[np.argsort(-num_tiles, kind="stable")]


def _ceil_div(numbers: np.ndarray, divisor: int) -> np.ndarray:
    return -(-numbers // divisor)
