"""AUC, HitRate, Recall and NDCG over all ranks, of retrieved items and of a whole catalogue."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.training import (
    CatalogueMetrics,
    OptimizerArgs,
    RankingMetrics,
    RetrievalMetrics,
    catalogue_metrics,
    shard_model,
)
from hstu.models import RankingOutput
from tests.hstu.retrieval_samples import VOCABULARY, Sample, item_vectors, retrieval_batch, retrieval_model
from tests.on_ranks import on_ranks

CPU = torch.device("cpu")
NAMES = ("HR@1", "hr@3", "Recall@5", "NDCG@3", "NDCG@5")
# Without the first ids and without some in between, the most of which are on one rank.
CATALOGUE = np.array([3, *range(9, 20), 22, 23, 30, *range(41, VOCABULARY)])


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


def _auc(scores, labels):
    """The share of pairs of a positive and a negative label that are in order; ties count half."""
    margins = np.subtract.outer(
        np.asarray(scores, float)[labels == 1], np.asarray(scores, float)[labels == 0]
    )
    return ((margins > 0) + 0.5 * (margins == 0)).mean()


@pytest.mark.parametrize("scale", [1.0, 30.0])
@on_ranks(3)
def test_auc_is_that_of_all_logits_however_they_are_divided(scale):
    rng = np.random.default_rng(0)
    logits, labels = scale * rng.normal(size=(300, 5)).astype(np.float32), rng.integers(0, 5, 300)
    logits[:9, 3:] += 12  # probabilities of which sum up to more than 1 in float32
    odds = [
        np.logaddexp.reduce(part, 1) for part in (logits[:, 3:].astype(float), logits[:, :3].astype(float))
    ]
    classes = RankingMetrics(1, positive_class=3, device=CPU)
    tasks = RankingMetrics(2, positive_class=0, device=CPU)
    for part in np.array_split(np.arange(300), 7)[dist.get_rank() :: 2] if dist.get_rank() < 2 else []:
        for metrics, width in ((classes, 5), (tasks, 2)):
            output = SimpleNamespace(
                logits=torch.from_numpy(logits[part, :width]), labels=torch.from_numpy(labels[part])
            )
            metrics.update(output)
    assert classes.compute()["AUC"] == pytest.approx(_auc(odds[0] - odds[1], labels >= 3), abs=1e-6)
    figures = tasks.compute()
    for task in range(2):
        expected = _auc(logits[:, task], labels >> task & 1)
        assert figures[f"AUC_task{task}"] == pytest.approx(expected, abs=1e-6)


def _figures(places: list[int]) -> dict[str, float]:
    """Returns the metrics of targets at these places of their rankings, the first of which is 0."""
    at = np.array(places)
    gains = {name: 1 / np.log2(at + 2) if "NDCG" in name else np.ones(len(at)) for name in NAMES}
    return {name: float((gain * (at < int(name[-1]))).mean()) for name, gain in gains.items()}


def _evaluate(metrics, shares, **outputs) -> list[dict[str, float]]:
    """Evaluates twice; the shares are the sizes of each rank's batches."""
    evaluations = []
    for _ in range(2):
        start = sum(sum(sizes) for sizes in shares[: dist.get_rank()])
        for rows in shares[dist.get_rank()]:
            part = {name: values[start:][:rows] for name, values in outputs.items()}
            metrics.update(SimpleNamespace(**part))
            start += rows
        evaluations.append(metrics.compute())
    return evaluations


@pytest.mark.parametrize("shares", [[[3, 4], [2]], [[0, 5, 4], []]])
@on_ranks(2)
def test_every_sample_counts_once_on_any_rank(shares):
    rng = np.random.default_rng(3)
    items = np.stack([rng.permutation(6) for _ in range(9)])
    targets = items[np.arange(9), np.arange(9) % 6]  # at place 0 to 5 in turn, where 5 is not found
    items[0] = -1  # nothing was found for the first
    found = torch.from_numpy(items[:, :5].copy())
    evaluations = _evaluate(
        RetrievalMetrics(NAMES, 5, CPU), shares, items=found, targets=torch.from_numpy(targets)
    )
    expected = _figures([99, 1, 2, 3, 4, 99, 0, 1, 2])
    assert 0 < expected["HR@1"] < expected["Recall@5"] < 1
    assert evaluations == [pytest.approx(expected)] * 2


