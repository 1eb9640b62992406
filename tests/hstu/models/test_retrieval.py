from dataclasses import replace

import pytest
import torch

from hstu.models import EmbeddingTable, HSTUConfig, HSTUFeatures, HSTURetrieval, RetrievalConfig
from tests.hstu.internals import RetrievalArgs
from tests.hstu.retrieval_samples import (
    TEMPERATURE,
    VOCABULARY,
    Sample,
    item_vectors,
    retrieval_batch,
    retrieval_model,
)

SAMPLE = Sample(items=[5, 9, 13, 2, 9], actions=[1, 0, 3, 2, 4], negatives=[7, 9, 30, 31, 2, 44, 9], user=[3])
OTHER = Sample(items=[8, 4, 21], actions=[2, 2, 1], negatives=[8, 21, 1], user=[4])


def queries_of(model: HSTURetrieval, *samples: Sample, **batch) -> torch.Tensor:
    return model(retrieval_batch(samples, **batch))[1].queries


@pytest.mark.parametrize("with_actions", [True, False])
def test_a_prediction_sees_what_is_before_its_item_and_nothing_else(with_actions):
    model = retrieval_model(with_actions=with_actions)
    before = queries_of(model, SAMPLE, with_actions=with_actions)
    assert len(before) == 4
    for changed in range(5):
        items, actions = list(SAMPLE.items), list(SAMPLE.actions)
        items[changed], actions[changed] = 40, (actions[changed] + 1) % 5
        with_item = queries_of(model, replace(SAMPLE, items=items), with_actions=with_actions)
        with_action = queries_of(model, replace(SAMPLE, actions=actions), with_actions=with_actions)
        for label in range(4):  # label l is that of item l + 1, read from item l, before its action
            sees_action = with_actions and changed < label
            assert torch.allclose(with_item[label], before[label], atol=1e-6) != (changed <= label)
            assert torch.allclose(with_action[label], before[label], atol=1e-6) != sees_action
    no_negatives = replace(SAMPLE, negatives=[])
    torch.testing.assert_close(queries_of(model, no_negatives, with_actions=with_actions), before)
    shorter = replace(SAMPLE, items=SAMPLE.items[:3], actions=SAMPLE.actions[:3])
    torch.testing.assert_close(queries_of(model, shorter, with_actions=with_actions), before[:2])


@pytest.mark.parametrize("with_actions", [True, False])
def test_a_query_carries_the_item_whose_successor_it_predicts(with_actions):
    model = retrieval_model(with_actions=with_actions)
    for name, parameter in model.named_parameters():
        if ".layers." in name and ".output." in name:  # layers then add nothing to a token
            torch.nn.init.zeros_(parameter)
    items = [5, 9, 13, 2, 9, 13]
    sample = replace(SAMPLE, items=items, actions=[1, 0, 3, 2, 4, 1])
    torch.nn.init.zeros_(model.dense.encoder.preprocessor.position_embedding.weight)
    queries = queries_of(model, sample, with_actions=with_actions)
    equal = (queries[:, None] - queries).norm(dim=2) < 1e-6
    assert equal.tolist() == [[one == other for other in items[:5]] for one in items[:5]]


def _loss_by_hand(model: HSTURetrieval, samples: list[Sample], queries: torch.Tensor) -> float:
    """Computes a softmax per label over the label and those negatives that differ from it."""
    vectors = item_vectors(model)
    vectors = vectors / vectors.norm(dim=1, keepdim=True)
    labels = [(label, sample.negatives) for sample in samples for label in sample.labels]
    total = 0.0
    for query, (label, negatives) in zip(queries, labels, strict=True):
        others = [item for item in negatives if item != label]
        scores = vectors[[label, *others]] @ query / TEMPERATURE
        total -= float(scores.softmax(0)[0].log())
    return total


@pytest.mark.parametrize("item_embedding_dim", [12, 16])
def test_the_loss_is_a_softmax_over_the_item_and_the_negatives_that_are_others(item_embedding_dim):
    model = retrieval_model(item_embedding_dim=item_embedding_dim)
    samples = [SAMPLE, OTHER, replace(OTHER, num_labels=1)]
    loss, output = model(retrieval_batch(samples))
    assert output.targets.tolist() == [9, 13, 2, 9, 4, 21, 21]
    torch.testing.assert_close(output.queries.norm(dim=1), torch.ones(7))
    assert loss.item() == pytest.approx(_loss_by_hand(model, samples, output.queries), rel=1e-5)


def test_an_item_is_looked_up_once_and_learns_as_input_label_and_negative():
    model = retrieval_model()
    model(retrieval_batch([SAMPLE]))[0].backward()
    (gradient,) = (parameter.grad for name, parameter in model.named_parameters() if "item_table" in name)
    learned = gradient.abs().sum(1).nonzero().squeeze(1).tolist()
    assert learned == sorted({*SAMPLE.items, *SAMPLE.negatives})


ITEMS = EmbeddingTable("items_of_shop", ("item", "negative"), VOCABULARY, sharded=True)
ONLY_ITEMS = replace(ITEMS, feature_names=("item",))
APART = (ONLY_ITEMS, EmbeddingTable("other", ("negative",), 9, True))
LABELED_FIRST = retrieval_batch([SAMPLE, replace(OTHER, num_labels=3)])
WITH_CANDIDATES = replace(retrieval_batch([SAMPLE]), max_num_candidates=2)


def _make(*tables, negatives="negative", is_causal=True):
    config = HSTUConfig(1, 8, 1, 4, scaling_seqlen=10, is_causal=is_causal)
    return HSTURetrieval(config, tables, HSTUFeatures("item", negatives=negatives), RetrievalConfig())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _make(ITEMS, is_causal=False), "is_causal=False"),
        (lambda: _make(ONLY_ITEMS, negatives=None), "no such feature is named"),
        (lambda: _make(replace(ITEMS, sharded=False)), "'items_of_shop' is replicated"),
        (lambda: _make(*APART), "'negative' are not in the items' table 'items_of_shop'"),
        (lambda: RetrievalConfig(temperature=0.0), "expected more than 0"),
        (lambda: retrieval_model()(LABELED_FIRST), "row 1 has 3 labels for 3 items, of which the first 1"),
        (lambda: retrieval_model()(WITH_CANDIDATES), "max_num_candidates = 2; expected 0"),
    ],
)
def test_what_cannot_be_trained_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_model_is_scored_as_the_file_says():
    assert RetrievalArgs(num_negatives=8).config() == RetrievalConfig(temperature=0.05, l2_norm_eps=1e-6)
    assert RetrievalArgs(8, temperature=0.3).config() == RetrievalConfig(temperature=0.3)
