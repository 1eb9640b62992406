from dataclasses import replace

import pytest
import torch

from hstu.models import (
    EmbeddingTable,
    HSTUConfig,
    HSTUFeatures,
    HSTURanking,
    RankingHeadConfig,
    full_sequence_length,
)
from tests.hstu.hstu_samples import EMPTY, NUM_CLASSES, SAMPLE, Sample, hstu_batch, ranking_model

HISTORY_ONLY = replace(SAMPLE, num_candidates=0, labels=SAMPLE.actions)
NO_CANDIDATES = replace(hstu_batch([HISTORY_ONLY]), max_num_candidates=0)


def logits_of(model: HSTURanking, sample: Sample) -> torch.Tensor:
    return model(hstu_batch([sample]))[1].logits


def test_other_samples_do_not_change_a_sample():
    model, rows = ranking_model(), [SAMPLE, EMPTY, HISTORY_ONLY, replace(SAMPLE, user=[], tags=[])]
    alone = [model(hstu_batch([row])) for row in rows]
    loss, output = model(hstu_batch(rows))
    torch.testing.assert_close(loss, sum(one for one, _ in alone))
    torch.testing.assert_close(output.logits, torch.cat([one.logits for _, one in alone]))
    assert output.labels.tolist() == [label for row in rows for label in row.labels]
    assert len(output.labels) == int(hstu_batch(rows).num_loss_tokens().sum())


@pytest.mark.parametrize("sample", [SAMPLE, HISTORY_ONLY], ids=["candidates", "history"])
def test_a_prediction_sees_its_item_and_the_history_before_it(sample):
    model = ranking_model()
    logits = logits_of(model, sample)
    first_label = len(sample.items) - len(sample.labels)
    for changed in range(len(sample.items)):
        actions, items = list(sample.actions), list(sample.items)
        actions[changed], items[changed] = NUM_CLASSES + 1, 40
        with_action = logits_of(model, replace(sample, actions=actions))
        with_item = logits_of(model, replace(sample, items=items))
        for label, before in enumerate(logits):
            item = first_label + label
            in_sight = changed < min(item, len(sample.items) - sample.num_candidates)
            assert torch.allclose(with_action[label], before, atol=1e-6) != in_sight, (changed, item)
            in_sight |= changed == item
            assert torch.allclose(with_item[label], before, atol=1e-6) != in_sight, (changed, item)


def test_contextual_tokens_matter_and_see_each_other_unless_masked():
    with_mask, without = ranking_model(), ranking_model(disable_contextual_mask=True)
    assert not torch.allclose(logits_of(with_mask, SAMPLE), logits_of(without, SAMPLE))
    assert not torch.allclose(logits_of(with_mask, SAMPLE), logits_of(with_mask, replace(SAMPLE, tags=[1])))


def test_several_tasks_are_the_bits_of_the_action():
    model = ranking_model(RankingHeadConfig((8, 3), num_tasks=3))
    loss, output = model(hstu_batch([SAMPLE]))
    targets = torch.tensor([[1.0, 1, 0], [0, 0, 1], [0, 0, 0]])  # labels 3, 4, 0
    per_task = torch.nn.functional.softplus(output.logits) - targets * output.logits
    torch.testing.assert_close(loss.detach(), per_task.mean(1).sum())


def test_classes_take_cross_entropy():
    loss, output = ranking_model()(hstu_batch([SAMPLE]))
    expected = -output.logits.log_softmax(1)[torch.arange(3), torch.tensor(SAMPLE.labels)].sum()
    torch.testing.assert_close(loss.detach(), expected)


def test_full_sequence_length():
    assert full_sequence_length(num_contextual=3, max_history=10, max_candidates=2) == 27


BOTH = HSTUFeatures("item", "action")


def _make(features, *tables, **options):
    config = HSTUConfig(1, 8, 1, 4, scaling_seqlen=10, contextual_embedding_dim=4)
    made = [EmbeddingTable(*table, 10, **{"sharded": True, **options}) for table in tables]
    return HSTURanking(config, made, features, RankingHeadConfig((5,)))


def _learn(labels, head=None):
    ranking_model(head)(hstu_batch([replace(SAMPLE, labels=labels)]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ranking_model(RankingHeadConfig((8, 4), num_tasks=3)), "4; with num_tasks = 3 it must end"),
        (lambda: ranking_model(RankingHeadConfig((5,), "tanh")), r"'tanh'; expected one of \['gelu',"),
        (lambda: ranking_model(num_position_buckets=0), "num_position_buckets"),
        (lambda: _make(HSTUFeatures("item")), "no action feature"),
        (lambda: _make(BOTH, ("t", ("item",))), r"no embedding table has the features \['action'\]"),
        (lambda: _make(BOTH, ("t", ("item", "action", "x"))), "has feature 'x'"),
        (lambda: _make(BOTH, ("t", ("item",)), ("u", ("item",))), "is in tables 't' and 'u'"),
        (lambda: _make(BOTH, ("t", ("item",)), ("t", ("action",))), "are named 't'"),
        (lambda: _make(BOTH, ("items", ("item", "action"))), "cannot be named 'items'"),
        (lambda: _make(HSTUFeatures("item", "action", ("c",)), ("t", ("item", "c"))), "widths"),
        (
            lambda: _make(BOTH, ("t", ("item", "action")), sharded=False, eviction="lru"),
            "'t' is replicated; a ",
        ),
        (lambda: ranking_model(is_causal=False)(NO_CANDIDATES), "sees its own action"),
        (lambda: _learn([3, 5, 0]), "label 5 is outside the head's 5 classes"),
        (lambda: _learn([4, 0, 0], RankingHeadConfig((2,), num_tasks=2)), "label 4 is outside .* 2 bits"),
        (lambda: _learn([0] * 7), "row 0 has 7 labels for 6 items"),
    ],
)
def test_what_cannot_be_trained_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
