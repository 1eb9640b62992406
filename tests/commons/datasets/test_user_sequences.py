import json
import re

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import (
    DatasetFactory,
    SequenceDataset,
    SequencesMeta,
    UserDataset,
    UserSequences,
    UserSequenceSource,
    check_ids,
    register_dataset,
)
from commons.datasets.kuairand_preprocess import main as prepare_kuairand
from commons.datasets.movielens import MOVIELENS
from commons.datasets.movielens_preprocess import main as prepare_movielens
from tests.commons.datasets.kuairand_files import write_kuairand_1k


@pytest.fixture
def prepared(raw_100k, tmp_path):
    prepare_movielens(["--dataset", "ml-100k", "--raw", str(raw_100k), "--out", str(tmp_path / "ml-100k")])
    return tmp_path / "ml-100k"


@pytest.fixture
def sequences(prepared):
    return UserSequences.open(prepared, "ml-100k")


def samples(sequences, split, **options):
    source = UserSequenceSource(sequences, split, **{"max_history_seqlen": 100, **options})
    return [source[i] for i in range(len(source))]


def labelled(sample):
    return list(zip(sample.items[len(sample.items) - len(sample.labels) :], sample.labels, strict=True))


USER_3, USER_7, LABELS_7 = [13, 11, 12, 14], [12, 11, *range(20, 28)], [0, 4, 0, 1, 2, 3, 4, 0]


# The newest events are for evaluation, but for a user with a single one.
@pytest.mark.parametrize(
    ("split", "longest", "candidates", "expected"),
    [
        ("train", 100, 0, [(USER_3[:3], [1, 2, 3], 0), ([30], [1], 0), (USER_7[:8], LABELS_7, 0)]),
        ("train", 100, 2, [(USER_3[:3], [2, 3], 2), ([30], [], 0), (USER_7[:8], [4, 0], 2)]),
        ("train", 2, 0, [([11, 12], [2, 3], 0), ([30], [1], 0), ([24, 25], [4, 0], 0)]),
        ("eval", 100, 0, [(USER_3, [0], 0), (USER_7, [1, 2], 0)]),
        ("eval", 100, 1, [(USER_3, [0], 1), (USER_7, [2], 1)]),
        ("eval", 1, 0, [([14], [0], 0), ([27], [2], 0)]),
        ("eval", 2, 5, [([12, 14], [0], 1), ([26, 27], [2], 1)]),
    ],
)
def test_events_are_split_by_time_and_then_cut_to_the_newest(split, longest, candidates, expected, sequences):
    found = samples(sequences, split, max_history_seqlen=longest, max_num_candidates=candidates)
    assert [(one.items.tolist(), one.labels.tolist(), one.num_candidates) for one in found] == expected
    assert all((one.actions[len(one.items) - len(one.labels) :] == one.labels + 1).all() for one in found)
    assert found[0].contextual["user_id"].tolist() == found[0].contextual["occupation"].tolist() == [3]


def synthetic(num_events):
    """Users of the given numbers of events, every one with an item of its own."""
    total = sum(num_events)
    sizes = {"user_id": len(num_events) + 1, "movie_id": total, "rating": 6}
    meta = SequencesMeta("ml-20m", ["user_id"], "movie_id", "rating", sizes, 5, 3)
    offsets = np.concatenate([[0], np.cumsum(num_events)])
    users = {"user_id": np.arange(len(num_events))}
    return UserSequences(meta, users, np.arange(total, dtype=np.int32), np.ones(total, np.int32), offsets)


@settings(max_examples=40)
@given(
    num_events=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    longest=st.integers(1, 40),
    candidates=st.integers(0, 5),
    fraction=st.floats(0.01, 0.99),
)
def test_no_label_of_an_evaluation_is_in_training(num_events, longest, candidates, fraction):
    options = {"max_history_seqlen": longest, "max_num_candidates": candidates, "eval_fraction": fraction}
    train = samples(synthetic(num_events), "train", **options)
    evaluation = samples(synthetic(num_events), "eval", **options)
    assert len(train) == len(num_events)
    assert len(evaluation) == sum(n > 1 for n in num_events)
    evaluated = {int(item) for sample in evaluation for item, _ in labelled(sample)}
    assert evaluated.isdisjoint(int(item) for sample in train for item in sample.items)
    for sample in train + evaluation:
        assert 1 <= len(sample.items) <= longest
        assert 0 <= sample.num_candidates <= max(0, min(candidates, len(sample.items) - 1))
        assert len(sample.labels) == sample.num_candidates if candidates else len(sample.labels) >= 1


