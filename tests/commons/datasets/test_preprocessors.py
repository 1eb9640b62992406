"""Preprocessors read what any raw format has: each event once, in order of time, with ids remapped alike."""

import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons import delimited
from commons.datasets import SIDSequenceSource
from commons.datasets.item_sids import ItemSIDs
from commons.datasets.kuairand import KUAIRAND, TASKS
from commons.datasets.sid_batch import SIDDatasetSpec
from commons.datasets.sid_preprocess import PART_FILES, convert, main
from tests.commons.datasets.kuairand_files import LOG_HEADER, LOGS_1K, USERS_HEADER, log_line, user_line
from tests.commons.datasets.raw_files import (
    FORMATS,
    GOLDEN,
    MOVIELENS,
    RATINGS_HEADER,
    RawFiles,
    splitmix,
    text_of,
    write_file,
)

SHARED = Path(__file__).parents[4] / "shared/data"
REAL_100K, REAL_SIDS = SHARED / "ml-100k", SHARED / "amazon-industrial-sid"
SPLIT = (80, 10, 10)
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


def in_order(events, name_of_user):
    """Returns each user's events, sorted by time and then by a hash of user and item."""
    histories = defaultdict(list)
    for user, item, action, time in events:
        tie = splitmix(splitmix(name_of_user(user) + GOLDEN) ^ item)
        histories[user].append((time, tie, item, action))
    return {
        user: [(item, action, time) for time, _, item, action in sorted(histories[user])]
        for user in sorted(histories)
    }


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
    raw = RawFiles(MOVIELENS, dataset, files, [])
    raw.write(tmp_path)
    found = {user: list(zip(*lists, strict=True)) for user, *lists in raw.read(tmp_path, tmp_path / "out")}
    assert found == in_order(events, lambda user: user)
    _, meta = raw.prepare(tmp_path, tmp_path / "out")
    assert (meta["dataset"], meta["num_classes"], meta["tie_order"]) == (dataset, 5 * per_star, TIE_ORDER)
    assert meta["positive_class"] == 4 * per_star - 1  # four stars
    sizes = {"user_id": 21, "movie_id": 31, "rating": 1 + 5 * per_star}
    assert sizes.items() <= meta["vocab_sizes"].items()


@pytest.mark.parametrize(("held_events", "longest"), [(1, None), (7, 5), (100, None), (10_000, 5)])
def test_every_video_is_kept_once_and_in_order(held_events, longest, tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 2000)
    events = drawn_events(18, 30, 40, 256)
    ids = {user: user**2 for user in range(20)}
    lines = [log_line(ids[user], 3 * item, time, action - 1) for user, item, action, time in events]
    logs = (lines[:150], lines[150:])
    files = {name: text_of(LOG_HEADER, *log) for name, log in zip(LOGS_1K, logs, strict=True)}
    files["user_features_1k.csv"] = text_of(USERS_HEADER, *map(user_line, ids.values()))
    RawFiles(print, "kuairand-1k", files, []).write(tmp_path)
    meta = KUAIRAND["kuairand-1k"]().prepare(tmp_path, tmp_path / "out", longest, held_events)
    table = pl.read_parquet(tmp_path / "out/sequences.parquet")
    tripled = [(user, 3 * item, action, time) for user, item, action, time in events]
    histories = in_order(tripled, lambda user: user)
    newest = {user: history[-(longest or 400) :] for user, history in histories.items()}
    videos = sorted({video for history in newest.values() for video, _, _ in history})
    expected = {
        1 + user: [(1 + videos.index(video), *rest) for video, *rest in history]
        for user, history in newest.items()
    }
    rows = table.select("user_id", "items", "actions", "timestamps").rows()
    assert {user: list(zip(*lists, strict=True)) for user, *lists in rows} == expected
    assert meta.vocab_sizes["video_id"] == 1 + len(videos)


@pytest.mark.parametrize(
    ("dataset", "version", "parts"),
    [("kuairand-pure", "pure", [""]), ("kuairand-27k", "27k", ["_part1", "_part2"])],
)
def test_logs_in_parts_are_read_in_order_and_each_task_has_its_bit(dataset, version, parts, tmp_path):
    columns, files = LOG_HEADER.split(","), {}
    for period in ("4_08_to_4_21", "4_22_to_5_08"):
        for part in parts:
            fields = log_line(3, len(files), 10).split(",")
            fields[columns.index(TASKS[len(files)])] = "1"
            name = f"data/log_standard_{period}_{version}{part}.csv"
            files[name] = text_of(LOG_HEADER, ",".join(fields), log_line(3, len(files), 20 + len(files)))
    files[f"data/log_random_4_22_to_5_08_{version}.csv"] = text_of(LOG_HEADER, log_line(3, 77, 10))
    files[f"data/user_features_{version}.csv"] = text_of(USERS_HEADER, user_line(3))
    raw = RawFiles(FORMATS["log"].main, dataset, files, [])
    raw.write(tmp_path)
    [(_, items, actions, times)] = raw.read(tmp_path, tmp_path / "out")
    num_logs = 2 * len(parts)
    assert items[num_logs:] == list(range(1, 1 + num_logs))
    assert times == [10] * num_logs + list(range(20, 20 + num_logs))
    tasks = dict(zip(items[:num_logs], actions[:num_logs], strict=True))
    assert tasks == {1 + bit: 1 + 2**bit for bit in range(num_logs)}


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
# Two users with events and one without.
DESCRIBED = {
    "u.user": (
        RawFiles(MOVIELENS, "ml-100k", FORMATS["u.data"].files, []),
        {
            "contextual_feature_names": list(USERS_100K),
            "item_feature_name": "movie_id",
            "action_feature_name": "rating",
            "vocab_sizes": dict(
                zip((*USERS_100K, "movie_id", "rating"), (8, 2, 3, 4, 4, 13, 6), strict=True)
            ),
            "num_classes": 5,
            "positive_class": 3,
        },
        [(3, 1, 2, 3, 2), (7, 1, 1, 1, 3)],
    ),
    "users": (
        RawFiles(
            FORMATS["log"].main,
            "kuairand-1k",
            FORMATS["log"].files | {"user_features_1k.csv": text_of(USERS_HEADER, *LINES_1K)},
            [],
        ),
        {
            "contextual_feature_names": list(USERS_1K),
            "item_feature_name": "video_id",
            "action_feature_name": "action",
            "vocab_sizes": dict(
                zip((*USERS_1K, "video_id", "action"), (4, 4, 4, 4, 3, 4, 3, 257), strict=True)
            ),
            "num_classes": 256,
            "positive_class": None,
            "num_tasks": 8,
        },
        [(1, 1, 3, 1, 2, 1), (3, 3, 2, 2, 2, 2)],
    ),
}


