"""Loss of the retrieval model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


def sampled_softmax_loss(
    queries: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    positive_ids: torch.Tensor,
    negative_ids: torch.Tensor,
    queries_per_sample: Sequence[int],
    negatives_per_sample: Sequence[int],
    temperature: float,
) -> torch.Tensor:
    """Returns the summed cross-entropy of each query's positive against its sample's negatives, a scalar.

    The score of a query and an item is their product divided by `temperature`. A negative equal to the
    query's positive does not count. A query without negatives has a loss of 0. Samples are computed one by
    one, so a sample costs only its own queries × negatives.

    Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024, and their training code,
    facebookresearch/generative-recommenders, `research/modeling/sequential/losses/sampled_softmax.py`.

    Args:
        queries: `[Q, d]`, sample by sample.
        positives: `[Q, d]`, the target item of each query.
        negatives: `[N, d]`, sample by sample.
        positive_ids, negative_ids: `[Q]` and `[N]` integers, ids of the items.
        queries_per_sample, negatives_per_sample: numbers per sample, which add up to Q and N.
        temperature: positive divisor of the scores.
    """
    # exp(hidden) vanishes next to exp of any score. −inf would give NaN if all negatives equal the positive.
    hidden = torch.finfo(queries.dtype).min
    samples = zip(
        *(tensor.split(queries_per_sample) for tensor in (queries, positive_ids)),
        *(tensor.split(negatives_per_sample) for tensor in (negatives, negative_ids)),
        strict=True,
    )
    against = []
    for sample_queries, ids, others, other_ids in samples:
        scores = (sample_queries @ others.T / temperature).masked_fill(ids.unsqueeze(1) == other_ids, hidden)
        against.append(scores.logsumexp(1))
    right = (queries * positives).sum(1) / temperature
    # log(1 + exp(against - right)) is the cross-entropy: the log of the softmax's denominator minus `right`.
    return functional.softplus(torch.cat(against) - right).sum()