def test_the_spec_describes_the_batches(sequences):
    source = UserSequenceSource(sequences, "train", max_history_seqlen=6)
    spec = source.spec
    assert spec.feature_names == ["user_id", "age", "gender", "occupation", "zip_code", "movie_id", "rating"]
    assert spec.feature_to_max_seqlen["movie_id"] == spec.feature_to_max_seqlen["rating"] == 6
    assert spec.feature_to_max_seqlen["age"] == 1
    assert (spec.num_classes, spec.positive_class) == (5, 3)
    large = {table.table_name for table in spec.tables if table.sharding_type == "model_parallel"}
    assert large == {"user_id", "movie_id"}
    for batch in SequenceDataset(source, batch_size=2):
        assert batch.features.keys() == spec.feature_names
        check_ids(batch, spec)


@pytest.mark.parametrize(
    ("dataset", "preprocessor"), [("ml-100k", "movielens_preprocess"), ("kuairand-1k", "kuairand_preprocess")]
)
@pytest.mark.parametrize("name", ["meta.json", "sequences.parquet"])
def test_a_missing_file_is_named_with_the_command_that_prepares_it(name, dataset, preprocessor, prepared):
    (prepared / name).unlink()
    command = f"python -m commons.datasets.{preprocessor} --dataset {dataset} --out {prepared}"
    error = f"{prepared / name} does not exist.*{command}"
    with pytest.raises(FileNotFoundError, match=error):
        UserSequences.open(prepared, dataset)


def meta(remove=None, **changes):
    """Returns a function that changes entries of the metadata in a folder, and removes one."""

    def change(directory):
        path = directory / "meta.json"
        entries = json.loads(path.read_text()) | changes
        entries.pop(remove, None)
        path.write_text(json.dumps(entries))

    return change


def column(expression):
    """Returns a function that replaces a column of the table in a folder."""

    def change(directory):
        path = directory / "sequences.parquet"
        pl.read_parquet(path).with_columns(expression).write_parquet(path)

    return change


ITEMS, ACTIONS, AGE = pl.col("items").list, pl.col("actions").list, pl.col("age")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "meta.json").write_text("{"), "meta.json is malformed"),
        (lambda d: (d / "meta.json").write_text("[]"), "meta.json is malformed: .* mapping, not list"),
        (meta(more=1), "meta.json is malformed: .* unexpected keyword argument 'more'"),
        (meta(remove="dataset"), "meta.json is malformed: .* missing 1 required .* 'dataset'"),
        (meta(vocab_sizes=None), "meta.json is malformed"),
        (meta(dataset="ml-1m"), "meta.json is malformed: it belongs to 'ml-1m'"),
        (meta(vocab_sizes={"age": 9}), r"meta.json is malformed: vocab_sizes has \['age'\]"),
        (meta(num_tasks=7), "num_tasks = 7: expected 1, or log2 of num_classes"),
        (meta(num_tasks=0), "num_tasks = 0: expected 1"),
        (meta(num_tasks="8"), "meta.json is malformed"),
        (lambda d: (d / "sequences.parquet").write_bytes(b"PAR1"), "sequences.parquet is malformed"),
        (
            lambda d: pl.DataFrame({"user_id": [1]}).write_parquet(d / "sequences.parquet"),
            "sequences.parquet is malformed",
        ),
        (column(ITEMS.head(2)), "parquet is malformed: row 0: a user has 2 items and 4 actions: expected"),
        (column(AGE + 10), "malformed: row 0: feature 'age' has id 11: expected 0 to 3"),
        (column(AGE * None), "malformed: row 0: column 'age' is null"),
        (
            column(ITEMS.eval(-pl.element())),
            "row 0: feature 'movie_id' has id -13: expected 0 to 30;",
        ),
        (column(ACTIONS.eval(pl.element() - 1)), "row 0: feature 'rating' has id 0: expected 1 to 5"),
        (column(pl.col("user_id").alias("items")), "sequences.parquet is malformed"),
        (column(ITEMS.eval(pl.element() + 0.5)), r"'items' is List\(Float64\): expected lists of integers"),
        (column(ACTIONS.eval(pl.element().cast(pl.Float32))), r"column 'actions' is List\(Float32\): expect"),
        (column(AGE / 2), "sequences.parquet is malformed: column 'age' is Float64: expected integers"),
    ],
)
def test_a_malformed_file_is_named_with_the_command_that_prepares_it(damage, message, prepared):
    damage(prepared)
    with pytest.raises(ValueError, match=message) as raised:
        UserSequences.open(prepared, "ml-100k")
    assert f"movielens_preprocess --dataset ml-100k --out {prepared}" in str(raised.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": "test"}, "split = 'test': expected train or eval"),
        ({"max_history_seqlen": 0}, "max_history_seqlen = 0: expected at least 1"),
        ({"max_num_candidates": -1}, "max_num_candidates = -1"),
        ({"eval_fraction": 1.0}, "eval_fraction = 1.0"),
    ],
)
def test_arguments_are_checked(options, message, sequences):
    with pytest.raises(ValueError, match=message):
        UserSequenceSource(sequences, **{"split": "train", "max_history_seqlen": 5, **options})


