from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.training import RetrievalMetrics

NAMES = ("HitRate@1", "hitrate@3", "Recall@5", "NDCG@3", "NDCG@5")


def _outputs(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rankings, and targets that are at place 0 to 5 of them in turn, where 5 is not to be found."""
    rng = np.random.default_rng(3)
    permutations = np.stack([rng.permutation(6) for _ in range(num_samples)])
    targets = permutations[np.arange(num_samples), np.arange(num_samples) % 6]
    permutations[0] = -1  # nothing was found for the first
    return torch.from_numpy(permutations[:, :5].copy()), torch.from_numpy(targets)


def _metrics_of_rank(shares: list[list[int]]) -> list[dict[str, float]]:
    """Twice the same evaluation; the shares are the sizes of each rank's batches."""
    metrics = RetrievalMetrics(NAMES, 5, torch.device("cpu"))
    before = sum(sum(of_rank) for of_rank in shares[: dist.get_rank()])
    items, targets = _outputs(sum(map(sum, shares)))
    evaluations = []
    for _ in range(2):
        start = before
        for rows in shares[dist.get_rank()]:
            metrics.update(SimpleNamespace(items=items[start:][:rows], targets=targets[start:][:rows]))
            start += rows
        evaluations.append(metrics.compute())
    return evaluations


@pytest.mark.parametrize("shares", [[[3, 4], [2]], [[9], []], [[0, 5], [4, 0]]])
def test_every_sample_counts_once_whichever_rank_it_is_on(pools, shares):
    items, targets = (tensor.tolist() for tensor in _outputs(9))
    places = [row.index(target) if target in row else 99 for row, target in zip(items, targets, strict=True)]
    expected = {
        name: sum(
            (1 / np.log2(place + 2) if "NDCG" in name else 1.0) for place in places if place < int(name[-1])
        )
        / 9
        for name in NAMES
    }
    assert 0 < expected["HitRate@1"] < expected["Recall@5"] < 1
    for evaluations in pools(2).run(_metrics_of_rank, shares):
        assert evaluations == [pytest.approx(expected)] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NDCG@11", "NDCG@11': expected k of at most top_k_for_generation = 10"),
        ("AUC", "AUC': expected HitRate@k, HR@k, Recall@k or NDCG@k"),
        ("HitRate@0", "HitRate@0': expected HitRate@k"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        RetrievalMetrics(["HitRate@10", name], 10, torch.device("cpu"))
