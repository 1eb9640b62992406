import random
import urllib.error
import zipfile
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from commons.datasets import movielens
from commons.datasets.movielens_preprocess import main
from tests.commons.datasets import conftest
from tests.commons.datasets.conftest import GOLDEN, USERS_100K, splitmix, write_lines

REAL_100K = Path(__file__).parents[4] / "shared/data/ml-100k"


prepare = partial(conftest.prepare, main)


def error_of(dataset, raw, out):
    return conftest.error_of(main, "--dataset", dataset, "--raw", raw, "--out", out)


def test_ml_100k(raw_100k, tmp_path):
    table, meta = prepare("ml-100k", raw_100k, tmp_path)
    assert {name: column.to_list() for name, column in table.to_dict().items() if name != "timestamps"} == {
        "user_id": [3, 5, 7],
        "items": [[13, 11, 12, 14], [30], [12, 11, *range(20, 28)]],  # 11 and 12: equal time
        "actions": [[2, 3, 4, 1], [2], [1, 5, *(1 + i % 5 for i in range(8))]],
        "age": [1, 3, 1],
        "gender": [2, 1, 1],
        "occupation": [3, 2, 1],
        "zip_code": [2, 3, 4],
    }
    assert table["timestamps"].to_list()[:2] == [[10, 50, 50, 60], [70]]
    names = ["user_id", "age", "gender", "occupation", "zip_code", "movie_id", "rating"]
    assert meta == {
        "dataset": "ml-100k",
        "contextual_feature_names": names[:-2],
        "item_feature_name": "movie_id",
        "action_feature_name": "rating",
        "vocab_sizes": dict(zip(names, (8, 4, 3, 4, 5, 31, 6), strict=True)),
        "num_classes": 5,
        "positive_class": 3,
        "tie_order": "splitmix64 of user and item, version 1",
    }


def test_ties_are_ordered_by_user_and_item_whatever_the_order_of_the_file(tmp_path):
    lines = [f"{user}\t{item}\t{1 + item % 5}\t{item // 20}" for user in (3, 7) for item in range(1, 101)]
    write_lines(tmp_path / "raw/u.user", USERS_100K)
    tables = []
    for seed in range(3):
        write_lines(tmp_path / "raw/u.data", random.Random(seed).sample(lines, len(lines)))
        tables.append(prepare("ml-100k", tmp_path / "raw", tmp_path)[0])
    assert tables[0].equals(tables[1]) and tables[0].equals(tables[2])
    for user, items, times in tables[0].select("user_id", "items", "timestamps").rows():
        assert items == sorted(
            range(1, 101), key=lambda item: (item // 20, splitmix(splitmix(user + GOLDEN) ^ item))
        )
        assert times == [item // 20 for item in items]
    first, second = tables[0]["items"].to_list()
    assert first != second  # no order of items that all users share


def test_ml_1m(tmp_path):
    write_lines(tmp_path / "raw/ratings.dat", ["2::1193::5::978300760", "1::661::3::978302109"])
    write_lines(tmp_path / "raw/users.dat", ["1::F::1::10::48067", "2::M::56::16::70072-1023"])
    table, meta = prepare("ml-1m", tmp_path / "raw", tmp_path)
    assert table["user_id"].to_list() == [1, 2]
    assert table.select("items", "actions").rows() == [([661], [3]), ([1193], [5])]
    assert table["gender"].to_list() == table["age"].to_list() == [1, 2]
    assert meta["contextual_feature_names"] == ["user_id", "age", "gender", "occupation", "zip_code"]
    assert meta["vocab_sizes"]["movie_id"] == 1194


def test_ml_20m(tmp_path):
    lines = ["userId,movieId,rating,timestamp", "1,2,3.5,1112486027", "1,29,0.5,1112484676", "4,2,5.0,7"]
    write_lines(tmp_path / "raw/ratings.csv", lines)
    table, meta = prepare("ml-20m", tmp_path / "raw", tmp_path)
    assert table.select("items", "actions").rows() == [([29, 2], [1, 7]), ([2], [10])]
    assert meta["contextual_feature_names"] == ["user_id"]
    assert meta["vocab_sizes"] == {"user_id": 5, "movie_id": 30, "rating": 11}
    assert (meta["num_classes"], meta["positive_class"]) == (10, 7)


RATINGS = (
    "1|2|3",
    "1|2|3|4|5",
    "x|2|3|4",
    "0|2|3|4",
    "1|-2|3|4",
    "1|2|6|4",
    "1|2|0|4",
    "1|2|3.5|4",
    "1|2|nan|4",
)
AGAIN = "5|53|F|x|1"
MALFORMED = {
    "u.data": [*(rating.replace("|", "\t") for rating in (*RATINGS, "1|2|3|", "1|2|é|4")), "1|2|3|4"],
    "u.user": ["3|24|M|writer", "3|24|M|writer|85711|9", "3|old|M|writer|1", "3|24||writer|1", AGAIN],
}


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in MALFORMED.items() for line in lines]
)
def test_a_malformed_line_is_named_by_file_and_number(name, line, raw_100k, tmp_path):
    lines = (raw_100k / name).read_text().splitlines()
    write_lines(raw_100k / name, [*lines, line])
    error = error_of("ml-100k", raw_100k, tmp_path)
    found = f"{line!r}: " if line != AGAIN else "user 5 has a line above, "
    assert f"{raw_100k / name}, line {len(lines) + 1}: {found}" in error
    assert "expected " in error.partition(found)[2] or line == AGAIN


