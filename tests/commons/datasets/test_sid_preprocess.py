import json
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets.item_sids import ItemSIDs
from commons.datasets.sid_batch import SIDDatasetSpec
from commons.datasets.sid_preprocess import PART_FILES, convert, main
from commons.datasets.sid_sequences import SIDSequenceSource
from tests.commons.datasets import conftest
from tests.commons.datasets.conftest import write_lines

REAL_DATA = Path(__file__).parents[4] / "shared/data/amazon-industrial-sid"
SPLIT = (80, 10, 10)
error_of = partial(conftest.error_of, main)
SCHEMA = {"user_id": pl.String, "sequence_data": pl.List(pl.Int64)}


def write(directory, rows):
    lines = [json.dumps({"user": user, "history": items[:-1], "next": items[-1]}) for user, items in rows]
    return write_lines(directory / "interactions.jsonl", lines)


def parts(directory):
    return [pl.read_parquet(directory / name) for name in PART_FILES]


def test_sorted_users_are_permuted_with_the_seed_and_divided_by_percentages(tmp_path):
    rows = [(f"u{user}", [user]) for user in range(20) for _ in range(1 + user % 3)]
    convert(write(tmp_path, rows), tmp_path, seed=1, split=(70, 20, 10))
    assert [part["user_id"].n_unique() for part in parts(tmp_path)] == [14, 4, 2]
    convert(write(tmp_path, [(user, [0]) for user in (10, 9, "b", "B", 1)]), tmp_path, 5, (40, 40, 20))
    expected = np.array(["1", "10", "9", "B", "b"])[np.random.default_rng(5).permutation(5)].tolist()
    found = [set(part["user_id"]) for part in parts(tmp_path)]
    assert found == [set(expected[:2]), set(expected[2:4]), set(expected[4:])]


