import dataclasses

import gin
import pytest

from commons.datasets import (
    BenchmarkDatasetArgs,
    DynamicEmbeddingArgs,
    EmbeddingArgs,
    FeatureArgs,
    RandomDistribution,
    RandomSource,
)

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


def args(**changes):
    settings = {
        "feature_args": [FeatureArgs(["item", "act"], 8, is_jagged=True), FeatureArgs(["user"], 1)],
        "embedding_args": [table("item", size=50, sharding="model_parallel"), table("act"), table("user")],
        "item_feature_name": "item",
        "contextual_feature_names": ["user"],
        "action_feature_name": "act",
    }
    return BenchmarkDatasetArgs(**(settings | changes))


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
    shared = args(embedding_args=[table("item", "unused"), table("act"), table("user")])
    assert [t.feature_names for t in shared.spec().tables] == [["item"], ["act"], ["user"]]


def test_without_actions_there_is_one_class():
    spec = args(action_feature_name=None).spec()
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
        (lambda: args(max_num_candidates=-1), r"BenchmarkDatasetArgs.max_num_candidates = -1"),
        (lambda: args(num_generated_batches=0), r"BenchmarkDatasetArgs.num_generated_batches = 0"),
        (
            lambda: args(item_feature_name="movie"),
            r"BenchmarkDatasetArgs.feature_args has feature 'movie' 0 times",
        ),
        (
            lambda: args(embedding_args=[table("item"), table("act")]),
            r"BenchmarkDatasetArgs.embedding_args has feature 'user' 0 times",
        ),
        (
            lambda: args(embedding_args=[table("item"), table("act", "user"), table("user")]),
            r"BenchmarkDatasetArgs.embedding_args has feature 'user' 2 times",
        ),
        (
            lambda: args(action_feature_name="user", contextual_feature_names=[]),
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
        dataclasses.replace(args().spec(), **changes)


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
