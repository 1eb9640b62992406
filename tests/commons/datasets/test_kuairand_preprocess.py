import itertools
import random
from collections import defaultdict
from functools import partial

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons import delimited
from commons.datasets import kuairand
from commons.datasets.kuairand import KUAIRAND, TASKS, KuaiRand
from commons.datasets.kuairand_preprocess import main
from tests.commons.datasets import conftest
from tests.commons.datasets.conftest import GOLDEN, splitmix
from tests.commons.datasets.kuairand_files import (
    LOG_HEADER,
    LOGS_1K,
    USERS_HEADER,
    log_line,
    user_line,
    write_csv,
)

FIRST, SECOND = LOGS_1K
USERS = "user_features_1k.csv"
ATTRIBUTES = [
    "user_active_degree",
    *(
        f"{number}_range"
        for number in ("follow_user_num", "fans_user_num", "friend_user_num", "register_days")
    ),
]
prepare = partial(conftest.prepare, main, "kuairand-1k")


@pytest.fixture
def raw(tmp_path):
    """Users 0, 4 and 9, of whom 4 has no events; the second log's are not all after the first's."""
    directory = tmp_path / "raw"
    events = [(9, 70, 50), (0, 5, 40, 0b1), (9, 5, 50, 0b10000001), (9, 900, 10)]
    write_csv(directory / FIRST, LOG_HEADER, [log_line(*event) for event in events])
    events = [(9, 33, 50, 255), (0, 70, 30, 0b1000000), (9, 5, 60)]
    write_csv(directory / SECOND, LOG_HEADER, [log_line(*event) for event in events])
    users = [
        user_line(9, "high_active", ("(10,50]", "0", "0", "730+")),
        user_line(0, "UNKNOWN", ("0", "(0,10]", "0", "61-90")),
        user_line(4, "full_active", ("(0,10]", "[10,100)", "", "91-180")),
    ]
    write_csv(directory / USERS, USERS_HEADER, users)
    return directory


def error_of(raw):
    error = conftest.error_of(main, "--dataset", "kuairand-1k", "--raw", raw, "--out", raw.parent / "out")
    assert list((raw.parent / "out").glob(".*")) == []
    return error


