import json
import re

import numpy as np
import polars as pl
import pytest
from hypothesis import given
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
from tests.commons.datasets.kuairand_files import write_kuairand_1k
from tests.commons.datasets.raw_files import KUAIRAND, MOVIELENS, RawFiles, text_of

USER_3, USER_7, LABELS_7 = [13, 11, 12, 14], [12, 11, *range(20, 28)], [0, 4, 0, 1, 2, 3, 4, 0]


@pytest.fixture
def prepared(tmp_path):
    """User 7 has ten ratings, 3 has four of which two are at the same time, 5 has one, and 9 has none."""
    ratings = [(3, 12, 4, 50), (3, 11, 3, 50), (5, 30, 2, 70), (3, 13, 2, 10), (3, 14, 1, 60)]
    ratings += [(7, item, 1 + i % 5, item) for i, item in enumerate(USER_7[2:])]
    lines = ["\t".join(map(str, rating)) for rating in (*ratings, (7, 11, 5, 10), (7, 12, 1, 9))]
    users = text_of("3|24|M|writer|85711", "5|53|F|other|94043", "7|24|F|artist|T8H1N", "9|30|M|other|10003")
    raw = RawFiles(MOVIELENS, "ml-100k", {"u.data": text_of(*lines), "u.user": users}, [])
    raw.write(tmp_path / "raw")
    raw.prepare(tmp_path / "raw", tmp_path / "ml-100k")
    return tmp_path / "ml-100k"


@pytest.fixture
def sequences(prepared):
    return UserSequences.open(prepared, "ml-100k")


def samples(sequences, split, **options):
    source = UserSequenceSource(sequences, split, **{"max_history_seqlen": 100, **options})
    return [source[i] for i in range(len(source))]


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
    evaluated = {
        int(i) for sample in evaluation for i in sample.items[len(sample.items) - len(sample.labels) :]
    }
    assert evaluated.isdisjoint(int(item) for sample in train for item in sample.items)
    for sample in train + evaluation:
        assert 1 <= len(sample.items) <= longest
        assert 0 <= sample.num_candidates <= max(0, min(candidates, len(sample.items) - 1))
        assert len(sample.labels) == sample.num_candidates if candidates else len(sample.labels) >= 1


def check_spec(source, large):
    """Checks that the spec describes the source's batches, and which tables are sharded."""
    spec = source.spec
    assert {table.table_name for table in spec.tables if table.sharding_type == "model_parallel"} == large
    for batch in SequenceDataset(source, batch_size=2):
        assert batch.features.keys() == spec.feature_names
        for name, most in spec.feature_to_max_seqlen.items():
            assert max(batch.features[name].lengths()) <= most
        check_ids(batch, spec)


def test_the_spec_of_ratings_describes_the_batches(sequences):
    source = UserSequenceSource(sequences, "train", max_history_seqlen=6)
    names = ["user_id", "age", "gender", "occupation", "zip_code", "movie_id", "rating"]
    assert source.spec.feature_names == names
    assert source.spec.feature_to_max_seqlen == dict(zip(names, [1] * 5 + [6] * 2, strict=True))
    assert (source.spec.num_classes, source.spec.num_tasks, source.spec.positive_class) == (5, 1, 3)
    check_spec(source, {"user_id", "movie_id"})


def test_labels_of_several_tasks_are_their_bits(tmp_path):
    write_kuairand_1k(tmp_path / "raw", num_events=600, num_users=12, num_videos=200)
    RawFiles(KUAIRAND, "kuairand-1k", {}, []).prepare(tmp_path / "raw", tmp_path)
    kuairand = UserSequences.open(tmp_path, "kuairand-1k")
    labels = set()
    for sample in samples(kuairand, "train", max_history_seqlen=20):
        assert (sample.labels == sample.actions - 1).all()
        labels |= set(sample.labels.tolist())
    assert labels <= set(range(256)) and len(labels) > 4
    evaluation = UserSequenceSource(kuairand, "eval", 20)
    spec = evaluation.spec
    assert (spec.num_tasks, spec.num_classes, spec.positive_class) == (8, 256, None)
    assert spec.vocab_sizes["action"] == 257
    check_spec(evaluation, {"user_id", "video_id"})


