"""Work lists of the Triton kernels: the visible tiles of each sample, computed from host numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hstu.modules.attention_mask import SampleMask
from hstu.modules.triton_tiles import TileShape


class TritonWork:
    """Masks of a batch and the kernels' work lists. Make one per batch; all layers share it.

    A sample holds contextual tokens, then its history, then targets (candidates). Contextual tokens all see
    each other, the history is causal, and a target sees itself and everything before the targets.

    Args:
        seq_offsets: `[samples + 1]`, first token of each sample, then the number of all tokens. On the host,
            as the next two.
        num_contextuals: `[samples]`, leading tokens that all see each other.
        num_targets: `[samples]`, targets at the end of each sample.
        tokens_per_target: 2 for an item and its action, 1 for an item alone.
        is_causal: False lets contextual and history tokens all see each other.

    Raises:
        ValueError: lengths of the arguments differ, `seq_offsets` does not begin with 0, or a sample's tokens
            are fewer than its contextual ones and targets.
    """

    def __init__(
        self,
        seq_offsets: Sequence[int],
        num_contextuals: Sequence[int],
        num_targets: Sequence[int],
        tokens_per_target: int,
        is_causal: bool,
    ) -> None:
        offsets = np.asarray(seq_offsets, np.int64)
        contextuals, targets = np.asarray(num_contextuals, np.int64), np.asarray(num_targets, np.int64)
        if not len(offsets) - 1 == len(contextuals) == len(targets):
            raise ValueError(
                f"seq_offsets has {len(offsets)} numbers, num_contextuals {len(contextuals)} and num_targets "
                f"{len(targets)}; expected one more in seq_offsets than in the others"
            )
        if offsets[0] != 0:
            raise ValueError(f"seq_offsets begins with {offsets[0]}; expected 0")
        lengths = np.diff(offsets)
        history_ends = lengths - tokens_per_target * targets
        for sample in np.flatnonzero((contextuals < 0) | (targets < 0) | (history_ends < contextuals)):
            raise ValueError(
                f"sample {sample} has {lengths[sample]} tokens; expected at least its {contextuals[sample]} "
                f"contextual ones and {tokens_per_target} for each of its {targets[sample]} targets"
            )
        self.num_tokens = int(offsets[-1])
        # Without causality, history tokens are like contextual ones: all of them see each other.
        prefixes = contextuals if is_causal else history_ends
        self._samples = np.stack(
            [offsets[:-1], lengths, prefixes, history_ends, np.full_like(lengths, tokens_per_target)], 1
        )
        self._on_device: dict[tuple[torch.device, tuple[TileShape, ...]], list[torch.Tensor]] = {}

    @classmethod
    def of(cls, masks: Sequence[SampleMask]) -> TritonWork:
        """Returns the work of a batch with these masks.

        Raises:
            ValueError: masks differ in `tokens_per_candidate` or `is_causal`.
        """
        kinds = {(mask.tokens_per_candidate, mask.is_causal) for mask in masks} or {(1, True)}
        if len(kinds) > 1:
            raise ValueError(
                f"masks have {len(kinds)} pairs of tokens_per_candidate and is_causal; "
                "expected one pair for the whole batch"
            )
        tokens_per_target, is_causal = kinds.pop()
        return cls(
            seq_offsets=np.cumsum([0, *(mask.num_tokens for mask in masks)]).tolist(),
            num_contextuals=[min(mask.num_contextual, mask.history_end) for mask in masks],
            num_targets=[(mask.num_tokens - mask.history_end) // tokens_per_target for mask in masks],
            tokens_per_target=tokens_per_target,
            is_causal=is_causal,
        )

    def lists(
        self, device: torch.device, by_rows: Sequence[TileShape], by_columns: Sequence[TileShape]
    ) -> list[torch.Tensor]:
        """Returns a work list on the device for each tile shape, those `by_rows` first.

        The first call copies them all in one non-blocking transfer from pinned memory. Later calls return the
        same tensors.

        Args:
            device: device of the kernels.
            by_rows: tile shapes of the kernels that compute blocks of rows.
            by_columns: tile shapes of the kernels that compute blocks of columns.

        Returns:
            `[items, 12]` int32 each, items with most tiles first. Fields 0 to 5: the sample's first token,
            its number of tokens, the block, the number of leading tokens that all see each other, the first
            target's token, tokens per target. Fields 6 to 11 are three ranges of tiles, begin and number
            each: tiles visible throughout, tiles at the mask's edge, and tiles that only targets see.
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
        samples, blocks = self._blocks(shape.rows)
        num_tokens, contextuals, history_ends, tokens_per_target = samples[:, 1:].T
        first = blocks * shape.rows
        last = np.minimum(first + shape.rows, num_tokens) - 1
        # Columns before the targets that the first and the last row of the block see.
        first_prefix = np.clip(first + 1, contextuals, history_ends)
        last_prefix = np.clip(last + 1, contextuals, history_ends)
        full = first_prefix // shape.columns
        edge_end = _ceil_div(last_prefix, shape.columns)
        first_target = np.maximum(first, history_ends)
        own = first_target - (first_target - history_ends) % tokens_per_target
        own_begin = np.maximum(own // shape.columns, edge_end)
        own_end = np.maximum(_ceil_div(last + 1, shape.columns), own_begin)
        return _longest_first(
            samples, blocks, (np.zeros_like(full), full), (full, edge_end), (own_begin, own_end)
        )

    def _by_columns(self, shape: TileShape) -> np.ndarray:
        """Returns the items of blocks of columns, which visit tiles of rows."""
        samples, blocks = self._blocks(shape.columns)
        num_tokens, contextuals, history_ends, tokens_per_target = samples[:, 1:].T
        first = blocks * shape.columns
        last = np.minimum(first + shape.columns, num_tokens) - 1
        of_history = first < history_ends
        begin = np.where(first < contextuals, 0, first)
        last_target = (last - history_ends) // tokens_per_target
        own_end = history_ends + (last_target + 1) * tokens_per_target
        end = np.where(of_history, num_tokens, own_end)
        # First row from which on all rows see all columns of the block.
        full = np.where(last < contextuals, 0, np.where(last < history_ends, last, end))
        begin, end = begin // shape.rows, _ceil_div(end, shape.rows)
        full = np.clip(_ceil_div(full, shape.rows), begin, end)
        return _longest_first(samples, blocks, (full, end), (begin, full), (full, full))

    def _blocks(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sample of each block of `size` tokens, `[blocks, 5]`, and the block's index in it."""
        num_blocks = _ceil_div(self._samples[:, 1], size)
        ends = num_blocks.cumsum()
        blocks = np.arange(num_blocks.sum()) - (ends - num_blocks).repeat(num_blocks)
        return self._samples.repeat(num_blocks, axis=0), blocks


def _longest_first(
    samples: np.ndarray, blocks: np.ndarray, *ranges: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Returns items `[blocks, 12]`, most tiles first, so that the programs that start last are short."""
    (full, full_end), (edge, edge_end), (own, own_end) = ranges
    num_full, num_edge, num_own = full_end - full, edge_end - edge, own_end - own
    fields = [
        samples[:, 0],
        samples[:, 1],
        blocks,
        *samples[:, 2:].T,
        full,
        num_full,
        edge,
        num_edge,
        own,
        num_own,
    ]
    order = np.argsort(-(num_full + num_edge + num_own), kind="stable")
    return np.stack(fields, 1)[order]


def _ceil_div(numbers: np.ndarray, divisor: int) -> np.ndarray:
    return -(-numbers // divisor)