@pytest.mark.parametrize(("raw", "expected", "rows"), DESCRIBED.values(), ids=DESCRIBED)
def test_attributes_are_ids_in_the_order_of_their_values(raw, expected, rows, tmp_path):
    raw.write(tmp_path)
    table, meta = raw.prepare(tmp_path, tmp_path / "out")
    assert meta == {"dataset": raw.dataset, **expected, "tie_order": TIE_ORDER}
    assert table.select(expected["contextual_feature_names"]).rows() == rows
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(raw.outputs)


def write_interactions(directory, rows):
    lines = [json.dumps({"user": user, "history": items[:-1], "next": items[-1]}) for user, items in rows]
    return write_file(directory / "interactions.jsonl", text_of(*lines))


def parts(directory):
    return [pl.read_parquet(directory / name) for name in PART_FILES]


def test_sorted_users_are_permuted_with_the_seed_and_divided_by_percentages(tmp_path, capsys):
    rows = [(f"u{user}", [user]) for user in range(20) for _ in range(1 + user % 3)]
    path = write_interactions(tmp_path, rows)
    options = ["--split", "70", "20", "10", "--seed", "1"]
    main(["--interactions", str(path), "--out", str(tmp_path), *options])
    assert [part["user_id"].n_unique() for part in parts(tmp_path)] == [14, 4, 2]
    printed = capsys.readouterr().out
    assert all(
        f"{tmp_path / name}: {len(pl.read_parquet(tmp_path / name))}" in printed for name in PART_FILES
    )
    rows = [(user, [0]) for user in (10, 9, "b", "B", 1)]
    convert(write_interactions(tmp_path, rows), tmp_path, 5, (40, 40, 20))
    expected = np.array(["1", "10", "9", "B", "b"])[np.random.default_rng(5).permutation(5)].tolist()
    found = [set(part["user_id"]) for part in parts(tmp_path)]
    assert found == [set(expected[:2]), set(expected[2:4]), set(expected[4:])]


@settings(max_examples=20)  # each writes three files
@given(
    rows=st.lists(
        st.tuples(
            st.integers(-2, 9) | st.sampled_from("abc"), st.lists(st.integers(0, 2**63 - 1), min_size=1)
        ),
        min_size=1,
        max_size=15,
    ),
    seed=st.integers(0, 5),
    ends=st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted),
)
def test_every_interaction_is_in_one_part_and_every_user_too(rows, seed, ends, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    split = (ends[0], ends[1] - ends[0], 100 - ends[1])
    counts = convert(write_interactions(directory, rows), directory, seed, split)
    schema = {"user_id": pl.String, "sequence_data": pl.List(pl.Int64)}
    assert all(dict(part.schema) == schema for part in parts(directory))
    found = [part.rows() for part in parts(directory)]
    assert list(counts.values()) == [len(part) for part in found]
    users = [{user for user, _ in part} for part in found]
    assert sum(map(len, users)) == len(set().union(*users))
    in_file = [(str(user), items) for user, items in rows]
    for part, part_users in zip(found, users, strict=True):
        assert part == [row for row in in_file if row[0] in part_users]
    assert sum(counts.values()) == len(rows)


@pytest.mark.skipif(not REAL_SIDS.exists(), reason=f"needs the real Amazon interactions at {REAL_SIDS}")
def test_the_real_interactions(tmp_path):
    interactions = REAL_SIDS / "interactions.jsonl"
    counts = convert(interactions, tmp_path / "a", seed=0, split=SPLIT)
    assert sum(counts.values()) == 4532
    assert [part["user_id"].n_unique() for part in parts(tmp_path / "a")] == [1608, 201, 202]
    sids = ItemSIDs.load(REAL_SIDS / "item_to_sid.json", (256,) * 3)
    assert len(sids.items) == 3686
    for name, num_rows in counts.items():
        source = SIDSequenceSource(tmp_path / "a" / name, sids, SIDDatasetSpec((256,) * 3, 10))
        assert len(source) == num_rows
        assert {source[index].codes.shape[1] for index in range(num_rows)} == {3}
    assert convert(interactions, tmp_path / "b", seed=0, split=SPLIT) == counts
    for name in PART_FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.skipif(not REAL_100K.exists(), reason=f"needs the real MovieLens 100K at {REAL_100K}")
def test_the_real_ml_100k(tmp_path):
    table, meta = RawFiles(MOVIELENS, "ml-100k", {}, []).prepare(REAL_100K, tmp_path)
    assert len(table) == 943
    assert table["items"].list.len().sum() == 100_000
    assert [meta["vocab_sizes"][name] for name in ("movie_id", "user_id", "occupation")] == [1683, 944, 22]
    assert table["timestamps"].list.eval(pl.element().diff().min()).explode().min() >= 0
