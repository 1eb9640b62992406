"""Preprocessors read what any raw format has: each event once, in order of time, with ids remapped alike."""

import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons import delimited
from commons.datasets import DatasetFactory
from tests.commons.datasets.kuairand_files import LOG_HEADER, LOGS_1K, USERS_HEADER, log_line, user_line
from tests.commons.datasets.raw_files import (
    FORMATS,
    GOLDEN,
    KUAIRAND,
    MOVIELENS,
    RATINGS_HEADER,
    RawFiles,
    splitmix,
    text_of,
    write_file,
)
from tests.few_examples import few_examples

REAL_100K = Path(__file__).parents[4] / "shared/data/ml-100k"
TIE_ORDER = "splitmix64 of user and item, version 1"


def drawn_events(num_users, num_items, longest_time, num_actions):
    """Returns 400 events in random order, many at the same time: user, item, action, time."""
    rng = random.Random(0)
    events = [
        (rng.randint(1, 1 + i % num_users), rng.randint(1, num_items), 1 + i % num_actions, i % longest_time)
        for i in range(400)
    ]
    rng.shuffle(events)
    return events


def in_order(events):
    """Returns each user's events, sorted by time and then by a hash of user and item."""
    histories = defaultdict(list)
    for user, item, action, time in events:
        tie = splitmix(splitmix(user + GOLDEN) ^ item)
        histories[user].append((time, tie, item, action))
    return {
        user: [(item, action, time) for time, _, item, action in sorted(history)]
        for user, history in histories.items()
    }


def events_in(table):
    """Returns each user's items, actions, and times in a table."""
    rows = table.select("user_id", "items", "actions", "timestamps").rows()
    return {user: list(zip(*lists, strict=True)) for user, *lists in rows}


RATINGS_IN = {
    "ml-100k": ("u.data", "\t", 1, {"u.user": [f"{user}|9|F|x|1" for user in range(1, 21)]}),
    "ml-1m": ("ratings.dat", "::", 1, {"users.dat": [f"{user}::F::9::2::1" for user in range(1, 21)]}),
    "ml-10m": ("ml-10M100K/ratings.dat", "::", 2, {}),
    **{name: ("ratings.csv", ",", 2, {}) for name in ("ml-20m", "ml-25m", "ml-32m", "ml-latest-small")},
}


@pytest.mark.parametrize("dataset", RATINGS_IN)
def test_every_rating_is_kept_once_and_in_order(dataset, tmp_path):
    name, separator, per_star, others = RATINGS_IN[dataset]
    events = drawn_events(20, 30, 40, 5 * per_star)
    lines = [separator.join(map(str, (u, i, rating / per_star, time))) for u, i, rating, time in events]
    header = [RATINGS_HEADER] if separator == "," else []
    files = {name: text_of(*header, *lines), **{other: text_of(*of) for other, of in others.items()}}
    raw = RawFiles(MOVIELENS, dataset, files)
    raw.write(tmp_path)
    table, meta = raw.prepare(tmp_path, tmp_path / "out")
    assert events_in(table) == in_order(events)
    assert (meta["dataset"], meta["num_classes"], meta["tie_order"]) == (dataset, 5 * per_star, TIE_ORDER)
    assert meta["positive_class"] == 4 * per_star - 1  # four stars
    sizes = {"user_id": 21, "movie_id": 31, "rating": 1 + 5 * per_star}
    assert sizes.items() <= meta["vocab_sizes"].items()


@pytest.mark.parametrize(("held_events", "longest"), [(1, None), (7, 5), (100, None), (10_000, 5)])
def test_every_video_is_kept_once_and_in_order(held_events, longest, tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 4000)
    events = drawn_events(18, 30, 40, 256)
    ids = {user: user**2 for user in range(20)}
    lines = [log_line(ids[user], 3 * item, time, action - 1) for user, item, action, time in events]
    logs = (lines[:150], lines[150:])
    files = {name: text_of(LOG_HEADER, *log) for name, log in zip(LOGS_1K, logs, strict=True)}
    files["user_features_1k.csv"] = text_of(USERS_HEADER, *map(user_line, ids.values()))
    RawFiles(KUAIRAND, "kuairand-1k", files).write(tmp_path)
    dataset = DatasetFactory.create("kuairand-1k")
    meta = dataset.prepare(tmp_path, tmp_path / "out", longest, held_events)
    histories = in_order([(user, 3 * item, action, time) for user, item, action, time in events])
    newest = {user: history[-(longest or 400) :] for user, history in histories.items()}
    videos = sorted({video for history in newest.values() for video, _, _ in history})
    expected = {
        1 + user: [(1 + videos.index(video), *rest) for video, *rest in history]
        for user, history in newest.items()
    }
    assert events_in(pl.read_parquet(tmp_path / "out/sequences.parquet")) == expected
    assert meta.vocab_sizes["video_id"] == 1 + len(videos)