def test_unbounded_features_take_hashes_into_dynamic_tables():
    items, users = [[-(2**63) + 1, 7], [2**63 - 1, 2**31]], [-5, 2**40]
    table = pl.DataFrame({"user_id": users, "items": items, "actions": [[1, 1], [1, 1]]})
    unbounded = ["product", "user_id"]
    sizes = {"user_id": 8, "product": 16, "stars": 6}
    meta = SequencesMeta(
        "shop", ["user_id"], "product", "stars", sizes, 5, 3, unbounded_feature_names=unbounded
    )
    source = UserSequenceSource(UserSequences.from_table(table, meta), "train", max_history_seqlen=5)
    assert source.spec.unbounded_features == set(unbounded)
    assert source.spec.vocab_sizes == sizes
    assert [source[user].items.tolist() for user in range(2)] == [row[:1] for row in items]
    assert [int(source[user].contextual["user_id"][0]) for user in range(2)] == users
    check_spec(source, set(unbounded))


@pytest.mark.parametrize("absent", [["tie_order"], ["tie_order", "num_tasks", "unbounded_feature_names"]])
def test_folders_from_before_an_entry_existed_are_read(absent, prepared):
    path = prepared / "meta.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({name: entries[name] for name in entries if name not in absent}))
    sequences = UserSequences.open(prepared, "ml-100k")
    assert sequences.meta.tie_order is None
    sequences.meta.write(path)
    assert json.loads(path.read_text()).keys() == entries.keys() - {"tie_order"}


def meta(**changes):
    """Returns a function that changes entries of the metadata in a folder, without those that are None."""

    def change(directory):
        path = directory / "meta.json"
        entries = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: of for name, of in entries.items() if of is not None}))

    return change


def column(expression):
    """Returns a function that replaces a column of the table in a folder."""

    def change(directory):
        path = directory / "sequences.parquet"
        pl.read_parquet(path).with_columns(expression).write_parquet(path)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "meta.json").write_text("{"), "meta.json is malformed"),
        (lambda d: (d / "meta.json").write_text("[]"), "meta.json is malformed"),
        (meta(more=1), "meta.json is malformed: .*'more'"),
        (meta(dataset=None), "meta.json is malformed: .*'dataset'"),
        (meta(dataset="ml-1m"), "meta.json is malformed: .*'ml-1m'"),
        (meta(vocab_sizes={"age": 9}), r"meta.json is malformed: vocab_sizes has \['age'\]"),
        (meta(num_tasks=7), "num_tasks = 7: .*num_classes"),
        (lambda d: (d / "sequences.parquet").write_bytes(b"PAR1"), "sequences.parquet is malformed"),
        (
            lambda d: pl.DataFrame({"user_id": [1]}).write_parquet(d / "sequences.parquet"),
            "sequences.parquet is malformed",
        ),
        (column(pl.col("items").list.head(2)), "parquet is malformed: row 0: .* 2 items and 4 actions"),
        (column(pl.col("age") + 10), "parquet is malformed: row 0: feature 'age' has id 11"),
        (column(pl.col("actions").list.eval(pl.element() - 1)), "row 0: feature 'rating' has id 0: .*1 to 5"),
    ],
)
def test_a_malformed_file_is_named_with_the_command_that_prepares_it(damage, message, prepared):
    damage(prepared)
    with pytest.raises(ValueError, match=message) as raised:
        UserSequences.open(prepared, "ml-100k")
    assert f"movielens_preprocess --dataset ml-100k --out {prepared}" in str(raised.value)


@pytest.mark.parametrize("name", ["meta.json", "sequences.parquet"])
def test_a_missing_file_is_named_with_the_command_that_prepares_it(name, prepared):
    (prepared / name).unlink()
    for dataset, module in (("ml-100k", "movielens_preprocess"), ("kuairand-1k", "kuairand_preprocess")):
        error = f"{prepared / name} does not exist.*{module} --dataset {dataset} --out {prepared}"
        with pytest.raises(FileNotFoundError, match=error):
            UserSequences.open(prepared, dataset)


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
    with pytest.raises(ValueError, match="dataset 'shop' is already registered, as Shop"):
        register_dataset("shop")(type("Other", (Shop,), {}))
    with pytest.raises(ValueError, match=re.escape("dataset = 'shops': expected one of ['kuairand-1k'")):
        UserSequences.open(shop.parent, "shops")
