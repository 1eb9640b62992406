import json
import re

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import MovieLensSource, SequenceDataset, UserSequences, check_ids
from commons.datasets.movielens_preprocess import main
from commons.datasets.user_sequences import SequencesMeta


@pytest.fixture
def prepared(raw_100k, tmp_path):
    out = tmp_path / "ml-100k"
    main(["--dataset", "ml-100k", "--raw", str(raw_100k), "--out", str(out)])
    return out


@pytest.fixture
def sequences(prepared):
    return UserSequences.open(prepared, "ml-100k")


def samples(sequences, split, **options):
    source = MovieLensSource(sequences, split, **{"max_history_seqlen": 100, **options})
    return [source[i] for i in range(len(source))]


def labelled(sample):
    return list(zip(sample.items[len(sample.items) - len(sample.labels) :], sample.labels, strict=True))


def test_training_has_the_older_events_of_every_user(sequences):
    of_3, of_5, of_7 = samples(sequences, "train")
    assert of_3.items.tolist() == [13, 12, 11]
    assert of_3.actions.tolist() == [2, 4, 3]
    assert of_3.labels.tolist() == [1, 3, 2]
    assert of_5.items.tolist() == [30]  # a single event is for training
    assert of_7.items.tolist() == [12, 11, 20, 21, 22, 23, 24, 25]
    assert of_3.contextual["user_id"].tolist() == [3]
    assert of_3.contextual["occupation"].tolist() == [3]
    assert {s.num_candidates for s in (of_3, of_5, of_7)} == {0}


def test_evaluation_has_all_events_and_labels_the_newest(sequences):
    of_3, of_7 = samples(sequences, "eval")
    assert of_3.items.tolist() == [13, 12, 11, 14]
    assert labelled(of_3) == [(14, 0)]
    assert labelled(of_7) == [(26, 1), (27, 2)]
    assert of_7.num_candidates == 0


def test_candidates(sequences):
    of_3, of_5, _ = samples(sequences, "train", max_num_candidates=2)
    assert (of_3.num_candidates, labelled(of_3)) == (2, [(12, 3), (11, 2)])
    assert (of_5.num_candidates, labelled(of_5)) == (0, [])
    of_3, of_7 = samples(sequences, "eval", max_num_candidates=1)
    assert (of_3.num_candidates, labelled(of_3)) == (1, [(14, 0)])
    assert (of_7.num_candidates, labelled(of_7)) == (1, [(27, 2)])


def test_sequences_are_cut_to_their_newest_items_after_the_split(sequences):
    assert samples(sequences, "train", max_history_seqlen=2)[2].items.tolist() == [24, 25]
    of_7 = samples(sequences, "eval", max_history_seqlen=2, max_num_candidates=5)[1]
    assert (of_7.items.tolist(), of_7.num_candidates, labelled(of_7)) == ([26, 27], 1, [(27, 2)])
    assert labelled(samples(sequences, "eval", max_history_seqlen=1)[1]) == [(27, 2)]


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
    evaluated = {int(item) for sample in evaluation for item, _ in labelled(sample)}
    assert evaluated.isdisjoint(int(item) for sample in train for item in sample.items)
    for sample in train + evaluation:
        assert 1 <= len(sample.items) <= longest
        assert 0 <= sample.num_candidates <= max(0, min(candidates, len(sample.items) - 1))
        if candidates:
            assert len(sample.labels) == sample.num_candidates
        else:
            assert len(sample.labels) >= 1


def test_the_spec_describes_the_batches(sequences):
    source = MovieLensSource(sequences, "train", max_history_seqlen=6)
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


@pytest.mark.parametrize("name", ["meta.json", "sequences.parquet"])
def test_a_missing_file_is_named_with_the_command_that_prepares_it(name, prepared):
    (prepared / name).unlink()
    command = f"python -m commons.datasets.movielens_preprocess --dataset ml-100k --out {prepared}"
    with pytest.raises(FileNotFoundError, match=re.escape(f"{prepared / name} does not exist")) as raised:
        UserSequences.open(prepared, "ml-100k")
    assert command in str(raised.value)


def rewrite_meta(directory, **changes):
    path = directory / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_column(directory, column):
    path = directory / "sequences.parquet"
    pl.read_parquet(path).with_columns(column).write_parquet(path)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: (d / "meta.json").write_text("{"), "meta.json is malformed"),
        (lambda d: (d / "meta.json").write_text("[]"), "meta.json is malformed: expected the entries"),
        (lambda d: rewrite_meta(d, more=1), "meta.json is malformed: expected the entries"),
        (lambda d: rewrite_meta(d, vocab_sizes=None), "meta.json is malformed"),
        (lambda d: rewrite_meta(d, dataset="ml-1m"), "meta.json is malformed: it is of 'ml-1m'"),
        (
            lambda d: rewrite_meta(d, vocab_sizes={"age": 9}),
            r"meta.json is malformed: vocab_sizes has \['age'\]",
        ),
        (lambda d: (d / "sequences.parquet").write_bytes(b"PAR1"), "sequences.parquet is malformed"),
        (
            lambda d: pl.DataFrame({"user_id": [1]}).write_parquet(d / "sequences.parquet"),
            "sequences.parquet is malformed",
        ),
        (
            lambda d: rewrite_column(d, pl.col("items").list.head(2)),
            "sequences.parquet is malformed: a user has no items, or not one action per item",
        ),
        (lambda d: rewrite_column(d, pl.col("age") + 10), "malformed: feature 'age' has ids 11 to 13"),
        (lambda d: rewrite_column(d, pl.col("age") * None), "malformed: feature 'age' has ids nan"),
        (
            lambda d: rewrite_column(d, pl.col("items").list.eval(-pl.element())),
            "feature 'movie_id' has ids -30",
        ),
        (lambda d: rewrite_column(d, pl.col("actions").list.eval(pl.element() - 1)), "an action id is 0"),
        (lambda d: rewrite_column(d, pl.col("user_id").alias("items")), "sequences.parquet is malformed"),
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
        MovieLensSource(sequences, **{"split": "train", "max_history_seqlen": 5, **options})
