import json
import re
from dataclasses import replace

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
from tests.commons.datasets.raw_files import FORMATS

SIZES = {"user_id": 10, "age": 4, "product": 150, "stars": 6}
META = SequencesMeta("shop", ["user_id", "age"], "product", "stars", SIZES, num_classes=5, positive_class=3)
# By id, a user's items and actions, oldest first.
USERS = {
    3: ([13, 11, 12, 14], [2, 3, 4, 1]),
    5: ([30], [2]),
    7: ([12, 11, *range(20, 28)], [1, 5, 1, 2, 3, 4, 5, 1, 2, 3]),
}
USER_3, USER_7, LABELS_7 = USERS[3][0], USERS[7][0], [0, 4, 0, 1, 2, 3, 4, 0]


def sequences_of(users, meta=META):
    items, actions = zip(*users.values(), strict=True)
    return UserSequences.from_table(
        pl.DataFrame({"user_id": list(users), "age": [2] * len(users), "items": items, "actions": actions}),
        meta,
    )


def samples(users, split, **options):
    source = UserSequenceSource(sequences_of(users), split, **options)
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
def test_events_are_split_by_time_and_then_cut_to_the_newest(split, longest, candidates, expected):
    found = samples(USERS, split, max_history_seqlen=longest, max_num_candidates=candidates)
    assert [(one.items.tolist(), one.labels.tolist(), one.num_candidates) for one in found] == expected
    assert all((one.actions[len(one.items) - len(one.labels) :] == one.labels + 1).all() for one in found)
    assert {name: ids.tolist() for name, ids in found[0].contextual.items()} == {"user_id": [3], "age": [2]}


def test_a_user_in_two_rows_is_refused():
    table = pl.DataFrame(
        {"user_id": [3, 5, 3], "age": [2] * 3, "items": [[1], [2], [3]], "actions": [[1]] * 3}
    )
    with pytest.raises(ValueError, match="row 2: user_id 3 is in an earlier row, too"):
        UserSequences.from_table(table, META)
    shared = replace(META, vocab_sizes={**SIZES, "user_id": 2})  # of hashes
    assert (
        len(UserSequences.from_table(table.with_columns(user_id=pl.Series([1, 0, 1])), shared).offsets) == 4
    )
    without = replace(META, contextual_feature_names=["age"], vocab_sizes=dict([*SIZES.items()][1:]))
    assert (
        len(UserSequences.from_table(table.with_columns(user_id=pl.Series([None] * 3)), without).offsets) == 4
    )


@given(
    num_events=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    longest=st.integers(1, 40),
    candidates=st.integers(0, 5),
    fraction=st.floats(0.01, 0.99),
)
def test_no_label_of_an_evaluation_is_in_training(num_events, longest, candidates, fraction):
    options = {"max_history_seqlen": longest, "max_num_candidates": candidates, "eval_fraction": fraction}
    users = {user: (range(30 * user, 30 * user + n), [1] * n) for user, n in enumerate(num_events)}
    train, evaluation = (samples(users, split, **options) for split in ("train", "eval"))
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


@given(num_events=st.lists(st.integers(1, 30), min_size=1, max_size=5), longest=st.integers(2, 40))
def test_of_two_items_one_validates_and_the_last_one_tests(num_events, longest):
    users = {user: (range(30 * user, 30 * user + n), [1] * n) for user, n in enumerate(num_events)}
    options = {"max_history_seqlen": longest, "num_held_out": 2}
    train, validation, test = (samples(users, split, **options) for split in ("train", "validation", "eval"))
    assert len(train) == len(num_events)
    assert [int(one.items[-1]) % 30 + 1 for one in train] == [max(n - 2, 1) for n in num_events]
    assert [int(one.items[-1]) % 30 + 1 for one in validation] == [n - 1 for n in num_events if n > 2]
    assert [int(one.items[-1]) % 30 + 1 for one in test] == [n for n in num_events if n > 1]
    assert all(len(one.labels) == 1 for one in validation)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(2, 8), st.booleans())
def test_windows_cover_the_history_and_label_each_item_once(num_events, longest, overlap):
    users = {user: ([*range(n)], [1] * n) for user, n in enumerate(num_events)}
    meta = replace(META, vocab_sizes={**SIZES, "user_id": 10})
    source = UserSequenceSource(
        sequences_of(users, meta), "train", longest, num_held_out=1, window_step=longest - overlap
    )
    labeled = {user: [] for user in users}
    for sample in (source[index] for index in range(len(source))):
        assert len(sample.items) <= longest
        assert sample.items.tolist() == [*range(sample.items[0], sample.items[-1] + 1)]
        labeled[int(sample.contextual["user_id"][0])] += sample.items[int(overlap) :].tolist()
    for user, n in enumerate(num_events):
        assert sorted(labeled[user]) == [*range(int(overlap), max(n - 1, 1))]