def test_headers_count_as_lines_and_files_must_have_ratings_of_known_users(raw_100k, tmp_path):
    lines = ["userId,movieId,rating,timestamp", "1,2,3.5,9", "1,2,3.2,9"]
    path = write_lines(tmp_path / "ratings.csv", lines)
    assert f"{path}, line 3: '1,2,3.2,9'" in error_of("ml-20m", tmp_path, tmp_path)
    write_lines(path, lines[1:])
    assert f"{path}, line 1: '1,2,3.5,9': no column 'userId', expected" in error_of(
        "ml-20m", tmp_path, tmp_path
    )
    write_lines(raw_100k / "u.user", ["3|24|M|writer|85711"])
    assert "u.data has user 5" in error_of("ml-100k", raw_100k, tmp_path)
    write_lines(raw_100k / "u.data", [])
    assert "u.data has no lines" in error_of("ml-100k", raw_100k, tmp_path)


def write_archive(path, raw, compression=zipfile.ZIP_STORED):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in ("u.data", "u.user"):
            archive.write(raw / name, f"ml-100k/{name}")


def test_absent_files_are_downloaded_and_unpacked(raw_100k, tmp_path, monkeypatch):
    write_archive(tmp_path / "server/ml-100k.zip", raw_100k)
    monkeypatch.setattr(movielens, "ARCHIVES_URL", (tmp_path / "server").as_uri())
    table, _ = prepare("ml-100k", tmp_path / "fresh/raw", tmp_path / "fresh")
    assert len(table) == 3
    names = sorted(path.name for path in (tmp_path / "fresh/raw").iterdir())
    assert names == ["ml-100k.zip", "u.data", "u.user"]


@pytest.mark.parametrize("own", ["u.data", "u.user"])
def test_a_users_own_file_is_kept_beside_the_archive(own, raw_100k, tmp_path):
    raw = tmp_path / "own"
    write_archive(raw / "ml-100k.zip", raw_100k)
    text = (raw_100k / own).read_text().splitlines()
    mine = [*text[1:], text[0]]  # as long, in another order
    write_lines(raw / own, mine)
    prepare("ml-100k", raw, tmp_path / "out")
    assert (raw / own).read_text().splitlines() == mine
    assert all((raw / name).exists() for name in ("u.data", "u.user"))


def refuse(*_, **__):
    raise urllib.error.URLError("no route to host")


def test_a_failed_download_says_what_to_put_where_and_then_it_is_used(raw_100k, tmp_path, monkeypatch):
    monkeypatch.setattr(movielens.urllib.request, "urlopen", refuse)
    raw = tmp_path / "fresh/raw"
    error = error_of("ml-100k", raw, tmp_path)
    assert "could not download https://files.grouplens.org/datasets/movielens/ml-100k.zip" in error
    assert "no route to host" in error
    assert f"put it at {raw / 'ml-100k.zip'}" in error
    assert list(raw.iterdir()) == []
    write_archive(raw / "ml-100k.zip", raw_100k)
    assert len(prepare("ml-100k", raw, tmp_path)[0]) == 3


def test_a_damaged_archive_is_an_error_and_leaves_no_file(raw_100k, tmp_path):
    archive = write_lines(tmp_path / "ml-100k.zip", ["not a zip"])
    assert f"{archive} is not the official ml-100k archive" in error_of("ml-100k", tmp_path, tmp_path)
    with zipfile.ZipFile(archive, "w") as empty:
        empty.writestr("readme", "")
    assert "u.data" in error_of("ml-100k", tmp_path, tmp_path)
    write_archive(archive, raw_100k)
    archive.write_bytes(archive.read_bytes().replace(b"7\t11\t5\t100", b"7\t11\t1\t100"))
    assert "Bad CRC-32" in error_of("ml-100k", tmp_path, tmp_path)
    assert not (tmp_path / "u.data").exists()


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_an_error_wherever_the_damage_is(raw_100k, tmp_path, compression):
    archive, raw = tmp_path / "raw/ml-100k.zip", tmp_path / "raw"
    write_archive(archive, raw_100k, compression)
    whole, refused = archive.read_bytes(), set()
    table, _ = prepare("ml-100k", raw, tmp_path)
    for place in range(0, len(whole), 4):
        (raw / "u.data").unlink(missing_ok=True)
        (raw / "u.user").unlink(missing_ok=True)
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert prepare("ml-100k", raw, tmp_path)[0].equals(table)  # a time, an attribute
        except SystemExit as stopped:
            message = str(stopped)
            assert message.startswith(f"error: {archive} is not the official ml-100k archive ("), place
            assert message.endswith("; delete it to download it again")
            refused.add(place)
    assert len(refused) > len(whole) / 8


def test_an_encrypted_archive_is_an_error(raw_100k, tmp_path):
    archive = tmp_path / "ml-100k.zip"
    write_archive(archive, raw_100k)
    contents = bytearray(archive.read_bytes())
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = contents.find(header)
        while start >= 0:
            contents[start + flags] |= 1
            start = contents.find(header, start + 1)
    archive.write_bytes(contents)
    error = error_of("ml-100k", tmp_path, tmp_path)
    assert "is encrypted" in error and error.endswith("; delete it to download it again")


@pytest.mark.skipif(not REAL_100K.exists(), reason=f"needs the real MovieLens 100K at {REAL_100K}")
def test_the_real_ml_100k(tmp_path):
    table, meta = prepare("ml-100k", REAL_100K, tmp_path)
    assert len(table) == 943
    assert table["items"].list.len().sum() == 100_000
    assert [meta["vocab_sizes"][name] for name in ("movie_id", "user_id", "occupation")] == [1683, 944, 22]
    assert table["timestamps"].list.eval(pl.element().diff().min()).explode().min() >= 0
