"""Layout of each sample's contextual, history and candidate tokens in a batch of jagged sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commons.sequence_batch.jagged_indices import spread
from hstu.modules.attention_mask import SampleMask


@dataclass(frozen=True)
class SequenceStructure:
    """Layout of the concatenated tokens of B samples.

    A sample's tokens are its contextual ones, then item₁ action₁ item₂ action₂ … (items alone if there are
    no actions). Its last items are the candidates. Tensors are on the batch's device, lists on the host.

    Attributes:
        tokens_per_item: 2 with actions, 1 without.
        total_tokens: tokens of all samples.
        offsets: `[B]` int64, index of each sample's first token.
        contextual_lengths: `[B]` int64, contextual tokens of each sample.
        item_lengths: `[B]` int64, items of each sample, candidates included.
        candidate_lengths: `[B]` int64, number of last items that are candidates.
        host_contextual_lengths, host_item_lengths, host_candidate_lengths: the same three on the host.
    """

    tokens_per_item: int
    total_tokens: int
    offsets: torch.Tensor
    contextual_lengths: torch.Tensor
    item_lengths: torch.Tensor
    candidate_lengths: torch.Tensor
    host_contextual_lengths: list[int]
    host_item_lengths: list[int]
    host_candidate_lengths: list[int]

    @classmethod
    def of(
        cls,
        contextual_lengths: torch.Tensor,
        item_lengths: torch.Tensor,
        candidate_lengths: torch.Tensor | None,
        tokens_per_item: int,
        on_host: Sequence[list[int]],
    ) -> SequenceStructure:
        """Returns the layout of samples with these lengths, `[B]` integers each; no host-device
        synchronization.

        Args:
            contextual_lengths: contextual tokens, all contextual features together.
            item_lengths: items, candidates included.
            candidate_lengths: number of last items that are candidates; None for none.
            tokens_per_item: 2 with actions, 1 without.
            on_host: for each sample its contextual tokens, items, actions and candidates. Without actions,
                the items twice.

        Raises:
            ValueError: a sample has unequal numbers of items and actions, or more candidates than items.
        """
        contextual, items = contextual_lengths.long(), item_lengths.long()
        candidates = torch.zeros_like(items) if candidate_lengths is None else candidate_lengths.long()
        _check(*on_host[1:])
        lengths = contextual + tokens_per_item * items
        return cls(
            tokens_per_item=tokens_per_item,
            total_tokens=sum(on_host[0]) + tokens_per_item * sum(on_host[1]),
            offsets=lengths.cumsum(0) - lengths,
            contextual_lengths=contextual,
            item_lengths=items,
            candidate_lengths=candidates,
            host_contextual_lengths=on_host[0],
            host_item_lengths=on_host[1],
            host_candidate_lengths=on_host[3],
        )

    @property
    def item_offsets(self) -> torch.Tensor:
        """Index of the token of each sample's first item, `[B]` int64."""
        return self.offsets + self.contextual_lengths

    def token_positions(self) -> torch.Tensor:
        """Returns each token's position in its sample, `[total_tokens]` int64.

        All candidates of a sample share positions: the item follows right after the history, then its action.
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
        return torch.minimum(places, ends) + past_history % self.tokens_per_item

    def last_item_tokens(self, num_last: torch.Tensor, total: int) -> torch.Tensor:
        """Returns the tokens of each sample's last `num_last` items in order, `[total]` int64.

        Args:
            num_last: `[B]` integers, at most the sample's items.
            total: their sum, passed so that it need not be read from the device.
        """
        first_item = self.item_lengths - num_last
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
            raise ValueError(f"row {row} has {num_items} items and {num_actions} actions; expected as many")
        if not 0 <= num_candidates <= num_items:
            raise ValueError(f"row {row} has {num_candidates} candidates among its {num_items} items")
