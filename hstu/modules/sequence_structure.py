"""Layout of each sample's contextual, history, and candidate tokens in a batch of jagged sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from commons.jagged_indices import spread, to_device_together
from hstu.modules.attention_mask import SampleMask


@dataclass(frozen=True)
class SequenceStructure:
    """The layout of the concatenated tokens of B samples.

    A sample's tokens are its contextual tokens, then item₁ action₁ item₂ action₂ …, or only items if there
    are no actions. Its last items are the candidates. Tensors are on the batch's device, lists on the host.

    A sample may be a piece of a longer one. Its tokens are then those of its own items. A piece may also look
    up the item after its own, which is not a token.

    Attributes:
        tokens_per_item: 2 with actions, 1 without.
        total_tokens: number of tokens of all samples.
        offsets: index of each sample's first token, `[B]` int64.
        contextual_lengths: number of contextual tokens of each sample, `[B]` int64.
        item_lengths: number of items of each sample, including candidates, `[B]` int64.
        looked_up_lengths: `item_lengths` plus the item after each piece, if it is looked up, `[B]` int64.
        candidate_lengths: number of last items that are candidates, `[B]` int64.
        host_contextual_lengths, host_item_lengths, host_looked_up_lengths, host_candidate_lengths: these
            four lengths on the host.
        first_positions: number of a sample's tokens before each piece, `[B]` int64; None without pieces.
    """

    tokens_per_item: int
    total_tokens: int
    offsets: torch.Tensor
    contextual_lengths: torch.Tensor
    item_lengths: torch.Tensor
    looked_up_lengths: torch.Tensor
    candidate_lengths: torch.Tensor
    host_contextual_lengths: list[int]
    host_item_lengths: list[int]
    host_looked_up_lengths: list[int]
    host_candidate_lengths: list[int]
    first_positions: torch.Tensor | None

    @classmethod
    def of(
        cls,
        contextual_lengths: torch.Tensor,
        item_lengths: torch.Tensor,
        candidate_lengths: torch.Tensor | None,
        tokens_per_item: int,
        on_host: Sequence[list[int]],
        pieces: np.ndarray | None = None,
    ) -> SequenceStructure:
        """Returns the layout of samples with these lengths, without host-device synchronization.

        Args:
            contextual_lengths: number of contextual tokens of each sample, `[B]` integers.
            item_lengths: number of items that each sample looks up, including candidates, `[B]` integers.
            candidate_lengths: number of last items that are candidates, `[B]` integers; None without any.
            tokens_per_item: 2 with actions, 1 without.
            on_host: numbers of contextual tokens, looked-up items, actions, and candidates of each sample.
                Without actions, the third list is not used.
            pieces: places of the rows, `[B]` of dtype `PIECE`, if the batch has pieces; else None.

        Raises:
            ValueError: a sample has unequal numbers of items and actions, or more candidates than items.
        """
        contextual, looked_up = contextual_lengths.long(), item_lengths.long()
        candidates = torch.zeros_like(looked_up) if candidate_lengths is None else candidate_lengths.long()
        items, host_items, first_positions = looked_up, on_host[1], None
        if pieces is not None:
            own = pieces["last_item"] - pieces["first_item"]
            items, first_positions = to_device_together([own, pieces["first_token"]], items.device)
            host_items = own.tolist()
        has_actions = tokens_per_item > 1
        _check(host_items, on_host[2] if has_actions else host_items, on_host[3])
        lengths = contextual + tokens_per_item * items
        return cls(
            tokens_per_item=tokens_per_item,
            total_tokens=sum(on_host[0]) + tokens_per_item * sum(host_items),
            offsets=lengths.cumsum(0) - lengths,
            contextual_lengths=contextual,
            item_lengths=items,
            looked_up_lengths=looked_up,
            candidate_lengths=candidates,
            host_contextual_lengths=on_host[0],
            host_item_lengths=host_items,
            host_looked_up_lengths=on_host[1],
            host_candidate_lengths=on_host[3],
            first_positions=first_positions,
        )

    @property
    def item_offsets(self) -> torch.Tensor:
        """Index of the token of each sample's first item, `[B]` int64."""
        return self.offsets + self.contextual_lengths

    def token_positions(self) -> torch.Tensor:
        """Returns each token's position in its whole sample, `[total_tokens]` int64.

        All candidates of a sample share positions: the item comes right after the history, then its action.
        So a candidate's score depends neither on the other candidates nor on their order.
        """
        lengths = self.contextual_lengths + self.tokens_per_item * self.item_lengths
        history_ends = lengths - self.tokens_per_item * self.candidate_lengths
        starts, ends = (
            per_sample.repeat_interleave(lengths, output_size=self.total_tokens)
            for per_sample in (self.offsets, history_ends)
        )
        places = torch.arange(self.total_tokens, device=self.offsets.device) - starts
        past_history = (places - ends).clamp(min=0)
        positions = torch.minimum(places, ends) + past_history % self.tokens_per_item
        if self.first_positions is None:
            return positions
        return positions + self.first_positions.repeat_interleave(lengths, output_size=self.total_tokens)

    def item_tokens(self) -> torch.Tensor:
        """Returns the index of each item's token in order, `[items]` int64."""
        total = sum(self.host_item_lengths)
        return spread(self.item_offsets, self.item_lengths, total, self.tokens_per_item)

    def own_items(self) -> torch.Tensor | None:
        """Returns the indices of the looked-up items that are tokens, `[items]` int64; None if all are."""
        if self.host_item_lengths == self.host_looked_up_lengths:
            return None
        starts = self.looked_up_lengths.cumsum(0) - self.looked_up_lengths
        return spread(starts, self.item_lengths, sum(self.host_item_lengths))

    def last_item_tokens(self, num_last: torch.Tensor, total: int) -> torch.Tensor:
        """Returns the token indices of each sample's last `num_last` items in order, `[total]` int64.

        The item after a piece counts as the piece's last item. Its index is the one after the piece's tokens.

        Args:
            num_last: `[B]` integers, at most the sample's number of items.
            total: sum of `num_last`, passed so that it need not be read from the device.
        """
        first_item = self.looked_up_lengths - num_last
        return spread(
            self.item_offsets + self.tokens_per_item * first_item, num_last, total, self.tokens_per_item
        )

    def masks(self, is_causal: bool, disable_contextual_mask: bool) -> list[SampleMask]:
        """Returns the attention mask of each sample."""
        return [
            SampleMask(
                num_tokens=contextual + self.tokens_per_item * items,
                num_contextual=0 if disable_contextual_mask else contextual,
                history_end=contextual + self.tokens_per_item * (items - candidates),
                tokens_per_candidate=self.tokens_per_item,
                is_causal=is_causal,
            )
            for contextual, items, candidates in zip(
                self.host_contextual_lengths, self.host_item_lengths, self.host_candidate_lengths, strict=True
            )
        ]


def _check(items: list[int], actions: list[int], candidates: list[int]) -> None:
    for row, (num_items, num_actions, num_candidates) in enumerate(
        zip(items, actions, candidates, strict=True)
    ):
        if num_items != num_actions:
            raise ValueError(
                f"row {row} has {num_items} items and {num_actions} actions; expected equally many"
            )
        if not 0 <= num_candidates <= num_items:
            raise ValueError(f"row {row} has {num_candidates} candidates among its {num_items} items")
