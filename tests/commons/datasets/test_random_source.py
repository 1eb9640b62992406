import numpy as np
import pytest

from commons.datasets import (
    BenchmarkDatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    FeatureArgs,
    RandomDistribution,
    RandomSource,
)


def args(sequence=None, **changes):
    tables = {"item": (50, "model_parallel"), "act": (4, "data_parallel"), "user": (9, "data_parallel")}
    settings = {
        "feature_args": [
            sequence or FeatureArgs(["item", "act"], 8, is_jagged=True),
            FeatureArgs(["user"], 2),
        ],
        "embedding_args": [
            EmbeddingArgs([name], name, size, sharding) for name, (size, sharding) in tables.items()
        ],
        "item_feature_name": "item",
        "contextual_feature_names": ["user"],
        "action_feature_name": "act",
    }
    return BenchmarkDatasetArgs(**(settings | changes))


def lengths(source):
    return [len(source[i].items) for i in range(len(source))]


def test_a_sample_depends_on_the_seed_and_its_index_alone():
    source, again = RandomSource(args(), 5, seed=3), RandomSource(args(), 50, seed=3)
    again[0]
    for name in ("items", "actions", "labels"):
        np.testing.assert_array_equal(getattr(source[4], name), getattr(again[4], name))
    np.testing.assert_array_equal(source[4].contextual["user"], again[4].contextual["user"])
    all_items = [RandomSource(args(), 50, seed)[i].items.tolist() for seed in (3, 4) for i in range(50)]
    assert all_items[:50] != all_items[50:]


def test_ids_lie_in_their_tables_and_every_item_has_its_action_for_a_label():
    source = RandomSource(args(), 300, seed=0)
    samples = [source[i] for i in range(len(source))]
    assert {int(i) for s in samples for i in s.items} == set(range(50))
    assert {int(i) for s in samples for i in s.actions} == set(range(4))
    assert {len(s.contextual["user"]) for s in samples} == {2}
    assert {len(s.items) for s in samples} == set(range(1, 9))
    for sample in samples:
        assert sample.items.dtype == sample.actions.dtype == sample.labels.dtype == np.int64
        np.testing.assert_array_equal(sample.labels, sample.actions)
        assert sample.num_candidates == 0


def test_candidates_are_the_last_items_and_have_the_labels():
    source = RandomSource(args(max_num_candidates=3), 200, seed=0)
    for sample in (source[i] for i in range(len(source))):
        assert len(sample.items) <= 8
        assert sample.num_candidates == min(3, len(sample.items) - 1)
        first = len(sample.items) - sample.num_candidates
        np.testing.assert_array_equal(sample.labels, sample.actions[first:])


def test_features_that_are_not_jagged_have_the_full_length():
    sequence = FeatureArgs(["item", "act"], 8, seqlen_dist=RandomDistribution("zipf", alpha=2.0))
    assert set(lengths(RandomSource(args(sequence), 20, seed=0))) == {8}


def test_drawn_lengths_are_clipped_to_one_and_the_longest():
    wide = RandomDistribution("normal", mean=4.0, std=10.0)
    drawn = lengths(RandomSource(args(FeatureArgs(["item", "act"], 8, True, wide)), 200, seed=0))
    assert min(drawn) == 1
    assert max(drawn) == 8


def test_drawn_ids_follow_their_distribution_folded_into_the_table():
    dists = {"item": RandomDistribution("uniform", low=99, high=102)}
    source = RandomSource(args(FeatureArgs(["item", "act"], 8, True, None, dists)), 100, seed=0)
    assert {int(i) for k in range(100) for i in source[k].items} == {49, 0, 1}


def test_without_actions_labels_only_mark_their_items():
    sample = RandomSource(args(action_feature_name=None), 1, seed=0)[0]
    assert sample.actions is None
    np.testing.assert_array_equal(sample.labels, np.zeros(len(sample.items)))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="num_samples = -1, seed = 0"):
        RandomSource(args(), -1, seed=0)
    with pytest.raises(IndexError, match="sample 5: expected 0 to 4"):
        RandomSource(args(), 5, seed=0)[5]


def dynamic(**dists):
    """Items and actions of dynamic tables of 50 and 4 rows."""
    return args(
        FeatureArgs(["item", "act"], 8, value_dists=dists),
        embedding_args=[
            DynamicEmbeddingArgs(["item"], "item", 50),
            DynamicEmbeddingArgs(["act"], "act", 4),
            EmbeddingArgs(["user"], "user", 9, "data_parallel"),
        ],
    )


def test_ids_of_a_dynamic_table_are_as_drawn_but_actions_are_classes():
    wide = RandomDistribution("uniform", low=-500, high=10**12)
    source = RandomSource(dynamic(item=wide, act=wide), 50, seed=0)
    samples = [source[i] for i in range(50)]
    assert max(s.items.max() for s in samples) > 10**11
    assert {int(i) for s in samples for i in s.actions} == set(range(4))
    plain = RandomSource(dynamic(), 50, seed=0)
    assert {int(i) for s in map(plain.__getitem__, range(50)) for i in s.items} == set(range(50))


def test_the_catalogue_of_a_dynamic_table_is_what_can_be_drawn():
    assert RandomSource(dynamic(), 1, 0).catalogue.tolist() == list(range(50))
    uniform = RandomDistribution("uniform", low=70, high=900)
    assert RandomSource(dynamic(item=uniform), 1, 0).catalogue.tolist() == list(range(70, 900))
    clipped = RandomDistribution("zipf", low=1, high=900, alpha=1.2)
    assert RandomSource(dynamic(item=clipped), 1, 0).catalogue.tolist() == list(range(1, 901))
    with pytest.raises(ValueError, match=r"of 'item': low = None, high = None; where a catalogue"):
        _ = RandomSource(dynamic(item=RandomDistribution("zipf", alpha=1.2)), 1, 0).catalogue