@pytest.mark.parametrize(
    ("dataset", "version", "parts"),
    [("kuairand-pure", "pure", [""]), ("kuairand-27k", "27k", ["_part1", "_part2"])],
)
def test_standard_logs_are_read_in_all_their_parts(dataset, version, parts, tmp_path):
    periods = ("4_08_to_4_21", "4_22_to_5_08")
    logs = [f"data/log_standard_{period}_{version}{part}.csv" for period in periods for part in parts]
    files = {log: text_of(LOG_HEADER, log_line(3, number, number)) for number, log in enumerate(logs)}
    files[f"data/log_random_4_22_to_5_08_{version}.csv"] = text_of(LOG_HEADER, log_line(3, 77, 10))
    files[f"data/user_features_{version}.csv"] = text_of(USERS_HEADER, user_line(3))
    times = list(range(len(logs)))
    raw = RawFiles(KUAIRAND, dataset, files)
    raw.write(tmp_path)
    assert raw.read(tmp_path, tmp_path / "out") == [(1, [1 + t for t in times], [1] * len(logs), times)]


USERS_100K = ("user_id", "age", "gender", "occupation", "zip_code")
USERS_1K = (
    "user_id",
    "user_active_degree",
    *("follow_user_num_range", "fans_user_num_range", "friend_user_num_range", "register_days_range"),
)
LINES_1K = (
    user_line(9, "high_active", ("(10,50]", "0", "0", "730+")),
    user_line(0, "UNKNOWN", ("0", "(0,10]", "0", "61-90")),
    user_line(4, "full_active", ("(0,10]", "[10,100)", "", "91-180")),
)
# Of two users with events and one without: sizes of vocabularies, what labels are, and the users' attributes.
DESCRIBED = {
    "u.user": (
        RawFiles(MOVIELENS, "ml-100k", FORMATS["u.data"].files),
        dict(zip((*USERS_100K, "movie_id", "rating"), (8, 2, 3, 4, 4, 13, 6), strict=True)),
        {"num_classes": 5, "positive_class": 3},
        [(3, 1, 2, 3, 2), (7, 1, 1, 1, 3)],
    ),
    "users": (
        RawFiles(
            KUAIRAND,
            "kuairand-1k",
            FORMATS["log"].files | {"user_features_1k.csv": text_of(USERS_HEADER, *LINES_1K)},
        ),
        dict(zip((*USERS_1K, "video_id", "action"), (4, 4, 4, 4, 3, 4, 3, 257), strict=True)),
        {"num_classes": 256, "positive_class": None, "num_tasks": 8},
        [(1, 1, 3, 1, 2, 1), (3, 3, 2, 2, 2, 2)],
    ),
}


@pytest.mark.parametrize(("raw", "sizes", "labels", "rows"), DESCRIBED.values(), ids=DESCRIBED)
def test_attributes_are_ids_in_the_order_of_their_values(raw, sizes, labels, rows, tmp_path):
    raw.write(tmp_path)
    table, meta = raw.prepare(tmp_path, tmp_path / "out")
    *contextual, item, action = sizes
    names = {
        "contextual_feature_names": contextual,
        "item_feature_name": item,
        "action_feature_name": action,
    }
    assert meta == {"dataset": raw.dataset, **names, "vocab_sizes": sizes, **labels, "tie_order": TIE_ORDER}
    assert table.select(contextual).rows() == rows
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(raw.outputs)


@few_examples  # each writes three files
@given(
    interactions=st.lists(
        st.tuples(
            st.integers(-2, 9) | st.sampled_from("abB"), st.lists(st.integers(0, 2**63 - 1), min_size=1)
        ),
        min_size=1,
        max_size=15,
    ),
    seed=st.integers(0, 5),
    ends=st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted),
)
def test_sorted_users_are_permuted_with_the_seed_and_divided_by_percentages(
    interactions, seed, ends, tmp_path_factory
):
    folder, split = tmp_path_factory.mktemp("data"), (ends[0], ends[1] - ends[0], 100 - ends[1])
    lines = [{"user": user, "history": items[:-1], "next": items[-1]} for user, items in interactions]
    path = write_file(folder / "interactions.jsonl", text_of(*map(json.dumps, lines)))
    files = ["--interactions", str(path), "--out", str(folder)]
    raw = FORMATS["interactions"]
    raw.main([*files, "--seed", str(seed), "--split", *map(str, split)])
    users = np.array(sorted({str(user) for user, _ in interactions}))
    shuffled = users[np.random.default_rng(seed).permutation(len(users))]
    of_parts = np.split(shuffled, np.array(ends) * len(users) // 100)
    for name, part_users in zip(raw.outputs, of_parts, strict=True):
        part = pl.read_parquet(folder / name)
        assert dict(part.schema) == {"user_id": pl.String, "sequence_data": pl.List(pl.Int64)}
        assert part.rows() == [(str(user), items) for user, items in interactions if str(user) in part_users]


@pytest.mark.skipif(not REAL_100K.exists(), reason=f"needs the real MovieLens 100K at {REAL_100K}")
def test_the_real_ml_100k(tmp_path):
    table, meta = RawFiles(MOVIELENS, "ml-100k").prepare(REAL_100K, tmp_path)
    assert len(table) == 943
    assert table["items"].list.len().sum() == 100_000
    assert [meta["vocab_sizes"][name] for name in ("movie_id", "user_id", "occupation")] == [1683, 944, 22]
    assert table["timestamps"].list.eval(pl.element().diff().min()).explode().min() >= 0
