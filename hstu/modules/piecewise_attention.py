"""HSTU attention of a batch in which some rows are pieces of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hstu.modules.attention_backend import batch_attention, piece_attention
from hstu.modules.attention_mask import SampleMask

if TYPE_CHECKING:
    from commons.extensions.pieces import PlacedPieces


class PiecewiseAttention:
    """Attention in a step that cuts a sample. Every rank runs it, with or without a piece.

    While keys and values from other ranks are in transit, rows that see no other piece are computed. A rank
    without pieces runs the same operations with nothing to fetch, so that the collectives of forward and
    backward have the same order on all ranks.

    Args:
        backend: "pytorch" or "triton".
        masks: mask of each row by itself, as `SequenceStructure.masks` returns them.
        pieces: places of the rows in their samples.
        scaling_seqlen: constant divisor of the attention weights.
        device: device of the tokens.

    Raises:
        ValueError: the plan's token counts differ from the model's.
    """

    def __init__(
        self,
        backend: str,
        masks: Sequence[SampleMask],
        pieces: PlacedPieces,
        scaling_seqlen: int,
        device: torch.device,
    ) -> None:
        first = masks[0]
        self._fetch = pieces.fetch(_num_seen(pieces, first.tokens_per_candidate, first.is_causal), device)
        rows, ends_sample = pieces.rows, pieces.ends_sample
        lengths = np.array([mask.num_tokens for mask in masks])
        planned = rows["last_token"] - rows["first_token"]
        for row in np.flatnonzero(lengths != planned)[:1]:
            raise ValueError(
                f"row {row} has {lengths[row]} tokens, and the plan counts {planned[row]}: to cut samples, "
                "get_tokens must count the model's tokens, as HSTUBatch.num_tokens does"
            )
        piece_masks = [
            _mask_of_piece(masks[row], int(rows["first_token"][row]), num_keys, bool(ends_sample[row]))
            for row, num_keys in zip(self._fetch.piece_rows.tolist(), self._fetch.piece_keys, strict=True)
        ]
        is_whole = np.ones(len(masks), dtype=bool)
        is_whole[self._fetch.piece_rows] = False
        whole = np.flatnonzero(is_whole).tolist()
        starts = (lengths.cumsum() - lengths).tolist()
        self._whole = batch_attention(
            backend, [masks[row] for row in whole], scaling_seqlen, device, [starts[row] for row in whole]
        )
        self._pieces = piece_attention(
            backend, piece_masks, self._fetch.piece_starts, self._fetch.key_tokens, scaling_seqlen, device
        )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the attended values. All tensors are `[total_tokens, num_heads, head_dim]`."""
        on_their_way = self._fetch.start(k, v)
        whole_output = self._whole(q, k, v)
        return whole_output + self._pieces(q, k, v, on_their_way.land())


def _num_seen(pieces: PlacedPieces, tokens_per_candidate: int, is_causal: bool) -> np.ndarray:
    """Returns the number of its sample's tokens that each row sees, int64 `[rows of the step]`."""
    rows = pieces.all_rows()
    if is_causal:
        return rows["last_token"]
    history_ends = rows["num_tokens"] - tokens_per_candidate * pieces.last_piece_count("num_candidates")
    return np.where(rows["last_item"] == rows["num_items"], rows["num_tokens"], history_ends)


def _mask_of_piece(mask: SampleMask, first: int, num_keys: int, ends_sample: bool) -> SampleMask:
    """Returns the mask of a piece in the coordinates of its sample, from the mask of the piece by itself.

    Args:
        mask: mask of the piece's own tokens.
        first: index in the sample of the piece's first token.
        num_keys: number of the sample's tokens that the piece sees.
        ends_sample: whether this is the sample's last piece, which has the candidates.
    """
    return replace(
        mask,
        num_tokens=num_keys,
        history_end=first + mask.history_end if ends_sample else num_keys,
        first_row=first,
        num_rows=mask.num_tokens,
    )