def _queries(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1)
    queries = torch.from_numpy(rng.normal(size=(number, 12)).astype(np.float32))
    return queries / queries.norm(dim=1, keepdim=True), torch.from_numpy(rng.choice(CATALOGUE, number))


def _rank_by_all_scores(number: int, catalogue: np.ndarray) -> list[int]:
    """Returns the places of targets; what is not in the catalogue is not found."""
    vectors = item_vectors(retrieval_model())
    queries, targets = _queries(number)
    scores = queries @ (vectors / vectors.norm(dim=1, keepdim=True)).T
    scores[:, np.setdiff1d(np.arange(VOCABULARY), catalogue)] = -torch.inf
    rows = zip(scores, targets, strict=True)
    return [len(row) if row[target].isinf() else int((row > row[target]).sum()) for row, target in rows]


def _catalogue_metrics(names=NAMES, catalogue=CATALOGUE, table="item_table") -> CatalogueMetrics:
    return CatalogueMetrics(names, "RetrievalArgs.eval_metrics", table, catalogue, 1e-6, CPU)


def _evaluate_catalogue(shares, chunk, block, catalogue) -> list[dict[str, float]]:
    metrics = _catalogue_metrics(catalogue=catalogue)
    metrics.bind(shard_model(retrieval_model(), OptimizerArgs("sgd", 0.1), CPU)[0])
    queries, targets = _queries(sum(map(sum, shares)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue_metrics, "QUERIES_PER_CHUNK", chunk)
        patch.setattr(catalogue_metrics, "ROWS_PER_BLOCK", block)
        return _evaluate(metrics, shares, queries=queries, targets=targets)


@pytest.mark.parametrize(
    ("shares", "sizes", "catalogue"),
    [
        ([[20, 3], [18]], (512, 1 << 15), CATALOGUE),
        ([[0, 5], [6, 10], [20]], (4, 5), CATALOGUE),
        ([[20], [1], [20]], (512, 1 << 15), CATALOGUE[:4]),  # smaller than k
    ],
)
def test_metrics_of_a_catalogue_are_those_of_comparing_all_scores(pools, shares, sizes, catalogue):
    expected = _figures(_rank_by_all_scores(41, catalogue))
    assert 0 < expected["HR@1"] < expected["hr@3"] < expected["Recall@5"] < 1
    for evaluations in pools(len(shares)).run(_evaluate_catalogue, shares, *sizes, catalogue):
        assert evaluations == [pytest.approx(expected)] * 2


def test_without_queries_metrics_are_not_a_number(pools):
    for evaluations in pools(2).run(_evaluate_catalogue, [[], [0]], 512, 1 << 15, CATALOGUE):
        assert all(np.isnan(value) for figures in evaluations for value in figures.values())


@on_ranks(2)
def test_items_of_unbounded_ids_are_ranked_if_they_have_a_row():
    ids = [7, -1, 10**15, 2**62, 41, 42, 43]
    items = [*ids, 10**15 + 1]
    model, _ = shard_model(retrieval_model(eviction="lru"), OptimizerArgs("sgd", 0.1), CPU)
    model(retrieval_batch([Sample(items=items, actions=[0] * len(items), negatives=[3])]))
    metrics = _catalogue_metrics(["HR@1"], np.array(sorted([*ids, 5])))
    metrics.bind(model)
    model.eval()
    found = []
    for wanted in (ids, [3, 5, 10**15 + 1]):  # in the table alone, in the catalogue alone, in the table alone
        _, embeddings = model.module.embedding_collections
        features = retrieval_batch([Sample(items=wanted, actions=[0] * len(wanted))]).features
        queries = embeddings(features)["item"].values().detach()
        queries = queries / queries.norm(dim=1, keepdim=True)
        metrics.update(SimpleNamespace(queries=queries, targets=torch.tensor(wanted)))
        found.append(metrics.compute()["HR@1"])
    assert found == [1.0, 0.0]


@on_ranks(2)
def test_a_table_that_is_not_there_is_named():
    model, _ = shard_model(retrieval_model(), OptimizerArgs("sgd", 0.1), CPU)
    metrics = _catalogue_metrics(table="items")
    with pytest.raises(RuntimeError, match="bind the sharded model first"):
        metrics.compute()
    metrics.bind(model)
    with pytest.raises(ValueError, match="no sharded table 'items'"):
        metrics.compute()


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
    if name != "NDCG@11":
        with pytest.raises(ValueError, match=rf"RetrievalArgs.eval_metrics = '{message}"):
            _catalogue_metrics(("HR@10", name))
