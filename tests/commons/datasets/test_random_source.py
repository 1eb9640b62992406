import dataclasses

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

# Written as the benchmark files of recsys-examples' HSTU are.
GIN_FILE = """
len/RandomDistribution.dist_type = "lognormal"
len/RandomDistribution.low = 1
len/RandomDistribution.high = 4096
len/RandomDistribution.mean = 300
len/RandomDistribution.std = 500
v/RandomDistribution.dist_type = "zipf"
v/RandomDistribution.low = 0
v/RandomDistribution.high = 100000
v/RandomDistribution.alpha = 1.2

item_and_action_feature/FeatureArgs.feature_names = ['item', 'act']
item_and_action_feature/FeatureArgs.max_sequence_length = 4096
item_and_action_feature/FeatureArgs.is_jagged = True
item_and_action_feature/FeatureArgs.seqlen_dist = @len/RandomDistribution()
item_and_action_feature/FeatureArgs.value_dists = {'item': @v/RandomDistribution()}

contextual_feature/FeatureArgs.feature_names = ['user0', 'user1']
contextual_feature/FeatureArgs.max_sequence_length = 1
contextual_feature/FeatureArgs.is_jagged = False

act/EmbeddingArgs.feature_names = ['act']
act/EmbeddingArgs.table_name = 'act'
act/EmbeddingArgs.item_vocab_size_or_capacity = 128
act/EmbeddingArgs.sharding_type = "data_parallel"
user/EmbeddingArgs.feature_names = ['user0', 'user1']
user/EmbeddingArgs.table_name = 'user'
user/EmbeddingArgs.item_vocab_size_or_capacity = 1000
user/EmbeddingArgs.sharding_type = "model_parallel"
item/DynamicEmbeddingArgs.feature_names = ['item']
item/DynamicEmbeddingArgs.table_name = 'item'
item/DynamicEmbeddingArgs.item_vocab_size_or_capacity = 100000
item/DynamicEmbeddingArgs.item_vocab_gpu_capacity_ratio = 0.5
item/DynamicEmbeddingArgs.evict_strategy = "lru"
item/DynamicEmbeddingArgs.caching = True

BenchmarkDatasetArgs.feature_args = [
    @item_and_action_feature/FeatureArgs(),
    @contextual_feature/FeatureArgs(),
]
BenchmarkDatasetArgs.embedding_args = [
    @item/DynamicEmbeddingArgs(), @user/EmbeddingArgs(), @act/EmbeddingArgs(),
]
BenchmarkDatasetArgs.item_feature_name = 'item'
BenchmarkDatasetArgs.contextual_feature_names = ['user0', 'user1']
BenchmarkDatasetArgs.action_feature_name = 'act'
BenchmarkDatasetArgs.max_num_candidates = 10
"""


@pytest.fixture(autouse=True)
def clear_gin():
    yield
    gin.clear_config()


def table(*features, size=10, sharding="data_parallel"):
    return EmbeddingArgs(list(features), "_".join(features), size, sharding)


def test_a_recsys_examples_file_parses():
    gin.parse_config(GIN_FILE)
    parsed = BenchmarkDatasetArgs()
    assert parsed.num_generated_batches == 100
    features = parsed.feature_args[0]
    assert features.seqlen_dist == RandomDistribution("lognormal", low=1, high=4096, mean=300, std=500)
    assert features.value_dists["item"].dist_type == "zipf"
    item_table = parsed.embedding_args[0]
    assert isinstance(item_table, DynamicEmbeddingArgs)
    assert item_table.sharding_type == "model_parallel"
    assert item_table.caching
    spec = parsed.spec()
    assert spec.feature_names == ["user0", "user1", "item", "act"]
    assert spec.feature_to_max_seqlen == {"user0": 1, "user1": 1, "item": 4096, "act": 4096}
    assert spec.vocab_sizes == {"item": 100000, "user0": 1000, "user1": 1000, "act": 128}
    assert (spec.num_classes, spec.positive_class, spec.max_num_candidates) == (128, None, 10)


def test_sizes_can_be_overridden_by_bindings():
    overrides = [
        "item_and_action_feature/FeatureArgs.max_sequence_length = 16",
        "item/DynamicEmbeddingArgs.item_vocab_size_or_capacity = 100",
        "BenchmarkDatasetArgs.contextual_feature_names = []",
    ]
    gin.parse_config_files_and_bindings([], [GIN_FILE, *overrides])
    parsed = BenchmarkDatasetArgs()
    assert parsed.spec().feature_names == ["item", "act"]
    assert [table.table_name for table in parsed.spec().tables] == ["item", "act"]
    sample = RandomSource(parsed, num_samples=1, seed=0)[0]
    assert len(sample.items) <= 16
    assert 100 <= sample.items.max() <= 100000  # of a dynamic table: its ids may be more than its rows


