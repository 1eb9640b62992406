"""A ranking of all items, spread over ranks, against one that compares all scores."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.training import CatalogueMetrics, OptimizerArgs, catalogue_metrics, shard_model
from tests.hstu.retrieval_samples import VOCABULARY, Sample, item_vectors, retrieval_batch, retrieval_model
from tests.on_ranks import on_ranks

NAMES = ("HR@1", "hr@7", "Recall@12", "NDCG@7", "NDCG@12")
# Without the first ids and without some in between, the most of which are on one rank.
CATALOGUE = np.array([3, *range(9, 20), 22, 23, 30, *range(41, VOCABULARY)])
SETTING = "RetrievalArgs.eval_metrics"


def _queries(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1)
    queries = torch.from_numpy(rng.normal(size=(number, 12)).astype(np.float32))
    return queries / queries.norm(dim=1, keepdim=True), torch.from_numpy(rng.choice(CATALOGUE, number))


def _expected(vectors: torch.Tensor, number: int, catalogue: np.ndarray) -> dict[str, float]:
    """By comparing all scores; what is not in the catalogue is not found."""
    queries, targets = _queries(number)
    scores = queries @ (vectors / vectors.norm(dim=1, keepdim=True)).T
    scores[:, np.setdiff1d(np.arange(VOCABULARY), catalogue)] = -torch.inf
    places = [
        len(row) if row[target].isinf() else int((row > row[target]).sum())
        for row, target in zip(scores, targets, strict=True)
    ]
    return {
        name: sum(
            (1 / np.log2(place + 2) if "NDCG" in name else 1.0)
            for place in places
            if place < int(name.partition("@")[2])
        )
        / number
        for name in NAMES
    }


def _metrics(names=NAMES, catalogue=CATALOGUE, table="item_table") -> CatalogueMetrics:
    return CatalogueMetrics(names, SETTING, table, catalogue, 1e-6, torch.device("cpu"))


def _of_rank(shares, chunk, block, catalogue) -> list[dict[str, float]]:
    """Twice the same evaluation; the shares are the sizes of each rank's batches."""
    sizes = catalogue_metrics.QUERIES_PER_CHUNK, catalogue_metrics.ROWS_PER_BLOCK
    catalogue_metrics.QUERIES_PER_CHUNK, catalogue_metrics.ROWS_PER_BLOCK = chunk, block
    try:
        model, _ = shard_model(retrieval_model(), OptimizerArgs("sgd", 0.1), torch.device("cpu"))
        metrics = _metrics(catalogue=catalogue)
        metrics.bind(model)
        queries, targets = _queries(sum(map(sum, shares)))
        evaluations = []
        for _ in range(2):
            start = sum(sum(of_rank) for of_rank in shares[: dist.get_rank()])
            for rows in shares[dist.get_rank()]:
                metrics.update(
                    SimpleNamespace(queries=queries[start:][:rows], targets=targets[start:][:rows])
                )
                start += rows
            evaluations.append(metrics.compute())
    finally:
        catalogue_metrics.QUERIES_PER_CHUNK, catalogue_metrics.ROWS_PER_BLOCK = sizes
    return evaluations


@pytest.mark.parametrize(
    ("shares", "sizes"),
    [
        ([[30, 11]], (4, 5)),
        ([[20, 3], [18]], (512, 1 << 15)),
        ([[20, 3], [18]], (4, 5)),
        ([[41], []], (1, 50)),
        ([[0, 5], [6, 10], [20]], (4, 5)),
        ([[], [41], []], (1, 50)),
        ([[], [41], []], (512, 1 << 15)),
    ],
)
def test_metrics_are_those_of_comparing_all_scores(pools, shares, sizes):
    expected = _expected(item_vectors(retrieval_model()), 41, CATALOGUE)
    assert 0 < expected["HR@1"] < expected["hr@7"] < expected["Recall@12"] < 1
    for evaluations in pools(len(shares)).run(_of_rank, shares, *sizes, CATALOGUE):
        assert evaluations == [pytest.approx(expected)] * 2


def test_a_catalogue_smaller_than_k_is_ranked_whole(pools):
    few = CATALOGUE[:5]
    expected = _expected(item_vectors(retrieval_model()), 41, few)
    for evaluations in pools(3).run(_of_rank, [[20], [1], [20]], 512, 1 << 15, few):
        assert evaluations == [pytest.approx(expected)] * 2


def test_without_queries_metrics_are_not_a_number(pools):
    for evaluations in pools(2).run(_of_rank, [[], [0]], 512, 1 << 15, CATALOGUE):
        assert all(np.isnan(value) for figures in evaluations for value in figures.values())


@on_ranks(2)
def test_items_of_unbounded_ids_are_ranked_if_they_have_a_row():
    ids = [7, -1, 10**15, 2**62, 41, 42, 43]
    items = [*ids, 10**15 + 1]
    model, _ = shard_model(retrieval_model(eviction="lru"), OptimizerArgs("sgd", 0.1), torch.device("cpu"))
    model(retrieval_batch([Sample(items=items, actions=[0] * len(items), negatives=[3])]))
    metrics = _metrics(["HR@1"], np.array(sorted([*ids, 5])))
    metrics.bind(model)
    model.eval()
    found = []
    for wanted in (ids, [3, 5, 10**15 + 1]):  # in the table alone, in the catalogue alone, in the table alone
        _, embeddings = model.module.embedding_collections
        features = retrieval_batch([Sample(items=wanted, actions=[0] * len(wanted))]).features
        queries = embeddings(features)["item"].values().detach()
        metrics.update(
            SimpleNamespace(queries=queries / queries.norm(dim=1, keepdim=True), targets=torch.tensor(wanted))
        )
        found.append(metrics.compute()["HR@1"])
    assert (found[0], found[1]) == (1.0, 0.0)


@on_ranks(2)
def test_a_table_that_is_not_there_is_named():
    model, _ = shard_model(retrieval_model(), OptimizerArgs("sgd", 0.1), torch.device("cpu"))
    metrics = _metrics(table="items")
    with pytest.raises(RuntimeError, match="bind the sharded model first"):
        metrics.compute()
    metrics.bind(model)
    with pytest.raises(ValueError, match="no sharded table 'items'"):
        metrics.compute()


def test_an_unknown_metric_is_named():
    with pytest.raises(ValueError, match=r"RetrievalArgs.eval_metrics = 'AUC': expected HitRate@k, HR@k"):
        _metrics(("HR@10", "AUC"))
