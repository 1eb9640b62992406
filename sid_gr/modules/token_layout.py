"""Layout of each sample's contextual, history, BOS, and candidate tokens in a batch of jagged sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from commons.datasets import SIDBatch
from commons.jagged_indices import spread, to_device_together


@dataclass(frozen=True)
class TokenLayout:
    """The layout of the concatenated tokens of B samples.

    A sample's tokens are its contextual ids, the codes of its history, and then, for each candidate, a BOS
    and its codes. The sample's very last code is left out, because it predicts nothing. The token before a
    candidate code predicts that code. Tensors are on the batch's device, lists on the host.

    A row may be a piece of a sample. Its tokens are those of its own items, and the last code is left out
    only in the last piece. The item before its own is looked up, but adds no token and no loss.

    Attributes:
        ids: ids of each feature, samples concatenated, `[ids]` int64.
        labels: codes to predict, `[candidate codes]` int64.
        host_lengths: number of tokens of each row.
        host_prompt_lengths: number of tokens of each whole sample up to its last BOS, which predict its
            target; 0 for padding rows.
        prompt_lengths: `host_prompt_lengths` on the device, `[B]` int64.
        offsets: index of each sample's first token, `[B]` int64. For a later piece, it is the index that the
            first token of the sample would have, and may be negative.
        sources: row of each token in the concatenated embeddings of contextual ids, history codes, candidate
            codes, and candidate BOS, `[total_tokens]` int64.
        previous_items: number of the previous item in the sample, for all history items and then all
            candidates, `[items]` int64; `items` if there is no previous item.
        last_candidates: index of each row's last candidate among all candidates, `[B]` int64.
        positions: position of each token in its whole sample, `[total_tokens]` int64.
        predictors: index of the token that predicts each label, `[candidate codes]` int64.
    """

    ids: dict[str, torch.Tensor]
    labels: torch.Tensor
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

        An exchanged batch needs no host-device synchronization. Any other batch needs one, for the lengths.

        Raises:
            ValueError: a row's codes do not form whole items, a sample has no candidate, or the token counts
                of a plan that cuts samples differ from the model's.
        """
        keys, counts = batch.features.keys(), batch.row_counts_on_host()
        names = [*batch.contextual_feature_names, batch.history_feature_name, batch.candidate_feature_name]
        num_codes = batch.num_hierarchies
        host = _HostRows.of(batch, np.stack([counts[f"features.{name}"] for name in names]))
        # The KeyedJaggedTensor's own split would read the lengths once more, if there was no exchange.
        values = batch.features.values().split([int(counts[f"features.{key}"].sum()) for key in keys])
        ids = dict(zip(keys, values, strict=True))
        lengths = torch.stack([batch.feature_lengths(name) for name in names])
        totals = [len(ids[name]) for name in names]
        first_rows = np.cumsum([0, *totals]).tolist()
        device, total_tokens = lengths.device, int(host.tokens.sum())
        labels = ids[names[-1]]
        if batch.pieces is None:
            tokens = batch.num_tokens()
            first_tokens, prompts = torch.zeros_like(tokens), (tokens - (num_codes - 1)).clamp(min=0)
            codes = [
                _Codes(feature_lengths, torch.arange(first, first + total, device=device))
                for feature_lengths, first, total in zip(lengths, first_rows[:-1], totals, strict=True)
            ]
            left_out: torch.Tensor | int = 1
        else:
            *halos, tokens, first_tokens, prompts, left_out = to_device_together(
                [*host.halos, host.tokens, host.first_tokens, host.prompts, host.left_out], device
            )
            codes = _own_codes(lengths, halos, first_rows, (host.lengths - host.halos).sum(1).tolist())
            labels = labels.index_select(0, codes[-1].rows - first_rows[-2])
        starts = tokens.cumsum(0) - tokens
        sources, predictors = _sources(starts, codes, left_out, first_rows, total_tokens, num_codes)
        return cls(
            ids=ids,
            labels=labels,
            host_lengths=host.tokens.tolist(),
            host_prompt_lengths=host.prompts.tolist(),
            prompt_lengths=prompts,
            offsets=starts - first_tokens,
            sources=sources,
            previous_items=_previous_items(
                *(lengths[-2:] // num_codes), *(total // num_codes for total in totals[-2:])
            ),
            last_candidates=(lengths[-1] // num_codes).cumsum(0) - 1,
            positions=spread(first_tokens, tokens, total_tokens),
            predictors=predictors,
        )


@dataclass(frozen=True)
class _HostRows:
    """Numbers of a batch's rows on the host, int64 `[B]` unless another shape is given.

    Attributes:
        lengths: number of ids that are looked up, `[features, B]`.
        halos: number of leading ids that belong to the item before a piece, `[features, B]`.
        left_out: 1 if the row's last code is not a token, because the row ends its sample; else 0.
        tokens: number of tokens of the row.
        first_tokens: number of tokens of its sample before the row.
        prompts: number of tokens of the whole sample up to its last BOS.
    """

    lengths: np.ndarray
    halos: np.ndarray
    left_out: np.ndarray
    tokens: np.ndarray
    first_tokens: np.ndarray
    prompts: np.ndarray

    @classmethod
    def of(cls, batch: SIDBatch, lengths: np.ndarray) -> _HostRows:
        """Returns the numbers of a batch with these lengths, contextual features first, candidates last."""
        num_codes = batch.num_hierarchies
        halos, ends_sample = np.zeros_like(lengths), np.ones(batch.batch_size, dtype=bool)
        if batch.pieces is not None:
            follows = batch.pieces.rows["first_item"] > 0
            halos[-2] = np.where(follows & (lengths[-2] > 0), num_codes, 0)
            halos[-1] = np.where(follows & (lengths[-2] == 0), num_codes, 0)
            ends_sample = batch.pieces.ends_sample
        _check(lengths[-2], lengths[-1], num_codes, ends_sample, batch.num_samples)
        own = lengths - halos
        left_out = (ends_sample & (own[-1] > 0)).astype(np.int64)
        tokens = own.sum(0) + own[-1] // num_codes - left_out
        first_tokens, num_tokens = np.zeros_like(tokens), tokens
        if batch.pieces is not None:
            rows = batch.pieces.rows
            _check_planned(tokens, rows["last_token"] - rows["first_token"])
            first_tokens, num_tokens = rows["first_token"], rows["num_tokens"]
        prompts = np.maximum(num_tokens - (num_codes - 1), 0)
        return cls(lengths, halos, left_out, tokens, first_tokens, prompts)


@dataclass(frozen=True)
class _Codes:
    """The ids of a feature that are tokens.

    Attributes:
        lengths: number of such ids in each row, `[B]` int64.
        rows: rows of these ids in the concatenated embeddings, `[ids]` int64.
    """

    lengths: torch.Tensor
    rows: torch.Tensor


def _own_codes(
    lengths: torch.Tensor, halos: list[torch.Tensor], first_rows: list[int], totals: list[int]
) -> list[_Codes]:
    """Returns the ids of each feature without the halos. `totals` are the numbers of these ids."""
    codes = []
    for feature_lengths, halo, first, total in zip(lengths, halos, first_rows[:-1], totals, strict=True):
        starts, own = feature_lengths.cumsum(0) - feature_lengths, feature_lengths - halo
        codes.append(_Codes(own, spread(starts + halo + first, own, total)))
    return codes


def _sources(
    starts: torch.Tensor,
    codes: list[_Codes],
    left_out: torch.Tensor | int,
    first_rows: list[int],
    total_tokens: int,
    num_hierarchies: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `TokenLayout.sources` and `.predictors`.

    Args:
        starts: index of each row's first token, `[B]` int64.
        codes: ids of each feature that are tokens.
        left_out: number of codes at the end of each row that are not tokens, `[B]` or one for all rows.
        first_rows: index of the first embedding of each feature, then of BOS.
        total_tokens: number of tokens of all rows.
        num_hierarchies: number of codes per item.
    """
    # The additional last element takes the codes that are left out.
    sources = torch.empty(total_tokens + 1, dtype=torch.int64, device=starts.device)
    cursor = starts
    for feature_codes in codes[:-1]:
        sources[spread(cursor, feature_codes.lengths, len(feature_codes.rows))] = feature_codes.rows
        cursor = cursor + feature_codes.lengths
    lengths, rows = codes[-1].lengths, codes[-1].rows
    places = spread(torch.zeros_like(cursor), lengths, len(rows))
    first_bos, ends = (
        per_row.repeat_interleave(lengths, output_size=len(rows)) for per_row in (cursor, lengths - left_out)
    )
    predictors = first_bos + places + places // num_hierarchies
    sources[torch.where(places >= ends, total_tokens, predictors + 1)] = rows
    bos = predictors[::num_hierarchies]  # BOS predicts an item's first code
    *_, first_candidate, first_of_bos = first_rows
    sources[bos] = (rows[::num_hierarchies] - first_candidate) // num_hierarchies + first_of_bos
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


def _check(
    history: np.ndarray,
    candidates: np.ndarray,
    num_hierarchies: int,
    ends_sample: np.ndarray,
    num_samples: int,
) -> None:
    for row in np.flatnonzero(history % num_hierarchies + candidates % num_hierarchies)[:1]:
        raise ValueError(
            f"row {row} has {history[row]} history and {candidates[row]} candidate codes; expected "
            f"multiples of num_hierarchies = {num_hierarchies}"
        )
    for row in np.flatnonzero(ends_sample[:num_samples] & (candidates[:num_samples] == 0))[:1]:
        raise ValueError(f"row {row} has no candidate; every sample needs at least one, its target")


def _check_planned(tokens: np.ndarray, planned: np.ndarray) -> None:
    for row in np.flatnonzero(tokens != planned)[:1]:
        raise ValueError(
            f"row {row} has {tokens[row]} tokens, and the plan that cut samples counts {planned[row]}; "
            "let the shuffler's get_tokens return SIDBatch.num_tokens()"
        )