USERS = st.integers(-2, 9) | st.sampled_from("abc")
HISTORIES = st.lists(st.integers(0, 2**63 - 1), min_size=1)


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(USERS, HISTORIES), min_size=1, max_size=15),
    seed=st.integers(0, 5),
    ends=st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted),
)
def test_every_row_is_in_one_part_and_every_user_too(rows, seed, ends, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    split = (ends[0], ends[1] - ends[0], 100 - ends[1])
    counts = convert(write(directory, rows), directory, seed, split)
    assert all(dict(part.schema) == SCHEMA for part in parts(directory))
    found = [part.rows() for part in parts(directory)]
    assert list(counts.values()) == [len(part) for part in found]
    users = [{user for user, _ in part} for part in found]
    assert sum(map(len, users)) == len(set().union(*users))
    in_order = [(str(user), items) for user, items in rows]
    for part, part_users in zip(found, users, strict=True):
        assert part == [row for row in in_order if row[0] in part_users]
    assert sum(counts.values()) == len(rows)


def line(**changes):
    return json.dumps({"user": "a", "history": [1], "next": 2} | changes)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"user": "a", "histo', "malformed JSON (Unterminated string"),
        ("", "malformed JSON (Expecting value"),
        pytest.param("[" * 100_000, "malformed JSON (", id="deep"),
        ("é", "malformed JSON ("),
        ("[1, 2]", "expected a JSON object, as in {"),
        ('{"user": "a", "next": 2}', "there is no 'history', expected an object as in {"),
        ('{"history": [], "next": 2}', "there is no 'user'"),
        ('{"user": "a", "history": []}', "there is no 'next'"),
        (line(user=None), "user = None: expected a string or an integer"),
        (line(user=1.5), "user = 1.5: expected a string or an integer"),
        (line(user=True), "user = True: expected a string or an integer"),
        (line(history=3), "history = 3: expected a list of item ids"),
        (line(history=None), "history = None: expected a list of item ids"),
        (line(history=[1, -1]), "item -1: expected an integer from 0"),
        (line(history=[1.0]), "item 1.0: expected an integer from 0"),
        (line(history=[True]), "item True: expected an integer from 0"),
        (line(history=["1"]), "item '1': expected an integer from 0"),
        (line(next=None), "item None: expected an integer from 0"),
        (line(next=False), "item False: expected an integer from 0"),
        (line(next=2**63), "item 9223372036854775808: expected an integer from 0 that int64 holds"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_written(text, message, tmp_path):
    path = write_lines(tmp_path / "interactions.jsonl", [line(), line(), text, line()])
    error = error_of("--interactions", path, "--out", tmp_path / "out")
    assert error.startswith(f"error: {path}, line 3: '{text[:20]}") and f": {message}" in error
    assert not (tmp_path / "out").exists()


def test_no_interactions_are_an_error(tmp_path):
    path = write_lines(tmp_path / "interactions.jsonl", [])
    assert error_of("--interactions", path, "--out", tmp_path) == f"error: {path} has no interactions"
    path.unlink()
    error = error_of("--interactions", path, "--out", tmp_path)
    assert "does not exist" in error and str(path) in error


@pytest.mark.parametrize(
    "seed, split, message",
    [
        (-1, SPLIT, "seed = -1: expected at least 0"),
        (0, (80, 10, 9), r"split = \(80, 10, 9\): expected three percentages from 0 that sum to 100"),
        (0, (110, -20, 10), r"split = \(110, -20, 10\): expected three percentages"),
        (0, (90, 10), r"split = \(90, 10\): expected three percentages"),
    ],
)
def test_arguments_are_checked(seed, split, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(write(tmp_path, [("a", [1])]), tmp_path, seed, split)


def test_the_command_line_says_what_it_wrote(tmp_path, capsys):
    path = write(tmp_path, [(user, [1, 2]) for user in range(10)])
    main(["--interactions", str(path), "--out", str(tmp_path)])
    rows = [f"{tmp_path / name}: {count} rows" for name, count in zip(PART_FILES, (8, 1, 1), strict=True)]
    assert capsys.readouterr().out.splitlines() == rows
    main(["--interactions", str(path), "--out", str(tmp_path), "--split", "0", "50", "50", "--seed", "3"])
    assert [len(part) for part in parts(tmp_path)] == [0, 5, 5]
    error = error_of("--interactions", path, "--out", tmp_path, "--split", 50, 50, 50)
    assert error.startswith("error: split = (50, 50, 50): expected three percentages")


@pytest.mark.parametrize("method, calls_before", [("write_parquet", 1), ("rename", 0), ("rename", 1)])
def test_an_interrupted_run_leaves_no_mix(method, calls_before, tmp_path, monkeypatch):
    convert(write(tmp_path, [("a", [1])]), tmp_path / "out", seed=0, split=SPLIT)
    before = [part.rows() for part in parts(tmp_path / "out")]
    owner = pl.DataFrame if method == "write_parquet" else Path
    original, calls = getattr(owner, method), []

    def interrupt(*arguments):
        if len(calls) == calls_before:
            raise InterruptedError
        calls.append(arguments)
        return original(*arguments)

    path = write(tmp_path, [("b", [2])])
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, interrupt)
        with pytest.raises(InterruptedError):
            convert(path, tmp_path / "out", seed=0, split=SPLIT)
    names = {entry.name for entry in (tmp_path / "out").iterdir()}
    if method == "write_parquet":
        assert [part.rows() for part in parts(tmp_path / "out")] == before
        assert names == set(PART_FILES)
    else:
        assert names == set(PART_FILES[:calls_before])
    convert(path, tmp_path / "out", seed=0, split=SPLIT)
    assert [row for part in parts(tmp_path / "out") for row in part.rows()] == [("b", [2])]


@pytest.mark.skipif(not REAL_DATA.exists(), reason=f"needs the real Amazon interactions at {REAL_DATA}")
def test_the_real_interactions(tmp_path):
    interactions = REAL_DATA / "interactions.jsonl"
    counts = convert(interactions, tmp_path / "a", seed=0, split=SPLIT)
    assert sum(counts.values()) == 4532
    users = [set(part["user_id"]) for part in parts(tmp_path / "a")]
    assert [len(part_users) for part_users in users] == [1608, 201, 202]
    assert len(set().union(*users)) == 2011
    sids = ItemSIDs.load(REAL_DATA / "item_to_sid.json", (256,) * 3)
    assert len(sids.items) == 3686
    for name, num_rows in counts.items():
        source = SIDSequenceSource(tmp_path / "a" / name, sids, SIDDatasetSpec((256,) * 3, 10))
        assert len(source) == num_rows
        assert {source[index].codes.shape[1] for index in range(num_rows)} == {3}
    assert convert(interactions, tmp_path / "b", seed=0, split=SPLIT) == counts
    for name in PART_FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    convert(interactions, tmp_path / "c", seed=1, split=SPLIT)
    assert set(parts(tmp_path / "c")[2]["user_id"]) != users[2]