def test_kuairand_1k(raw, tmp_path):
    table, meta = prepare(raw, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["meta.json", "sequences.parquet"]
    assert table["user_id"].to_list() == [1, 3]
    # Videos 5, 33, 70 and 900 are 1 to 4; three events are at time 50.
    assert table["items"].to_list() == [[3, 1], [4, 3, 1, 2, 1]]
    assert table["actions"].to_list() == [[65, 2], [1, 1, 130, 256, 1]]
    assert table["timestamps"].to_list() == [[30, 40], [10, 50, 50, 50, 60]]
    # Attributes are ids in the order of their values.
    assert table.select(ATTRIBUTES).rows() == [(1, 3, 1, 2, 1), (3, 2, 2, 2, 2)]
    names = ["user_id", *ATTRIBUTES, "video_id", "action"]
    assert meta == {
        "dataset": "kuairand-1k",
        "contextual_feature_names": names[:-2],
        "item_feature_name": "video_id",
        "action_feature_name": "action",
        "vocab_sizes": dict(zip(names, (4, 4, 4, 4, 3, 4, 5, 257), strict=True)),
        "num_classes": 256,
        "positive_class": None,
        "num_tasks": 8,
        "tie_order": "splitmix64 of user and item, version 1",
    }


def test_each_task_has_its_bit(raw, tmp_path):
    columns = LOG_HEADER.split(",")
    lines = []
    for bit, task in enumerate(TASKS):
        line = log_line(0, 5, 40 + bit).split(",")
        line[columns.index(task)] = "1"
        lines.append(",".join(line))
    write_csv(raw / FIRST, LOG_HEADER, lines)
    write_csv(raw / SECOND, LOG_HEADER, [])
    assert prepare(raw, tmp_path / "out")[0]["actions"].to_list() == [[1 + 2**bit for bit in range(8)]]


@pytest.mark.parametrize(
    ("dataset", "version", "parts"),
    [("kuairand-pure", "pure", [""]), ("kuairand-27k", "27k", ["_part1", "_part2"])],
)
def test_logs_in_parts_are_read_in_order(dataset, version, parts, tmp_path):
    data = tmp_path / "KuaiRand/data"  # an unpacked archive
    videos = iter(range(10))
    for period in ("4_08_to_4_21", "4_22_to_5_08"):
        for part in parts:
            video = next(videos)
            line = log_line(3, video, 10 + video)
            write_csv(data / f"log_standard_{period}_{version}{part}.csv", LOG_HEADER, [line])
    write_csv(data / f"log_random_4_22_to_5_08_{version}.csv", LOG_HEADER, [log_line(3, 77, 10)])
    write_csv(data / f"user_features_{version}.csv", USERS_HEADER, [user_line(3)])
    table, meta = conftest.prepare(main, dataset, data.parent, tmp_path / "out")
    assert table["items"].to_list() == [list(range(1, 1 + 2 * len(parts)))]
    assert meta["dataset"] == dataset


def test_only_the_newest_events_are_kept_if_asked(raw, tmp_path):
    table, meta = prepare(raw, tmp_path / "out", "--max-history-seqlen", "2")
    assert table["timestamps"].to_list() == [[30, 40], [50, 60]]
    assert table["items"].to_list() == [[3, 1], [2, 1]]  # videos 5, 33 and 70; 900 is in no history
    assert meta["vocab_sizes"]["video_id"] == 4
    with pytest.raises(SystemExit, match="max_history_seqlen = 0: expected at least 1"):
        prepare(raw, tmp_path / "out", "--max-history-seqlen", "0")


def in_order(user, video, time, action):
    return time, splitmix(splitmix(user + GOLDEN) ^ video), video, action


@pytest.mark.parametrize(("held_events", "longest"), [(1, None), (7, 5), (100, None), (10_000, 5)])
def test_every_event_is_kept_once_and_in_order(held_events, longest, raw, tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 2000)
    rng, users, histories = random.Random(0), [user**2 for user in range(20)], defaultdict(list)
    lines = []
    for i in range(400):
        event = rng.choice(users[: 2 + i % 18]), rng.randrange(40) * 10**9, rng.randrange(30), i % 256
        lines.append(log_line(*event))
        histories[event[0]].append((*event[1:3], event[3] + 1))
    write_csv(raw / FIRST, LOG_HEADER, lines[:150])
    write_csv(raw / SECOND, LOG_HEADER, lines[150:])
    write_csv(raw / USERS, USERS_HEADER, [user_line(user) for user in users])
    KUAIRAND["kuairand-1k"]().prepare(raw, tmp_path / "out", longest, held_events)
    table = pl.read_parquet(tmp_path / "out/sequences.parquet")
    newest = [
        sorted(histories[user], key=lambda event: in_order(users.index(user), *event))[-(longest or 400) :]
        for user in sorted(histories)
    ]
    videos = sorted({video for history in newest for video, _, _ in history})
    rows = (zip(*row, strict=True) for row in table.select("items", "timestamps", "actions").rows())
    assert [[(videos[item - 1], *rest) for item, *rest in events] for events in rows] == newest
    assert table["user_id"].to_list() == sorted(1 + users.index(user) for user in histories)


@given(num_events=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), held=st.integers(1, 12))
def test_users_are_sorted_in_ranges_within_the_limit(num_events, held):
    ranges = [range(first, last + 1) for first, last in kuairand._user_ranges(np.array(num_events), held)]
    covered = [user for users in ranges for user in users]
    assert covered == sorted(set(covered))
    assert {user for user, count in enumerate(num_events) if count} <= set(covered)
    for users in ranges:
        counts = [num_events[user] for user in users if num_events[user]]
        assert sum(counts) <= held or len(counts) == 1


GOOD = log_line(0, 5, 40)


def changed(column, value):
    fields = GOOD.split(",")
    fields[LOG_HEADER.split(",").index(column)] = value
    return ",".join(fields)


