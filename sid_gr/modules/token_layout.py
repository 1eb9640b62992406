"""Layout of each sample's contextual, history, BOS and candidate tokens in a batch of jagged sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commons.datasets import SIDBatch
from commons.sequence_batch.jagged_indices import spread


@dataclass(frozen=True)
class TokenLayout:
    """Layout of the concatenated tokens of B samples.

    A sample's tokens are its contextual ids, the codes of its history, and a BOS and the codes of each
    candidate. Its very last code is left out, because it predicts nothing. The token before a candidate code
    predicts it. Tensors are on the batch's device, lists on the host.

    Attributes:
        ids: `[ids]` int64 of each feature, samples concatenated.
        host_lengths: tokens of each sample.
        host_prompt_lengths: tokens of each sample up to its last BOS, which predict its target; 0 for padding
            rows.
        prompt_lengths: `[B]` int64, the same.
        offsets: `[B]` int64, index of each sample's first token.
        sources: `[total_tokens]` int64, row of each token in the concatenated embeddings of contextual ids,
            history codes, candidate codes and candidate BOS.
        previous_items: `[items]` int64, number of the previous item in the sample, for all history items and
            then all candidates; `items` where there is none.
        last_candidates: `[B]` int64, index of each sample's last candidate among all candidates.
        positions: `[total_tokens]` int64, position of each token in its sample.
        predictors: `[candidate codes]` int64, token that predicts each candidate code.
    """

    ids: dict[str, torch.Tensor]
    host_lengths: list[int]
    host_prompt_lengths: list[int]
    prompt_lengths: torch.Tensor
    offsets: torch.Tensor
    sources: torch.Tensor
    previous_items: torch.Tensor
    last_candidates: torch.Tensor
    positions: torch.Tensor
    predictors: torch.Tensor

    @classmethod
    def of(cls, batch: SIDBatch) -> TokenLayout:
        """Returns the layout of a batch on any device.

        No host-device synchronization for an exchanged batch; else one, for the lengths.

        Raises:
            ValueError: a row's codes do not form whole items, or a sample has no candidate.
        """
        keys, counts = batch.features.keys(), batch.row_counts_on_host()
        on_host = {key: counts[f"features.{key}"].tolist() for key in keys}
        names = [*batch.contextual_feature_names, batch.history_feature_name, batch.candidate_feature_name]
        _check(on_host[names[-2]], on_host[names[-1]], batch.num_hierarchies, batch.num_samples)
        # Not by the KeyedJaggedTensor: without an exchange it would read its lengths once more.
        values = batch.features.values().split([sum(on_host[key]) for key in keys])
        ids = dict(zip(keys, values, strict=True))
        lengths = torch.stack([batch.feature_lengths(name) for name in names])
        totals = [len(ids[name]) for name in names]
        num_items = [total // batch.num_hierarchies for total in totals[-2:]]
        tokens = batch.num_tokens()
        host_tokens = [
            sum(of_row) + of_row[-1] // batch.num_hierarchies - (of_row[-1] > 0)
            for of_row in zip(*(on_host[name] for name in names), strict=True)
        ]
        total_tokens = sum(host_tokens)
        offsets = tokens.cumsum(0) - tokens
        sources, predictors = _sources(offsets, lengths, totals, total_tokens, batch.num_hierarchies)
        last_codes = batch.num_hierarchies - 1
        return cls(
            ids=ids,
            host_lengths=host_tokens,
            host_prompt_lengths=[max(length - last_codes, 0) for length in host_tokens],
            prompt_lengths=(tokens - last_codes).clamp(min=0),
            offsets=offsets,
            sources=sources,
            previous_items=_previous_items(*(lengths[-2:] // batch.num_hierarchies), *num_items),
            last_candidates=(lengths[-1] // batch.num_hierarchies).cumsum(0) - 1,
            positions=spread(torch.zeros_like(offsets), tokens, total_tokens),
            predictors=predictors,
        )


def _sources(
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    totals: list[int],
    total_tokens: int,
    num_hierarchies: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `TokenLayout.sources` and `.predictors` for `[features, B]` lengths and their totals."""
    device = offsets.device
    # The additional last element takes the codes that are left out.
    sources = torch.empty(total_tokens + 1, dtype=torch.int64, device=device)
    cursor, first_row = offsets, 0
    for of_feature, total in zip(lengths[:-1], totals[:-1], strict=True):
        sources[spread(cursor, of_feature, total)] = torch.arange(first_row, first_row + total, device=device)
        cursor, first_row = cursor + of_feature, first_row + total
    candidate_lengths, total = lengths[-1], totals[-1]
    places = spread(torch.zeros_like(cursor), candidate_lengths, total)
    starts, ends = (
        per_row.repeat_interleave(candidate_lengths, output_size=total)
        for per_row in (cursor, candidate_lengths)
    )
    predictors = starts + places + places // num_hierarchies
    destinations = torch.where(places == ends - 1, total_tokens, predictors + 1)
    sources[destinations] = torch.arange(first_row, first_row + total, device=device)
    of_bos = predictors[::num_hierarchies]  # BOS predicts an item's first code
    sources[of_bos] = torch.arange(len(of_bos), device=device) + first_row + total
    return sources[:total_tokens], predictors


def _previous_items(
    num_history: torch.Tensor, num_candidates: torch.Tensor, total_history: int, total_candidates: int
) -> torch.Tensor:
    """Returns `TokenLayout.previous_items` for `[B]` numbers of items and their totals."""
    none = total_history + total_candidates
    numbers = torch.arange(none, device=num_history.device)
    history, candidates = numbers.split([total_history, total_candidates])
    last_of_history = torch.where(num_history > 0, num_history.cumsum(0) - 1, none)
    first = torch.zeros_like(num_history)
    before_history = torch.where(spread(first, num_history, total_history) == 0, none, history - 1)
    before_candidates = torch.where(
        spread(first, num_candidates, total_candidates) == 0,
        last_of_history.repeat_interleave(num_candidates, output_size=total_candidates),
        candidates - 1,
    )
    return torch.cat([before_history, before_candidates])


def _check(history: list[int], candidates: list[int], num_hierarchies: int, num_samples: int) -> None:
    for row, (num_history, num_candidates) in enumerate(zip(history, candidates, strict=True)):
        if num_history % num_hierarchies or num_candidates % num_hierarchies:
            raise ValueError(
                f"row {row} has {num_history} history and {num_candidates} candidate codes; expected "
                f"multiples of num_hierarchies = {num_hierarchies}"
            )
        if row < num_samples and not num_candidates:
            raise ValueError(f"row {row} has no candidate; every sample needs at least one, its target")
