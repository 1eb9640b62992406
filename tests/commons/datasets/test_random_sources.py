"""Random samples of both models' batches, each a function of the seed and its index."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import (
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    FeatureArgs,
    ItemSIDs,
    RandomDistribution,
    RandomSIDSource,
    RandomSource,
    SIDDatasetSpec,
    random_item_sids,
)
from tests.commons.datasets.random_args import random_args

ZIPF = RandomDistribution("zipf", alpha=2.0)
SIZES = (4, 8, 16)
SIDS = random_item_sids(SIZES, 30, seed=0)


def hstu_source(num_samples=200, seed=0, args=None):
    return RandomSource(args or random_args(), num_samples, seed)


def sid_source(num_samples=200, seed=0, lengths=None, sids=SIDS, **changes):
    settings = {"max_history_length": 6, "contextual_vocab_sizes": {"age": 4, "job": 9}}
    spec = SIDDatasetSpec(**{"codebook_sizes": SIZES, **settings, **changes})
    return RandomSIDSource(sids, spec, lengths, num_samples, seed)


def samples(source):
    return [source[index] for index in range(len(source))]


@pytest.mark.parametrize("make", [hstu_source, sid_source])
def test_a_sample_depends_on_the_seed_and_its_index_alone(make):
    few, many = make(num_samples=5, seed=3), make(num_samples=50, seed=3)
    many[0]
    assert repr(few[4]) == repr(many[4])
    first, other = (list(map(repr, samples(make(seed=seed)))) for seed in (3, 4))
    assert first != other and first[0] != first[1]
    with pytest.raises(IndexError, match="sample 5: expected 0 to 4"):
        few[5]


def table(*features, size=10, sharding="data_parallel"):
    return EmbeddingArgs(list(features), "_".join(features), size, sharding)


def item_table(rows=9, **options):
    return DynamicEmbeddingArgs(["item"], "item", rows, **options)


def test_the_spec_has_only_the_features_in_use():
    spec = random_args(embedding_args=[table("item", "unused"), table("act"), table("user", size=9)]).spec()
    assert [t.feature_names for t in spec.tables] == [["item"], ["act"], ["user"]]
    assert spec.feature_to_max_seqlen == {"user": 2, "item": 8, "act": 8}
    assert spec.vocab_sizes == {"user": 9, "item": 10, "act": 10}
    assert (spec.num_classes, spec.positive_class, spec.max_num_candidates) == (10, None, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureArgs([], 1), r"FeatureArgs.feature_names = \[\]"),
        (lambda: FeatureArgs(["item"], 1, value_dists={"a": ZIPF}), "value_dists = 'a': expected one of"),
        (lambda: item_table(sharding_type="data_parallel"), "type = 'data_parallel': expected model_p"),
        (lambda: item_table(item_vocab_gpu_capacity_ratio=1.5), "capacity_ratio = 1.5: expected 0 to 1"),
        (lambda: RandomDistribution("poisson"), "dist_type = 'poisson': expected one of uniform, "),
        (lambda: RandomDistribution("uniform", low=0), "high is not set: uniform needs it"),
        (lambda: RandomDistribution("zipf", alpha=1.0), "alpha = 1.0: expected more than 1"),
        (lambda: RandomDistribution("lognormal", mean=0.0, std=1.0), "mean = 0.0"),
        (lambda: random_args(item_feature_name="movie"), "feature_args has feature 'movie' = 0"),
        (lambda: random_args(action_feature_name="user", contextual_feature_names=[]), "'user': expected"),
        (lambda: replace(random_args().spec(), tables=()), "feature 'user' is in 0 embedding tables, not"),
        (lambda: replace(random_args().spec(), feature_to_max_seqlen={"user": 1}), "'item' has no entry"),
        (lambda: sid_source(codebook_sizes=(4, 8)), r"codebook_sizes = \(4, 8\): expected 3"),
        (lambda: random_item_sids((4, 0), 5, 0), r"codebook_sizes = \(4, 0\): expected positive sizes"),
    ],
)
def test_settings_that_make_no_sense_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_options_of_a_dynamic_table_that_change_nothing_are_named():
    everywhere = {"item_vocab_gpu_capacity_ratio": 1.0, "item_vocab_gpu_capacity": 100}
    assert item_table(100, **everywhere, evict_strategy="lfu").settings_without_effect() == []
    ignored = {"item_vocab_gpu_capacity": 50, "global_hbm_for_values": 0, "caching": True}
    lines = [f"{name} = {value!r}" for name, value in ignored.items()]
    assert item_table(100, **ignored).settings_without_effect() == lines


def test_ids_lie_in_their_tables_and_every_item_has_its_action_for_a_label():
    drawn = samples(hstu_source(300))
    assert {int(i) for s in drawn for i in s.items} == set(range(50))
    assert {int(i) for s in drawn for i in s.actions} == set(range(4))
    assert {len(s.contextual["user"]) for s in drawn} == {2}
    assert {len(s.items) for s in drawn} == set(range(1, 9))
    for sample in drawn:
        assert sample.items.dtype == sample.actions.dtype == sample.labels.dtype == np.int64
        np.testing.assert_array_equal(sample.labels, sample.actions)
        assert sample.num_candidates == 0
    for sample in samples(hstu_source(args=random_args(max_num_candidates=3))):
        assert len(sample.items) <= 8
        assert sample.num_candidates == min(3, len(sample.items) - 1)
        first = len(sample.items) - sample.num_candidates
        np.testing.assert_array_equal(sample.labels, sample.actions[first:])
    args = random_args(action_feature_name=None)
    assert args.spec().feature_names == ["user", "item"] and args.spec().num_classes == 1
    sample = hstu_source(1, args=args)[0]
    assert sample.actions is None  # without actions, labels only mark their items
    np.testing.assert_array_equal(sample.labels, np.zeros(len(sample.items)))


def test_lengths_and_ids_follow_their_distributions():
    def drawn(*lengths, items=None):
        feature = FeatureArgs(["item", "act"], 8, *lengths, value_dists={"item": items} if items else None)
        return [sample.items for sample in samples(hstu_source(args=random_args(feature)))]

    wide = RandomDistribution("normal", mean=4.0, std=10.0)
    assert set(map(len, drawn(False, ZIPF))) == {8}  # not jagged: all have the full length
    assert set(map(len, drawn(True, wide))) == set(range(1, 9))
    folded = drawn(True, items=RandomDistribution("uniform", low=99, high=102))
    assert set(np.concatenate(folded).tolist()) == {49, 0, 1}


def dynamic(**dists):
    """Items and actions of dynamic tables of 50 and 4 rows."""
    act = DynamicEmbeddingArgs(["act"], "act", 4)
    feature = FeatureArgs(["item", "act"], 8, value_dists=dists)
    args = random_args(feature, embedding_args=[item_table(50), act, table("user", size=9)])
    return hstu_source(args=args)


def test_ids_of_a_dynamic_table_are_as_drawn_but_actions_are_classes():
    wide = RandomDistribution("uniform", low=-500, high=10**12)
    drawn = samples(dynamic(item=wide, act=wide))
    assert max(s.items.max() for s in drawn) > 10**11
    assert {int(i) for s in drawn for i in s.actions} == set(range(4))
    assert {int(i) for s in samples(dynamic()) for i in s.items} == set(range(50))


def test_the_catalogue_of_a_dynamic_table_is_what_can_be_drawn():
    uniform = RandomDistribution("uniform", low=70, high=900)
    clipped = RandomDistribution("zipf", low=1, high=900, alpha=1.2)
    assert dynamic().catalogue.tolist() == list(range(50))
    assert dynamic(item=uniform).catalogue.tolist() == list(range(70, 900))
    assert dynamic(item=clipped).catalogue.tolist() == list(range(1, 901))
    with pytest.raises(ValueError, match=r"of 'item': low = None, high = None; set both"):
        _ = dynamic(item=ZIPF).catalogue


def draw(distribution, size=1000, seed=0):
    return distribution.sample(np.random.default_rng(seed), size)


@pytest.mark.parametrize(
    "options",
    [
        {"dist_type": "uniform"},
        {"dist_type": "normal", "mean": 30.0, "std": 40.0},
        {"dist_type": "zipf", "alpha": 1.2},
        {"dist_type": "lognormal", "mean": 30.0, "std": 60.0},
    ],
)
@given(low=st.integers(0, 50), width=st.integers(1, 100), seed=st.integers(0, 1000))
def test_draws_are_integers_within_their_bounds_and_follow_the_generator(options, low, width, seed):
    distribution = RandomDistribution(low=low, high=low + width, **options)
    values = draw(distribution, 200, seed)
    assert values.dtype == np.int64 and values.shape == (200,)
    assert low <= values.min() and values.max() <= low + width - (distribution.dist_type == "uniform")
    np.testing.assert_array_equal(draw(distribution, 200, seed), values)


def test_parameters_are_those_of_the_values():
    values = draw(RandomDistribution("lognormal", mean=500.0, std=1000.0), 1_000_000)
    assert values.mean() == pytest.approx(500, rel=0.01)
    assert values.std() == pytest.approx(1000, rel=0.05)
    values = draw(RandomDistribution("normal", mean=100.0, std=20.0), 100_000)
    assert values.mean() == pytest.approx(100, rel=0.01)
    assert values.std() == pytest.approx(20, rel=0.02)
    assert set(draw(RandomDistribution("uniform", low=3, high=6))) == {3, 4, 5}
    values = draw(RandomDistribution("zipf", alpha=2.0), 100_000)
    assert (values == 1).mean() == pytest.approx(6 / np.pi**2, rel=0.01)  # 1 / zeta(2)


def test_semantic_ids_and_contextual_ids_are_drawn_from_all_that_there_are():
    sids = ItemSIDs(np.array([5, 70, 900]), np.array([[0, 1, 2], [3, 7, 15], [0, 0, 0]]))
    drawn = samples(sid_source(sids=sids))
    codes_of = dict(zip(sids.items.tolist(), sids.codes.tolist(), strict=True))
    assert {sample.target_item for sample in drawn} == set(codes_of)
    for sample in drawn:
        assert sample.codes[-1].tolist() == codes_of[sample.target_item]
        assert all(codes in codes_of.values() for codes in sample.codes.tolist())
        assert sample.codes.dtype == np.int64
        assert {len(ids) for ids in sample.contextual.values()} == {1}
    for name, size in (("age", 4), ("job", 9)):
        assert {int(sample.contextual[name][0]) for sample in drawn} == set(range(size))


def test_histories_of_semantic_ids_have_the_lengths_of_their_spec():
    normal = RandomDistribution("normal", mean=3.0, std=10.0)
    uniform = RandomDistribution("uniform", low=2, high=4)
    for lengths, expected in ((None, range(1, 7)), (normal, range(7)), (uniform, (2, 3))):
        source = sid_source(lengths=lengths, max_candidate_length=3)
        assert {len(sample.codes) - 1 for sample in samples(source)} == set(expected)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 9))
def test_every_random_item_has_codes_of_its_own(sizes, num_items, seed):
    sids = random_item_sids(sizes, num_items, seed)
    sids.check_codebooks(sizes)
    assert sids.items.tolist() == list(range(min(num_items, int(np.prod(sizes)))))
    assert len(np.unique(sids.codes, axis=0)) == len(sids.items)
    assert sids.items.dtype == sids.codes.dtype == np.int64
    np.testing.assert_array_equal(random_item_sids(sizes, num_items, seed).codes, sids.codes)


@pytest.mark.parametrize("num_items", [20, 200])  # a share of all tuples, and most of them
def test_random_codes_are_uniform(num_items):
    sids = [random_item_sids((4, 64), num_items, seed) for seed in range(200)]
    assert not np.array_equal(sids[0].codes, sids[1].codes)
    counts = np.bincount(np.concatenate([drawn.codes[:20, 0] for drawn in sids]), minlength=4)
    np.testing.assert_allclose(counts, 1000, rtol=0.15)  # also among the first items: they are in no order


def test_the_product_of_large_codebooks_is_not_made():
    sids = random_item_sids((2**62,) * 4, 1000, seed=0)
    assert len(np.unique(sids.codes, axis=0)) == 1000
    assert sids.codes.min() >= 0 and 2**61 < sids.codes.max() < 2**62
