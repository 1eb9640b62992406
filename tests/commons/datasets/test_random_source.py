from dataclasses import replace

import gin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import (
    BenchmarkDatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    FeatureArgs,
    RandomDistribution,
    RandomSource,
)
from tests.commons.datasets.random_args import random_args
from tests.e2e.gin_files import generated_benchmark

ZIPF = RandomDistribution("zipf", alpha=2.0)


@pytest.fixture(autouse=True)
def clear_gin():
    yield
    gin.clear_config()


def table(*features, size=10, sharding="data_parallel"):
    return EmbeddingArgs(list(features), "_".join(features), size, sharding)


def item_table(rows=9, **options):
    return DynamicEmbeddingArgs(["item"], "item", rows, **options)


def test_a_recsys_examples_file_parses_and_bindings_override_it():
    # Without the settings of the model, whose names those of another model share.
    file = generated_benchmark(caching=True, zipf_values=1.2).partition("\nNetworkArgs")[0]
    gin.parse_config(file, skip_unknown=["TrainerArgs"])
    parsed = BenchmarkDatasetArgs()
    assert parsed.num_generated_batches == 100
    assert parsed.feature_args[0].seqlen_dist == RandomDistribution("zipf", low=1, alpha=1.2)
    assert parsed.feature_args[0].value_dists["item"] == RandomDistribution("zipf", alpha=1.2)
    items = parsed.embedding_args[0]
    assert (
        isinstance(items, DynamicEmbeddingArgs) and items.sharding_type == "model_parallel" and items.caching
    )
    spec = parsed.spec()
    names = ["user_id", "user_age", "item_category_l1", "item", "action"]
    assert spec.feature_names == names
    assert spec.feature_to_max_seqlen == dict(zip(names, (1, 1, 1, 4096, 4096), strict=True))
    assert spec.vocab_sizes == dict(zip(names, (5 * 10**7, 100, 50, 5 * 10**7, 100), strict=True))
    assert (spec.num_classes, spec.positive_class, spec.max_num_candidates) == (100, None, 0)
    sizes = (
        "history/FeatureArgs.max_sequence_length = 16",
        "BenchmarkDatasetArgs.contextual_feature_names = []",
    )
    gin.parse_config([file, *sizes], skip_unknown=["TrainerArgs"])
    overridden = BenchmarkDatasetArgs().spec()
    assert overridden.feature_to_max_seqlen == {"item": 16, "action": 16}
    assert [table.table_name for table in overridden.tables] == ["item", "action"]


def test_a_table_serves_only_the_features_in_use():
    shared = random_args(embedding_args=[table("item", "unused"), table("act"), table("user")])
    assert [t.feature_names for t in shared.spec().tables] == [["item"], ["act"], ["user"]]