def test_a_table_serves_only_the_features_in_use():
    shared = random_args(embedding_args=[table("item", "unused"), table("act"), table("user")])
    assert [t.feature_names for t in shared.spec().tables] == [["item"], ["act"], ["user"]]


def test_without_actions_there_is_one_class():
    spec = random_args(action_feature_name=None).spec()
    assert spec.feature_names == ["user", "item"]
    assert spec.num_classes == 1


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: FeatureArgs([], 1), r"FeatureArgs.feature_names = \[\]"),
        (lambda: FeatureArgs(["item"], 0), r"FeatureArgs.max_sequence_length = 0: expected at least 1"),
        (
            lambda: FeatureArgs(["item"], 1, value_dists={"act": RandomDistribution("zipf", alpha=2.0)}),
            r"FeatureArgs.value_dists has 'act': expected one of \['item'\]",
        ),
        (lambda: table(), r"EmbeddingArgs.feature_names = \[\]"),
        (lambda: table("item", size=0), r"EmbeddingArgs.item_vocab_size_or_capacity = 0"),
        (lambda: table("item", sharding="row_wise"), r"EmbeddingArgs.sharding_type = 'row_wise'"),
        (
            lambda: DynamicEmbeddingArgs(["item"], "item", 0),
            r"DynamicEmbeddingArgs.item_vocab_size_or_capacity = 0",
        ),
        (
            lambda: DynamicEmbeddingArgs(["item"], "item", 9, sharding_type="data_parallel"),
            r"DynamicEmbeddingArgs.sharding_type = 'data_parallel': expected model_parallel",
        ),
        (
            lambda: DynamicEmbeddingArgs(["item"], "item", 9, item_vocab_gpu_capacity_ratio=1.5),
            r"DynamicEmbeddingArgs.item_vocab_gpu_capacity_ratio = 1.5: expected 0 to 1",
        ),
        (
            lambda: DynamicEmbeddingArgs(["item"], "item", 9, global_hbm_for_values=-1),
            r"DynamicEmbeddingArgs.global_hbm_for_values = -1",
        ),
        (
            lambda: DynamicEmbeddingArgs(["item"], "item", 9, evict_strategy="fifo"),
            r"DynamicEmbeddingArgs.evict_strategy = 'fifo': expected one of lru, lfu",
        ),
        (lambda: RandomDistribution("poisson"), r"dist_type = 'poisson': expected one of uniform, "),
        (lambda: RandomDistribution("uniform", low=0), r"high is not set: uniform needs it"),
        (lambda: RandomDistribution("lognormal", mean=5.0), r"std is not set: lognormal needs it"),
        (lambda: RandomDistribution("normal", std=5.0), r"mean is not set"),
        (lambda: RandomDistribution("zipf"), r"alpha is not set"),
        (lambda: RandomDistribution("zipf", alpha=1.0), r"alpha = 1.0: expected more than 1"),
        (lambda: RandomDistribution("uniform", low=4, high=4), r"high = 4: expected at least 5"),
        (lambda: RandomDistribution("zipf", alpha=2.0, low=4, high=3), r"high = 3"),
        (lambda: RandomDistribution("normal", mean=0.0, std=-1.0), r"std = -1.0"),
        (lambda: RandomDistribution("lognormal", mean=0.0, std=1.0), r"mean = 0.0"),
        (lambda: random_args(max_num_candidates=-1), r"BenchmarkDatasetArgs.max_num_candidates = -1"),
        (lambda: random_args(num_generated_batches=0), r"BenchmarkDatasetArgs.num_generated_batches = 0"),
        (
            lambda: random_args(item_feature_name="movie"),
            r"BenchmarkDatasetArgs.feature_args has feature 'movie' 0 times",
        ),
        (
            lambda: random_args(embedding_args=[table("item"), table("act")]),
            r"BenchmarkDatasetArgs.embedding_args has feature 'user' 0 times",
        ),
        (
            lambda: random_args(embedding_args=[table("item"), table("act", "user"), table("user")]),
            r"BenchmarkDatasetArgs.embedding_args has feature 'user' 2 times",
        ),
        (
            lambda: random_args(action_feature_name="user", contextual_feature_names=[]),
            r"BenchmarkDatasetArgs.action_feature_name = 'user': expected one of \['item', 'act'\]",
        ),
    ],
)
def test_settings_that_make_no_sense_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tables": ()}, "feature 'user' is in 0 embedding tables, not one"),
        ({"feature_to_max_seqlen": {"user": 1}}, "feature 'item' has no entry in feature_to_max_seqlen"),
    ],
)
def test_a_spec_covers_its_features(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(random_args().spec(), **changes)


def test_options_of_a_dynamic_table_that_change_nothing_are_named():
    def without_effect(**options) -> list[str]:
        return DynamicEmbeddingArgs(["item"], "item", 100, **options).settings_without_effect()

    assert without_effect() == []
    everywhere = {"item_vocab_gpu_capacity_ratio": 1.0, "item_vocab_gpu_capacity": 100}
    assert without_effect(**everywhere, evict_strategy="lfu", caching=False) == []
    assert without_effect(
        item_vocab_gpu_capacity_ratio=0.5,
        item_vocab_gpu_capacity=50,
        global_hbm_for_values=0,
        caching=True,
        dist_type="continuous",
    ) == [
        "item_vocab_gpu_capacity_ratio = 0.5",
        "item_vocab_gpu_capacity = 50",
        "global_hbm_for_values = 0",
        "caching = True",
        "dist_type = 'continuous'",
    ]


def lengths(source):
    return [len(source[i].items) for i in range(len(source))]


def test_a_sample_depends_on_the_seed_and_its_index_alone():
    source, again = RandomSource(random_args(), 5, seed=3), RandomSource(random_args(), 50, seed=3)
    again[0]
    for name in ("items", "actions", "labels"):
        np.testing.assert_array_equal(getattr(source[4], name), getattr(again[4], name))
    np.testing.assert_array_equal(source[4].contextual["user"], again[4].contextual["user"])
    all_items = [
        RandomSource(random_args(), 50, seed)[i].items.tolist() for seed in (3, 4) for i in range(50)
    ]
    assert all_items[:50] != all_items[50:]


def test_ids_lie_in_their_tables_and_every_item_has_its_action_for_a_label():
    source = RandomSource(random_args(), 300, seed=0)
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
    source = RandomSource(random_args(max_num_candidates=3), 200, seed=0)
    for sample in (source[i] for i in range(len(source))):
        assert len(sample.items) <= 8
        assert sample.num_candidates == min(3, len(sample.items) - 1)
        first = len(sample.items) - sample.num_candidates
        np.testing.assert_array_equal(sample.labels, sample.actions[first:])


def test_lengths_and_ids_follow_their_distributions():
    zipf = RandomDistribution("zipf", alpha=2.0)
    fixed = FeatureArgs(["item", "act"], 8, seqlen_dist=zipf)  # not jagged: all have the full length
    assert set(lengths(RandomSource(random_args(fixed), 20, seed=0))) == {8}
    wide = RandomDistribution("normal", mean=4.0, std=10.0)
    drawn = lengths(RandomSource(random_args(FeatureArgs(["item", "act"], 8, True, wide)), 200, seed=0))
    assert (min(drawn), max(drawn)) == (1, 8)
    dists = {"item": RandomDistribution("uniform", low=99, high=102)}
    folded = RandomSource(random_args(FeatureArgs(["item", "act"], 8, True, None, dists)), 100, seed=0)
    assert {int(i) for k in range(100) for i in folded[k].items} == {49, 0, 1}


def test_without_actions_labels_only_mark_their_items():
    sample = RandomSource(random_args(action_feature_name=None), 1, seed=0)[0]
    assert sample.actions is None
    np.testing.assert_array_equal(sample.labels, np.zeros(len(sample.items)))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="num_samples = -1, seed = 0"):
        RandomSource(random_args(), -1, seed=0)
    with pytest.raises(IndexError, match="sample 5: expected 0 to 4"):
        RandomSource(random_args(), 5, seed=0)[5]


def dynamic(**dists):
    """Items and actions of dynamic tables of 50 and 4 rows."""
    return random_args(
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
    with pytest.raises(ValueError, match=r"of 'item': low = None, high = None; set both"):
        _ = RandomSource(dynamic(item=RandomDistribution("zipf", alpha=1.2)), 1, 0).catalogue


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
def test_draws_are_integers_within_their_bounds(dist_type, low, width, seed):
    distribution = RandomDistribution(dist_type, low=low, high=low + width, **RANGED[dist_type])
    values = draw(distribution, 200, seed)
    assert values.dtype == np.int64
    assert values.shape == (200,)
    assert values.min() >= low
    assert values.max() <= low + width - (dist_type == "uniform")


@pytest.mark.parametrize("dist_type", RANGED)
def test_the_same_generator_state_draws_the_same_values(dist_type):
    distribution = RandomDistribution(dist_type, low=1, high=500, **RANGED[dist_type])
    np.testing.assert_array_equal(draw(distribution), draw(distribution))
    assert not np.array_equal(draw(distribution), draw(distribution, seed=1))


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