@pytest.fixture(scope="module")
def kuairand(tmp_path_factory):
    out = tmp_path_factory.mktemp("kuairand")
    write_kuairand_1k(out / "raw", num_events=600, num_users=12, num_videos=200)
    prepare_kuairand(["--dataset", "kuairand-1k", "--raw", str(out / "raw"), "--out", str(out)])
    return UserSequences.open(out, "kuairand-1k")


def test_labels_of_several_tasks_are_their_bits(kuairand):
    source, whole = (UserSequenceSource(kuairand, "train", longest) for longest in (20, 10_000))
    labels = set()
    for index in range(len(source)):
        sample = source[index]
        assert sample.items.tolist() == whole[index].items[-20:].tolist()
        assert (sample.labels == sample.actions - 1).all()
        labels |= set(sample.labels.tolist())
    assert labels <= set(range(256)) and len(labels) > 4
    evaluation = UserSequenceSource(kuairand, "eval", 20)
    spec = evaluation.spec
    assert (spec.num_tasks, spec.num_classes, spec.positive_class) == (8, 256, None)
    assert spec.vocab_sizes["action"] == 257
    large = {table.table_name for table in spec.tables if table.sharding_type == "model_parallel"}
    assert large == {"user_id", "video_id"}
    for batch in SequenceDataset(evaluation, batch_size=4):
        check_ids(batch, spec)


@pytest.mark.parametrize("absent", [["tie_order"], ["tie_order", "num_tasks", "unbounded_feature_names"]])
def test_folders_from_before_an_entry_existed_are_read(absent, prepared):
    path = prepared / "meta.json"
    entries = json.loads(path.read_text())
    assert entries["tie_order"] == "splitmix64 of user and item, version 1"
    path.write_text(json.dumps({name: entries[name] for name in entries if name not in absent}))
    sequences = UserSequences.open(prepared, "ml-100k")
    assert sequences.meta.tie_order is None
    sequences.meta.write(path)
    assert json.loads(path.read_text()).keys() == entries.keys() - {"tie_order"}


def own(items, sizes=(10, 100), dtype=None, unbounded=(), users=None):
    """Returns sequences of users' items, each with action 1."""
    users = list(range(len(items))) if users is None else users
    actions = [None if row is None else [1] * len(row) for row in items]
    table = pl.DataFrame({"user_id": users, "items": pl.Series(items, dtype=dtype), "actions": actions})
    vocab_sizes = {"user_id": sizes[0], "product": sizes[1], "stars": 6}
    meta = SequencesMeta(
        "shop", ["user_id"], "product", "stars", vocab_sizes, 5, 3, unbounded_feature_names=list(unbounded)
    )
    return UserSequences.from_table(table, meta)


@pytest.mark.parametrize("dtype", [pl.UInt8, pl.UInt16, pl.Int16, pl.UInt32, pl.Int64, pl.UInt64, pl.Int128])
def test_ids_of_any_integer_type_are_read(dtype):
    sequences = own([[3, 99], [0]], dtype=pl.List(dtype))
    assert sequences.items.tolist() == [3, 99, 0] and sequences.items.dtype == np.int32
    assert sequences.offsets.tolist() == [0, 2, 3]


def test_ids_from_2_to_the_31_are_read_in_a_vocabulary_that_large():
    sequences = own([[2**31, 5], [2**40]], sizes=(10, 2**41))
    assert sequences.items.tolist() == [2**31, 5, 2**40] and sequences.items.dtype == np.int64


