"""Causal attention of a batch in which some rows are pieces of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from commons.jagged_indices import to_device_together
from sid_gr.modules.attention import JaggedCausalAttention, LastQueriesAttention, permuted

if TYPE_CHECKING:
    from commons.extensions.pieces import PlacedPieces


class PiecewiseCausalAttention:
    """`JaggedCausalAttention` for a step that cuts a sample; collective in forward and backward.

    A piece sees all earlier tokens of its sample. While keys and values from other ranks are in transit,
    whole samples and first pieces are computed. A rank without pieces takes part in the collectives, too.

    Args:
        lengths: number of tokens of each row, on the host.
        pieces: places of the rows in their samples.
        device: device of the tokens.
        keep: whether to keep keys and values, to extend the sequences later.

    Attributes:
        keys_values: keys and values, as in `JaggedCausalAttention`.
        key_starts: index in the keys of the first token of each row's sample.
    """

    def __init__(
        self, lengths: Sequence[int], pieces: PlacedPieces, device: torch.device, keep: bool = False
    ) -> None:
        self._fetch = pieces.fetch(pieces.all_rows()["last_token"], device)
        rows, num_keys = self._fetch.piece_rows, np.array(self._fetch.piece_keys, np.int64)
        on_host = np.array(lengths, np.int64)
        is_piece = np.isin(np.arange(len(on_host)), rows)
        host_order = np.argsort(is_piece.repeat(on_host), kind="stable")
        order, inverse, self._key_tokens = to_device_together(
            [host_order, host_order.argsort(), self._fetch.key_tokens], device
        )
        self._order = (order, inverse) if len(rows) else None
        self._num_whole = int(on_host[~is_piece].sum())
        self._whole = JaggedCausalAttention(on_host[~is_piece].tolist())
        self._pieces = LastQueriesAttention(on_host[rows].tolist(), num_keys.tolist(), device)
        self._keep = keep
        self.keys_values: list[tuple[torch.Tensor, torch.Tensor]] = []
        starts = on_host.cumsum() - on_host
        starts[rows] = on_host.sum() + num_keys.cumsum() - num_keys
        self.key_starts = starts.tolist()

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes the attention of all rows. Collective, without host-device synchronization."""
        on_their_way = self._fetch.start(k, v)
        (q_whole, q_pieces), (k_whole, _), (v_whole, _) = (self._divide(x) for x in (q, k, v))
        whole_output = self._whole(layer, q_whole, k_whole, v_whole)
        seen = _SeenKeys.apply(k, v, on_their_way.land(), self._key_tokens, self._pieces.num_keys)
        keys, values = seen.unbind(1)
        if self._keep:
            self.keys_values.append((torch.cat([k, keys]), torch.cat([v, values])))
        together = torch.cat([whole_output, self._pieces(q_pieces, keys, values)])
        return permuted(together, *reversed(self._order)) if self._order else together

    def _divide(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the tokens of whole samples and first pieces, and the tokens of later pieces."""
        if self._order:
            x = permuted(x, *self._order)
        return x.split([self._num_whole, len(x) - self._num_whole])


class _SeenKeys(torch.autograd.Function):
    """Copies the keys and values that each piece sees, `[keys, 2, num_kv_heads, head_dim]`.

    Pieces may share tokens. Backward adds gradients piece by piece, so that no sum depends on the order of
    threads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        k: torch.Tensor,
        v: torch.Tensor,
        fetched: torch.Tensor,
        tokens: torch.Tensor,
        num_keys: list[int],
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_keys, ctx.num_own, ctx.num_fetched = num_keys, len(k), len(fetched)
        if not num_keys:
            return k.new_empty((0, 2, *k.shape[1:]))
        return torch.cat([torch.stack([k, v], 1), fetched]).index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        if not ctx.num_keys:  # then nothing was fetched
            return None, None, grad, None, None
        sizes = [ctx.num_own, ctx.num_fetched]
        grads = grad.new_zeros((sum(sizes), *grad.shape[1:]))
        for seen, part in zip(tokens.split(ctx.num_keys), grad.split(ctx.num_keys), strict=True):
            grads[seen] += part
        own, fetched = grads.split(sizes)
        return own[:, 0], own[:, 1], fetched, None, None
