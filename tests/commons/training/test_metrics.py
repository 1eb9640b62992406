"""AUC, HitRate, Recall and NDCG over all ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.training import RankingMetrics, RetrievalMetrics
from hstu.models.ranking import RankingOutput
from tests.on_ranks import on_ranks

CPU = torch.device("cpu")
NAMES = ("HitRate@1", "hitrate@3", "Recall@5", "NDCG@3", "NDCG@5")


@on_ranks(2)
def test_a_task_of_one_class_has_no_auc_and_no_part_of_the_mean():
    metrics = RankingMetrics(3, positive_class=0, device=CPU)
    labels = torch.tensor([[0b100, 0b100, 0b000], [0b101, 0b001, 0b001]][dist.get_rank()])
    logits = torch.tensor([[-1.0, 0, 2], [-2, 1, 1], [-3, 2, 3]]) + 4 * dist.get_rank()
    metrics.update(RankingOutput(logits, labels))
    figures = metrics.compute()
    assert metrics._aucs[0].update_called is False  # a fresh start
    assert figures["AUC_task0"] == 1.0
    assert np.isnan(figures["AUC_task1"])
    assert figures["AUC_task2"] == pytest.approx(2 / 9)
    assert figures["AUC"] == pytest.approx((1 + 2 / 9) / 2)


def test_auc_of_ratings_and_of_tasks():
    logits = torch.tensor([[4.0, 0, 0], [0, 6.0, 0], [0, 0, 5.0], [0, 5.0, 0]])
    classes = RankingMetrics(1, positive_class=2, device=CPU)
    classes.update(RankingOutput(logits, torch.tensor([0, 1, 2, 2])))
    # Of the 2 × 2 pairs of a positive and a negative, the last positive scores above one negative only.
    assert classes.compute() == {"AUC": pytest.approx(0.75)}
    tasks = RankingMetrics(2, positive_class=0, device=CPU)
    tasks.update(RankingOutput(torch.tensor([[1.0, -1], [-1, 1], [2, 2]]), torch.tensor([0b01, 0b10, 0b01])))
    expected = {"AUC_task0": 1.0, "AUC_task1": 0.5, "AUC": 0.75}
    assert tasks.compute() == pytest.approx(expected)


def _outputs(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rankings, and targets at place 0 to 5 of them in turn, where place 5 is not found."""
    rng = np.random.default_rng(3)
    permutations = np.stack([rng.permutation(6) for _ in range(num_samples)])
    targets = permutations[np.arange(num_samples), np.arange(num_samples) % 6]
    permutations[0] = -1  # nothing was found for the first
    return torch.from_numpy(permutations[:, :5].copy()), torch.from_numpy(targets)


@pytest.mark.parametrize("shares", [[[3, 4], [2]], [[9], []], [[0, 5], [4, 0]]])
@on_ranks(2)
def test_every_sample_counts_once_on_any_rank(shares):
    metrics = RetrievalMetrics(NAMES, 5, CPU)
    items, targets = _outputs(sum(map(sum, shares)))
    evaluations = []
    for _ in range(2):
        start = sum(sum(of_rank) for of_rank in shares[: dist.get_rank()])
        for rows in shares[dist.get_rank()]:
            metrics.update(SimpleNamespace(items=items[start:][:rows], targets=targets[start:][:rows]))
            start += rows
        evaluations.append(metrics.compute())
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
        RetrievalMetrics(["HitRate@10", name], 10, CPU)