def test_unbounded_features_take_hashes_into_dynamic_tables():
    items, users = [[-(2**63) + 1, 7], [2**63 - 1, 2**31]], [-5, 2**40]
    sequences = own(items, sizes=(8, 16), unbounded=["product", "user_id"], users=users)
    source = UserSequenceSource(sequences, "train", max_history_seqlen=5)
    assert source.spec.unbounded_features == {"product", "user_id"}
    assert source.spec.vocab_sizes == {"user_id": 8, "product": 16, "stars": 6}
    assert [source[user].items.tolist() for user in range(2)] == [row[:1] for row in items]
    assert [int(source[user].contextual["user_id"][0]) for user in range(2)] == users
    for batch in SequenceDataset(source, batch_size=2):
        check_ids(batch, source.spec)
    with pytest.raises(ValueError, match=r"unbounded_feature_names = \['stars'\]: expected some of"):
        own(items, unbounded=["stars"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": [[1], [2, None]]}, "row 1: feature 'product' has id null: expected 0 to 99"),
        ({"items": [[1], None]}, "row 1: column 'items' is null"),
        ({"items": [[1], []]}, "row 1: column 'items' is empty: expected at least one id"),
        ({"items": [[1], [2, 100]]}, "row 1: feature 'product' has id 100: expected 0 to 99$"),
        ({"items": [[2**31], [2]]}, "row 0: feature 'product' has id 2147483648: .* unbounded_feature_names"),
        ({"items": [[1, 2], [-7]]}, "row 1: feature 'product' has id -7: .* hashes and .* need unbounded_f"),
        ({"items": [[1], [2]], "users": [3, None]}, "row 1: column 'user_id' is null"),
        (
            {"items": [[1], [2]], "users": [3, -4]},
            "row 1: feature 'user_id' has id -4: expected 0 to 9; hash",
        ),
        (
            {"items": [[1], [2**64 - 1]], "dtype": pl.List(pl.UInt64), "unbounded": ["product"]},
            f"row 1: feature 'product' has id {2**64 - 1}: expected -{2**63 - 1} to {2**63 - 1}",
        ),
        ({"items": [[-(2**63)]], "unbounded": ["product"]}, f"row 0: feature 'product' has id -{2**63}: exp"),
    ],
)
def test_ids_that_are_refused_are_named_by_feature_and_row(options, message):
    with pytest.raises(ValueError, match=message):
        own(**options)


class Shop(UserDataset):
    """Purchases in a CSV file, of which the preprocessors know nothing."""

    def read(self, directory):
        events = pl.read_csv(directory / "events.csv").sort("user_id", "time")
        users = events.group_by("user_id", maintain_order=True).agg(items="product", actions="stars")
        vocab_sizes = {"user_id": 10, "product": 100, "stars": 6}
        meta = SequencesMeta("shop", ["user_id"], "product", "stars", vocab_sizes, 5, 3)
        return UserSequences.from_table(users, meta)


@pytest.fixture
def shop(tmp_path):
    register_dataset("shop")(Shop)
    yield tmp_path / "events.csv"
    DatasetFactory.unregister("shop")


def test_a_dataset_of_ones_own_is_found_by_its_name(shop):
    shop.write_text("user_id,time,product,stars\n7,3,30,5\n2,1,40,1\n7,1,10,2\n7,2,20,4\n")
    user_2, user_7 = samples(UserSequences.open(shop.parent, "shop"), "train")
    assert (user_2.items.tolist(), user_2.contextual["user_id"].tolist()) == ([40], [2])
    assert (user_7.items.tolist(), user_7.labels.tolist()) == ([10, 20], [1, 3])
    shop.write_text("user_id,time,product,stars\n7,3,100,5\n")
    with pytest.raises(ValueError, match="row 0: feature 'product' has id 100: expected 0 to 99"):
        UserSequences.open(shop.parent, "shop")
    with pytest.raises(ValueError, match="dataset 'shop' is already registered, as Shop"):
        register_dataset("shop")(type("Other", (Shop,), {}))


def test_an_unknown_dataset_is_an_error_that_lists_the_known(tmp_path):
    known = ["kuairand-1k", "kuairand-27k", "kuairand-pure", *sorted(MOVIELENS)]
    with pytest.raises(ValueError, match=re.escape(f"dataset = 'kuairand-2k': expected one of {known}")):
        UserSequences.open(tmp_path, "kuairand-2k")