MALFORMED = [
    *("", GOOD.rpartition(",")[0], GOOD.partition(",")[2], GOOD + ",1", GOOD + ",", GOOD[: len(GOOD) // 2]),
    *("0,5,2022", "#" + GOOD, "'0'" + GOOD[1:]),
    *(changed("user_id", value) for value in ("x", "-1")),
    *(changed("video_id", value) for value in ("5.5", "", "9" * 30, '"5""')),
    *(changed(flag, value) for flag, value in (("is_click", "2"), ("is_hate", "-1"), ("is_follow", "é"))),
    *(changed("is_profile_enter", "true"), changed("time_ms", "today")),
]


@pytest.mark.parametrize(("line", "number"), list(zip(MALFORMED, itertools.cycle([2, 9, 31]))))
def test_a_malformed_event_is_named_by_file_and_line(line, number, raw, tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 700)  # ten lines
    lines = [GOOD] * 40
    lines[number - 2] = line
    write_csv(raw / SECOND, LOG_HEADER, lines)
    error = error_of(raw)
    assert f"{raw / SECOND}, line {number}: {line!r}: " in error
    assert "expected " in error


def test_windows_line_ends_and_unused_columns_that_are_empty_or_fractions(raw, tmp_path):
    lines = [changed("play_time_ms", ""), changed("duration_ms", "15000.0"), log_line(0, 6, 20)]
    (raw / FIRST).write_text("\r\n".join([LOG_HEADER, *lines]))  # the last line has no end
    (raw / SECOND).write_text(f"{LOG_HEADER}\r\n")
    assert prepare(raw, tmp_path / "out")[0]["timestamps"].to_list() == [[20, 40, 40]]


def test_a_log_without_a_column_is_an_error(raw, tmp_path):
    write_csv(raw / FIRST, LOG_HEADER.replace(",is_profile_enter", ""), [])
    assert "no column 'is_profile_enter', expected a header with the columns 'user_id'" in error_of(raw)


USER = user_line(0)


@pytest.mark.parametrize(
    "line",
    [
        *("", USER + ",9", USER.rpartition(",")[0], user_line(9), "x" + USER, "-" + user_line(3)),
        USER.replace(",0,", ',"0,', 1),
    ],
)
def test_a_malformed_user_is_named_by_file_and_line(line, raw, tmp_path):
    write_csv(raw / USERS, USERS_HEADER, [user_line(9), line, user_line(1)])
    error = error_of(raw)
    found = f"{line!r}: " if line != user_line(9) else "user 9 has a line above, expected one line per user"
    assert f"{raw / USERS}, line 3: {found}" in error


def test_no_users_no_events_and_events_of_unknown_users_are_errors(raw, tmp_path):
    write_csv(raw / USERS, USERS_HEADER.replace("fans_user_num_range", "fans"), [user_line(9)])
    assert "no column 'fans_user_num_range', expected a header with the columns" in error_of(raw)
    write_csv(raw / USERS, USERS_HEADER, [])
    assert f"{raw / USERS} has no lines after its header" in error_of(raw)
    write_csv(raw / USERS, USERS_HEADER, [user_line(9)])
    error = error_of(raw)
    assert f"{raw / FIRST}, line 3: '0,5," in error and f": {raw / USERS} does not have user 0" in error
    for name in LOGS_1K:
        write_csv(raw / name, LOG_HEADER, [])
    assert "there are no events" in error_of(raw)


def test_absent_files_are_named_with_where_they_come_from(raw, tmp_path):
    (raw / SECOND).unlink()
    (raw / USERS).unlink()
    error = error_of(raw)
    assert f"error: {raw} does not have {SECOND}, {USERS}; put the official archive's files" in error
    assert "https://kuairand.com" in error


def test_an_interrupted_run_leaves_nothing_that_opens(raw, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(KuaiRand, "_meta", interrupt)
        prepare(raw, out)
    assert list(out.iterdir()) == []
    (out / ".unfinished").mkdir()  # of a run that was killed
    (out / ".unfinished/run-000007.parquet").write_bytes(b"")
    prepare(raw, out)
    assert sorted(path.name for path in out.iterdir()) == ["meta.json", "sequences.parquet"]