TWICE = [table("item"), table("act", "user"), table("user")]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureArgs([], 1), r"FeatureArgs.feature_names = \[\]"),
        (lambda: FeatureArgs(["item"], 0), "FeatureArgs.max_sequence_length = 0: expected at least 1"),
        (lambda: FeatureArgs(["item"], 1, value_dists={"a": ZIPF}), "value_dists = 'a': expected one of"),
        (lambda: table(), r"EmbeddingArgs.feature_names = \[\]"),
        (lambda: table("item", size=0), "EmbeddingArgs.item_vocab_size_or_capacity = 0"),
        (lambda: table("item", sharding="row_wise"), "EmbeddingArgs.sharding_type = 'row_wise'"),
        (lambda: item_table(0), "DynamicEmbeddingArgs.item_vocab_size_or_capacity = 0"),
        (lambda: item_table(sharding_type="data_parallel"), "type = 'data_parallel': expected model_p"),
        (lambda: item_table(item_vocab_gpu_capacity_ratio=1.5), "capacity_ratio = 1.5: expected 0 to 1"),
        (lambda: item_table(global_hbm_for_values=-1), "DynamicEmbeddingArgs.global_hbm_for_values = -1"),
        (lambda: item_table(evict_strategy="fifo"), "evict_strategy = 'fifo': expected one of lru, lfu"),
        (lambda: RandomDistribution("poisson"), "dist_type = 'poisson': expected one of uniform, "),
        (lambda: RandomDistribution("uniform", low=0), "high is not set: uniform needs it"),
        (lambda: RandomDistribution("lognormal", mean=5.0), "std is not set: lognormal needs it"),
        (lambda: RandomDistribution("normal", std=5.0), "mean is not set"),
        (lambda: RandomDistribution("zipf"), "alpha is not set"),
        (lambda: RandomDistribution("zipf", alpha=1.0), "alpha = 1.0: expected more than 1"),
        (lambda: RandomDistribution("uniform", low=4, high=4), "high = 4: expected at least 5"),
        (lambda: RandomDistribution("zipf", alpha=2.0, low=4, high=3), "high = 3"),
        (lambda: RandomDistribution("normal", mean=0.0, std=-1.0), "std = -1.0"),
        (lambda: RandomDistribution("lognormal", mean=0.0, std=1.0), "mean = 0.0"),
        (lambda: random_args(max_num_candidates=-1), "BenchmarkDatasetArgs.max_num_candidates = -1"),
        (lambda: random_args(num_generated_batches=0), "BenchmarkDatasetArgs.num_generated_batches = 0"),
        (
            lambda: random_args(item_feature_name="movie"),
            "feature_args has feature 'movie' = 0: expected o",
        ),
        (lambda: random_args(embedding_args=TWICE[:1]), "embedding_args has feature 'user' = 0: exp"),
        (lambda: random_args(embedding_args=TWICE), "embedding_args has feature 'user' = 2: exp"),
        (lambda: random_args(action_feature_name="user", contextual_feature_names=[]), "'user': expected"),
        (lambda: replace(random_args().spec(), tables=()), "feature 'user' is in 0 embedding tables, not"),
        (lambda: replace(random_args().spec(), feature_to_max_seqlen={"user": 1}), "'item' has no entry"),
        (lambda: RandomSource(random_args(), -1, seed=0), "num_samples = -1, seed = 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_options_of_a_dynamic_table_that_change_nothing_are_named():
    everywhere = {"item_vocab_gpu_capacity_ratio": 1.0, "item_vocab_gpu_capacity": 100}
    for options in ({}, {**everywhere, "evict_strategy": "lfu", "caching": False}):
        assert item_table(100, **options).settings_without_effect() == []
    ignored = {
        "item_vocab_gpu_capacity_ratio": 0.5,
        "item_vocab_gpu_capacity": 50,
        "global_hbm_for_values": 0,
        "caching": True,
        "dist_type": "continuous",
    }
    lines = [f"{name} = {value!r}" for name, value in ignored.items()]
    assert item_table(100, **ignored).settings_without_effect() == lines


def all_samples(args=None, num_samples=200, seed=0):
    source = RandomSource(args or random_args(), num_samples, seed)
    return [source[index] for index in range(num_samples)]


def test_a_sample_depends_on_the_seed_and_its_index_alone():
    source, again = RandomSource(random_args(), 5, seed=3), RandomSource(random_args(), 50, seed=3)
    again[0]
    for name in ("items", "actions", "labels"):
        np.testing.assert_array_equal(getattr(source[4], name), getattr(again[4], name))
    np.testing.assert_array_equal(source[4].contextual["user"], again[4].contextual["user"])
    first, other = ([sample.items.tolist() for sample in all_samples(seed=seed)] for seed in (3, 4))
    assert first != other
    with pytest.raises(IndexError, match="sample 5: expected 0 to 4"):
        source[5]


def test_ids_lie_in_their_tables_and_every_item_has_its_action_for_a_label():
    samples = all_samples(num_samples=300)
    assert {int(i) for s in samples for i in s.items} == set(range(50))
    assert {int(i) for s in samples for i in s.actions} == set(range(4))
    assert {len(s.contextual["user"]) for s in samples} == {2}
    assert {len(s.items) for s in samples} == set(range(1, 9))
    for sample in samples:
        assert sample.items.dtype == sample.actions.dtype == sample.labels.dtype == np.int64
        np.testing.assert_array_equal(sample.labels, sample.actions)
        assert sample.num_candidates == 0


def test_candidates_are_the_last_items_and_have_the_labels():
    for sample in all_samples(random_args(max_num_candidates=3)):
        assert len(sample.items) <= 8
        assert sample.num_candidates == min(3, len(sample.items) - 1)
        first = len(sample.items) - sample.num_candidates
        np.testing.assert_array_equal(sample.labels, sample.actions[first:])


def test_lengths_and_ids_follow_their_distributions():
    def drawn(*lengths, items=None):
        feature = FeatureArgs(["item", "act"], 8, *lengths, value_dists={"item": items} if items else None)
        return [sample.items for sample in all_samples(random_args(feature))]

    wide = RandomDistribution("normal", mean=4.0, std=10.0)
    assert set(map(len, drawn(False, ZIPF))) == {8}  # not jagged: all have the full length
    assert set(map(len, drawn(True, wide))) == set(range(1, 9))
    folded = drawn(True, items=RandomDistribution("uniform", low=99, high=102))
    assert set(np.concatenate(folded).tolist()) == {49, 0, 1}


def test_without_actions_there_is_one_class_and_labels_only_mark_their_items():
    args = random_args(action_feature_name=None)
    assert args.spec().feature_names == ["user", "item"] and args.spec().num_classes == 1
    sample = RandomSource(args, 1, seed=0)[0]
    assert sample.actions is None
    np.testing.assert_array_equal(sample.labels, np.zeros(len(sample.items)))


def dynamic(**dists):
    """Items and actions of dynamic tables of 50 and 4 rows."""
    act = DynamicEmbeddingArgs(["act"], "act", 4)
    feature = FeatureArgs(["item", "act"], 8, value_dists=dists)
    return random_args(feature, embedding_args=[item_table(50), act, table("user", size=9)])


def test_ids_of_a_dynamic_table_are_as_drawn_but_actions_are_classes():
    wide = RandomDistribution("uniform", low=-500, high=10**12)
    samples = all_samples(dynamic(item=wide, act=wide))
    assert max(s.items.max() for s in samples) > 10**11
    assert {int(i) for s in samples for i in s.actions} == set(range(4))
    assert {int(i) for s in all_samples(dynamic()) for i in s.items} == set(range(50))


def test_the_catalogue_of_a_dynamic_table_is_what_can_be_drawn():
    uniform = RandomDistribution("uniform", low=70, high=900)
    clipped = RandomDistribution("zipf", low=1, high=900, alpha=1.2)
    for dists, end in (
        ({}, range(50)),
        ({"item": uniform}, range(70, 900)),
        ({"item": clipped}, range(1, 901)),
    ):
        assert RandomSource(dynamic(**dists), 1, 0).catalogue.tolist() == list(end)
    with pytest.raises(ValueError, match=r"of 'item': low = None, high = None; set both"):
        _ = RandomSource(dynamic(item=ZIPF), 1, 0).catalogue


RANGED = {
    "uniform": {},
    "normal": {"mean": 30.0, "std": 40.0},
    "zipf": {"alpha": 1.2},
    "lognormal": {"mean": 30.0, "std": 60.0},
}


def draw(distribution, size=1000, seed=0):
    return distribution.sample(np.random.default_rng(seed), size)


@pytest.mark.parametrize("dist_type", RANGED)
@settings(max_examples=25)
@given(low=st.integers(0, 50), width=st.integers(1, 100), seed=st.integers(0, 1000))
def test_draws_are_integers_within_their_bounds_and_follow_the_generator(dist_type, low, width, seed):
    distribution = RandomDistribution(dist_type, low=low, high=low + width, **RANGED[dist_type])
    values = draw(distribution, 200, seed)
    assert values.dtype == np.int64 and values.shape == (200,)
    assert low <= values.min() and values.max() <= low + width - (dist_type == "uniform")
    np.testing.assert_array_equal(draw(distribution, 200, seed), values)


def test_parameters_are_those_of_the_values():
    for mean, std in ((200.0, 100.0), (500.0, 1000.0)):
        values = draw(RandomDistribution("lognormal", mean=mean, std=std), 1_000_000)
        assert values.mean() == pytest.approx(mean, rel=0.01)
        assert values.std() == pytest.approx(std, rel=0.05)
    values = draw(RandomDistribution("normal", mean=100.0, std=20.0), 100_000)
    assert values.mean() == pytest.approx(100, rel=0.01)
    assert values.std() == pytest.approx(20, rel=0.02)
    assert set(draw(RandomDistribution("uniform", low=3, high=6))) == {3, 4, 5}
    values = draw(RandomDistribution("zipf", alpha=2.0), 100_000)
    assert (values == 1).mean() == pytest.approx(6 / np.pi**2, rel=0.01)  # 1 / zeta(2)