HASHES = {-5: ([-(2**63) + 1, 7], [1, 1]), 2**40: ([2**63 - 1, 2**31], [1, 1])}
UNBOUNDED = replace(META, unbounded_feature_names=["product", "user_id"])
TASKS = replace(META, num_classes=32, positive_class=None, num_tasks=5)


@pytest.mark.parametrize(("users", "meta"), [(USERS, META), (HASHES, UNBOUNDED), (USERS, TASKS)])
def test_the_spec_describes_the_batches(users, meta):
    source = UserSequenceSource(sequences_of(users, meta), "train", max_history_seqlen=6)
    spec, (user, (items, _)) = source.spec, next(iter(users.items()))
    assert spec.feature_names == list(SIZES) and spec.vocab_sizes == SIZES
    assert spec.feature_to_max_seqlen == {"user_id": 1, "age": 1, "product": 6, "stars": 6}
    labels = (meta.num_classes, meta.num_tasks, meta.positive_class)
    assert (spec.num_classes, spec.num_tasks, spec.positive_class) == labels
    sharded = {table.table_name for table in spec.tables if table.sharding_type == "model_parallel"}
    assert sharded == {"user_id", "product"}
    assert spec.unbounded_features == set(meta.unbounded_feature_names)
    for batch in SequenceDataset(source, batch_size=2):
        assert batch.features.keys() == spec.feature_names
        check_ids(batch, spec)
    first = source[0]
    assert first.items.tolist() == items[:-1] and first.contextual["user_id"].tolist() == [user]


@pytest.fixture
def prepared(tmp_path):
    raw = FORMATS["u.data"]
    raw.write(tmp_path / "raw")
    raw.prepare(tmp_path / "raw", tmp_path / "ml-100k")
    return tmp_path / "ml-100k"


def test_folders_from_before_an_entry_existed_are_read(prepared):
    path = prepared / "meta.json"
    entries = json.loads(path.read_text())
    absent = {"tie_order", "num_tasks", "unbounded_feature_names"}
    path.write_text(json.dumps({name: entries[name] for name in entries.keys() - absent}))
    sequences = UserSequences.open(prepared, "ml-100k")
    assert sequences.meta.tie_order is None
    sequences.meta.write(path)
    assert json.loads(path.read_text()).keys() == entries.keys() - {"tie_order"}


def test_a_malformed_or_missing_file_is_named_with_the_command_that_prepares_it(prepared):
    meta, sequences = prepared / "meta.json", prepared / "sequences.parquet"
    entries, table = json.loads(meta.read_text()), pl.read_parquet(sequences)
    one_item = table.with_columns(pl.col("items").list.head(1))
    classes = table.with_columns(pl.col("actions").list.eval(pl.element() - 1))
    for other_entries, other_table, message in (
        ([], table, "meta.json is malformed"),
        (entries | {"more": 1}, table, "meta.json is malformed: .*'more'"),
        (entries | {"dataset": "ml-1m"}, table, "meta.json is malformed: .*'ml-1m'"),
        (entries | {"num_tasks": 7}, table, "num_tasks = 7: .*num_classes"),
        (entries, table.select("user_id"), "sequences.parquet is malformed"),
        (entries, one_item, "parquet is malformed: row 1: .* 1 items and 2 actions"),
        (entries, table.with_columns(pl.col("age") + 10), "row 0: feature 'age' has id 11"),
        (entries, classes, "row 1: feature 'rating' has id 0: expected 1 to 5"),
    ):
        meta.write_text(json.dumps(other_entries))
        other_table.write_parquet(sequences)
        with pytest.raises(ValueError, match=message) as raised:
            UserSequences.open(prepared, "ml-100k")
        assert f"movielens_preprocess --dataset ml-100k --out {prepared}" in str(raised.value)
    sequences.unlink()
    for dataset, module in (("ml-100k", "movielens_preprocess"), ("kuairand-1k", "kuairand_preprocess")):
        error = f"{sequences} does not exist.*{module} --dataset {dataset} --out {prepared}"
        with pytest.raises(FileNotFoundError, match=error):
            meta.write_text(json.dumps(entries | {"dataset": dataset}))
            UserSequences.open(prepared, dataset)


class Shop(UserDataset):
    """A dataset of which the preprocessors know nothing."""

    def read(self, directory):
        return sequences_of(USERS)


def test_a_dataset_of_ones_own_is_found_by_its_name(tmp_path):
    register_dataset("shop")(Shop)
    assert UserSequences.open(tmp_path, "shop").meta == META
    DatasetFactory.unregister("shop")
    with pytest.raises(ValueError, match=re.escape("dataset = 'shop': expected one of ['kuairand-1k'")):
        UserSequences.open(tmp_path, "shop")
