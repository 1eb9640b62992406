"""Files as people have them: each is read right, or refused in one line that shows what was found."""

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from commons.datasets import kuairand_preprocess, movielens_preprocess, sid_preprocess
from tests.commons.datasets.conftest import error_of, prepare
from tests.commons.datasets.kuairand_files import LOG_HEADER, LOGS_1K, USERS_HEADER, log_line, user_line


def zipped(text: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("ratings.csv", text)
    return file.getvalue()


def parquet(text: bytes) -> bytes:
    file = io.BytesIO()
    pl.DataFrame({"text": [text]}).write_parquet(file)
    return file.getvalue()


def swap(old: str, new: str, count: int = -1) -> Callable[[bytes], bytes]:
    """Returns a function that replaces text in a file."""
    return lambda text: text.replace(old.encode(), new.encode("latin-1"), count)


def columns(change: Callable[[list[str]], list[str]], separator: str = ",") -> Callable[[bytes], bytes]:
    """Returns a function that changes the fields of each line."""
    return lambda text: "".join(
        separator.join(change(line.split(","))) + "\n" for line in text.decode().splitlines()
    ).encode("latin-1")


def utf(encoding: str, mark: bytes = b"") -> Callable[[bytes], bytes]:
    return lambda text: mark + text.decode().encode(encoding)


BOM = b"\xef\xbb\xbf"
TO_UTF8 = "expected UTF-8, as iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE writes it"
# What is no text, or none that can be told apart, for any reader of text.
NO_TEXT = {
    "UTF-16 LE": (utf("utf-16-le", b"\xff\xfe"), "begins with b'\\xff\\xfe", TO_UTF8),
    "UTF-16 BE": (utf("utf-16-be", b"\xfe\xff"), "begins with b'\\xfe\\xff", TO_UTF8),
    "UTF-16 without a mark": (utf("utf-16-le"), "\\x00", "has zero bytes", TO_UTF8),
    "UTF-32": (utf("utf-32"), "begins with b'\\xff\\xfe\\x00\\x00", TO_UTF8),
    "zip": (zipped, "is a zip archive: unpack it first"),
    "xz": (lzma.compress, "is compressed by xz: unpack it"),
    "bzip2": (bz2.compress, "is compressed by bzip2: unpack it"),
    "Parquet": (parquet, "is a Parquet file: write it as text first"),
    "cut gzip": (lambda text: gzip.compress(text)[:-9], "is damaged: ", "expected a whole gzip file"),
}
# What changes nothing, for any reader of text.
SAME_TEXT = {
    "as it is": lambda text: text,
    "byte order mark": lambda text: BOM + text,
    "gzip": gzip.compress,
    "gzip of a byte order mark": lambda text: gzip.compress(BOM + text),
    "CRLF": swap("\n", "\r\n"),
    "byte order mark and CRLF": lambda text: BOM + text.replace(b"\n", b"\r\n"),
    "no newline at the end": lambda text: text.removesuffix(b"\n"),
    "blank last line": lambda text: text + b"\n",
    "blank last lines": lambda text: text + b"\r\n \n\t\n\n",
}

HEADER = "userId,movieId,rating,timestamp"
DATES = {"1112486027": "2005-04-02 23:53:47", "1112484676": "2005-04-02 23:31:16", "7": "1970-01-01 00:00:07"}
RATINGS = [["1", "2", "3.5", "1112486027"], ["1", "29", "0.5", "1112484676"], ["4", "2", "5.0", "7"]]
RATINGS_CSV = "".join(f"{line}\n" for line in (HEADER, *map(",".join, RATINGS))).encode()
LINE = "'1,29,0.5,1112484676'"

READ = SAME_TEXT | {
    "quoted header": swap(HEADER, '"userId","movieId","rating","timestamp"'),
    "quoted fields": columns(lambda fields: [f'"{field}"' for field in fields]),
    "dates, as Kaggle has them": columns(lambda fields: [*fields[:3], DATES.get(fields[3], fields[3])]),
    "quoted dates": columns(lambda fields: [*fields[:3], f'"{DATES.get(fields[3], fields[3])}"']),
    "pandas' index": columns(lambda fields: ["" if fields[0] == "userId" else "5", *fields]),
    "other order": columns(lambda fields: fields[::-1]),
    "extra columns": columns(lambda fields: ["x", *fields[:2], "", *fields[2:]]),
    "extra column with commas": columns(lambda fields: [*fields, '"a,""b"" c"']),
    "extra column in Latin-1": columns(lambda fields: [*fields, "é"]),
    "tabs": swap(",", "\t"),
    "semicolons": swap(",", ";"),
    "bars": swap(",", "|"),
    "other order of lines": lambda text: b"\n".join([text.split()[0], *text.split()[:0:-1]]),
    "whole ratings": swap("5.0", "5"),
    "leading zeros and signs": swap("1,29,", "+1,0029,"),
}
REFUSED = NO_TEXT | {
    "empty file": (lambda _: b"", "is empty: expected a header with the columns", "'userId'"),
    "blank lines": (lambda _: b"\n\n \n", "is empty: expected a header"),
    "header only": (lambda text: text.splitlines()[0], "no lines after its header"),
    "no header": (swap(HEADER + "\n", ""), "line 1: '1,2,3.5,1112486027': no column 'userId'", "'movieId'"),
    "other names": (swap("userId", "user_id"), "line 1: 'user_id,movieId,", "no column 'userId', expected"),
    "other case": (swap("movieId", "movieid"), "no column 'movieId', expected a header with the columns"),
    "space in the header": (swap(",movieId", ", movieId"), "'userId, movieId,", "no column 'movieId'"),
    "missing column": (columns(lambda fields: fields[:3]), "no column 'timestamp', expected a header"),
    "column twice": (columns(lambda fields: [*fields, fields[2]]), "2 columns 'rating', expected"),
    "double colons": (swap(",", "::"), "'userId::movieId::rating::timestamp': no column"),
    "comment above": (lambda text: b"# of 2016\n" + text, "line 1: '# of 2016': no column 'userId'"),
    "comment": (swap("1,29", "# 2005\n1,29"), "line 3: '# 2005': expected 4 fields separated by ','"),
    "blank middle line": (swap("1,29", "\n1,29"), "line 3: '': expected 4 fields separated by ',': userId"),
    "short line": (swap(",1112484676", ""), "line 3: '1,29,0.5': expected 4 fields"),
    "long line": (swap("1112484676", "1112484676,"), "line 3: '1,29,0.5,1112484676,': expected 4 fields"),
    "empty field": (swap("1,29", "1,"), "line 3: '1,,0.5,1112484676': movieId is '', expected an integer"),
    "float as id": (swap("1,29", "1.0,29"), "line 3: '1.0,29,", "userId is '1.0', expected an integer"),
    "negative id": (swap("1,29", "1,-29"), "movieId is '-29', expected an integer from 1 to 2147483647"),
    "id 0": (swap("1,29", "0,29"), "userId is '0', expected an integer from 1 to 2147483647"),
    "id from 2**31": (swap("29", "2147483648"), "movieId is '2147483648', expected an integer from 1 to 21"),
    "id beyond int64": (swap("1,29", f"{2**64},29"), f"userId is '{2**64}', expected an integer"),
    "hash as id": (swap("1,29", "9f3c,29"), "userId is '9f3c', expected an integer"),
    "foreign digits": (lambda text: text.replace(b",29,", ",٢٩,".encode()), "movieId is '٢٩', expected"),
    "too good a rating": (swap("5.0", "5.5"), "line 4: '4,2,5.5,7': rating is '5.5', expected 0.5 to 5 in"),
    "rating 0": (swap("0.5", "0"), "rating is '0', expected 0.5 to 5 in steps of 0.5"),
    "rating between steps": (swap("0.5", "0.7"), "rating is '0.7', expected 0.5 to 5 in steps of 0.5"),
    "rating nan": (swap("0.5", "nan"), "rating is 'nan', expected 0.5 to 5"),
    "comma in a rating": (lambda text: swap("0.5", "0,5")(swap(",", ";")(text)), "rating is '0,5', expected"),
    "time as a word": (swap("1112484676", "today"), "timestamp is 'today', expected Unix time in seconds"),
    "time as a float": (
        swap("1112484676", "1112484676.0"),
        "timestamp is '1112484676.0', expected Unix time",
    ),
    "time in exponents": (swap("1112484676", "1.11248e9"), "timestamp is '1.11248e9', expected Unix time"),
    "other date": (swap("1112484676", "02/04/2005 23:31"), "timestamp is '02/04/2005 23:31', expected Unix"),
    "space before a number": (swap("1,29", "1, 29"), "movieId is ' 29', expected an integer"),
    "space after a number": (swap("1,29", "1 ,29"), "userId is '1 ', expected an integer"),
    "quote within a field": (swap("1,29", '1,2"9'), "line 3: '1,2\"9,0.5,1112484676': expected 4 fields"),
    "open quote": (swap("1,29", '"1,29'), "line 3: '\"1,29,0.5,1112484676': expected 4 fields"),
    "newline in quotes": (swap("1,29", '1,"2\n9"'), "line 3: '1,\"2': expected 4 fields"),
    "line ends of old Macs": (swap("\n", "\r"), "line 1: 'userId,movieId,rating,timestamp\\r1,2,3.5,"),
    "zero byte within": (lambda text: text.replace(b",29,", b",2\x009,"), "has zero bytes"),
}


def ratings_of(folder: Path, out: Path, dataset: str = "ml-20m"):
    table, _ = prepare(movielens_preprocess.main, dataset, folder, out)
    return table.select("user_id", "items", "actions", "timestamps").rows()


SEQUENCES = [(1, [29, 2], [1, 7], [1112484676, 1112486027]), (4, [2], [10], [7])]


def test_as_many_variants_as_were_tried():
    assert len(READ) + len(REFUSED) >= 53


@pytest.mark.parametrize("name", ["ratings.csv", "ratings.csv.gz", "rating.csv", "ml-20m/ratings.csv"])
@pytest.mark.parametrize("change", READ.values(), ids=READ)
def test_ratings_that_are_read(change, name, tmp_path):
    (tmp_path / "ml-20m").mkdir()
    (tmp_path / name).write_bytes(change(RATINGS_CSV))
    assert ratings_of(tmp_path, tmp_path / "out") == SEQUENCES


@pytest.mark.parametrize("variant", REFUSED.values(), ids=REFUSED)
def test_ratings_that_are_refused(variant, tmp_path):
    change, *expected = variant
    (tmp_path / "ratings.csv").write_bytes(change(RATINGS_CSV))
    arguments = ("--dataset", "ml-20m", "--raw", tmp_path, "--out", tmp_path / "out")
    error = error_of(movielens_preprocess.main, *arguments)
    assert error.startswith(f"error: {tmp_path / 'ratings.csv'}")
    assert all(text in error for text in expected), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", SAME_TEXT.values(), ids=SAME_TEXT)
@pytest.mark.parametrize("name", ["u.data", "u.user"])
def test_files_without_a_header_that_are_read(name, change, raw_100k, tmp_path):
    expected = ratings_of(raw_100k, tmp_path / "a", "ml-100k")
    (raw_100k / name).write_bytes(change((raw_100k / name).read_bytes()))
    assert ratings_of(raw_100k, tmp_path / "b", "ml-100k") == expected


NO_HEADER = {
    "header": (lambda text: b"user_id\titem_id\trating\ttimestamp\n" + text, "line 1: ", "is 'user_id', exp"),
    "commas": (swap("\t", ","), "line 1: '7,11,5,100': expected 4 fields separated by '\\t': user_id, movie"),
    "spaces": (swap("\t", " "), "line 1: '7 11 5 100': expected 4 fields separated by '\\t'"),
    "double colons": (swap("\t", "::"), "line 1: '7::11::5::100': expected 4 fields separated by '\\t'"),
    "pandas' index": (lambda text: b"0\t" + text, "line 1: '0\\t7\\t11\\t5\\t100': expected 4 fields"),
    "half stars": (swap("\t5\t100", "\t4.5\t100"), "rating is '4.5', expected 1 to 5 in steps of 1"),
    "nothing": (lambda _: b"", "has no lines: expected at least one"),
}


@pytest.mark.parametrize("variant", (NO_HEADER | NO_TEXT).values(), ids=NO_HEADER | NO_TEXT)
def test_files_without_a_header_that_are_refused(variant, raw_100k, tmp_path):
    change, *expected = variant
    (raw_100k / "u.data").write_bytes(change((raw_100k / "u.data").read_bytes()))
    arguments = ("--dataset", "ml-100k", "--raw", raw_100k, "--out", tmp_path / "out")
    error = error_of(movielens_preprocess.main, *arguments)
    assert error.startswith(f"error: {raw_100k / 'u.data'}")
    assert all(text in error for text in expected), error


def test_double_colons_of_ml_10m(tmp_path):
    lines = "".join("::".join(rating) + "\n" for rating in RATINGS)
    (tmp_path / "ml-10M100K").mkdir()
    (tmp_path / "ml-10M100K/ratings.dat").write_text(lines)
    assert ratings_of(tmp_path, tmp_path / "out", "ml-10m") == SEQUENCES


@pytest.mark.parametrize("dataset", ["ml-25m", "ml-32m", "ml-latest", "ml-latest-small"])
def test_archives_of_newer_sets(dataset, tmp_path):
    with zipfile.ZipFile(tmp_path / f"{dataset}.zip", "w") as archive:
        archive.writestr(f"{dataset}/ratings.csv", RATINGS_CSV)
    assert ratings_of(tmp_path, tmp_path / "out", dataset) == SEQUENCES


@pytest.mark.parametrize("main", [movielens_preprocess.main, kuairand_preprocess.main])
@pytest.mark.parametrize("option", ["--raw", "--out"])
def test_a_file_where_a_folder_belongs(option, main, tmp_path):
    file = tmp_path / "ml-20m.zip"
    file.write_bytes(zipped(RATINGS_CSV))
    (tmp_path / "ratings.csv").write_bytes(RATINGS_CSV)
    write_kuairand(tmp_path)
    dataset = "ml-20m" if main is movielens_preprocess.main else "kuairand-1k"
    for path in (file, file / "folder"):
        folders = {"--raw": tmp_path, "--out": tmp_path / "out"} | {option: path}
        arguments = [word for pair in folders.items() for word in pair]
        expected = f"error: {option} {path}: {file} is a file, expected a folder"
        assert error_of(main, "--dataset", dataset, *arguments) == expected


def test_a_folder_where_a_file_belongs(tmp_path):
    (tmp_path / "ratings.csv").mkdir()
    arguments = ("--dataset", "ml-20m", "--raw", tmp_path, "--out", tmp_path / "out")
    error = error_of(movielens_preprocess.main, *arguments)
    assert error == f"error: {tmp_path / 'ratings.csv'} is a folder: expected a file"


EVENTS = [log_line(9, 70, 50), log_line(0, 5, 40, 0b1)]
LOG = "".join(f"{line}\n" for line in (LOG_HEADER, *EVENTS)).encode()
USERS = "".join(f"{line}\n" for line in (USERS_HEADER, user_line(9), user_line(0))).encode()


def write_kuairand(folder: Path, log: bytes = LOG, users: bytes = USERS, suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{LOGS_1K[0]}{suffix}").write_bytes(log)
    (folder / LOGS_1K[1]).write_text(f"{LOG_HEADER}\n")
    (folder / f"user_features_1k.csv{suffix}").write_bytes(users)


def histories_of(folder: Path, out: Path):
    table, _ = prepare(kuairand_preprocess.main, "kuairand-1k", folder, out)
    return table.select("user_id", "items", "actions", "timestamps").rows()


KUAIRAND_READ = SAME_TEXT | {
    "other order": columns(lambda fields: fields[::-1]),
    "extra column": columns(lambda fields: [*fields, "x"]),
    "quoted fields": columns(lambda fields: [f'"{field}"' for field in fields]),
    "tabs": swap(",", "\t"),
    "unused columns that are no numbers": columns(lambda fields: [*fields[:-1], "unknown"]),
}
KUAIRAND_REFUSED = NO_TEXT | {
    "no header": (swap(LOG_HEADER + "\n", ""), "line 1: '9,70,", "no column 'user_id', expected a header"),
    "missing column": (columns(lambda fields: fields[:4]), "no column 'time_ms', expected a header"),
    "column twice": (columns(lambda fields: [*fields, fields[0]]), "2 columns 'user_id', expected"),
    "empty log": (lambda _: b"", "is empty: expected a header with the columns"),
    "float as id": (swap("9,70", "9.0,70"), "line 2: '9.0,70,", "user_id is '9.0', expected an integer"),
    "negative hash": (swap("9,70", "9,-7000000000000"), "video_id is '-7000000000000', expected an integer"),
    "unsigned hash": (swap("9,70", f"9,{2**64 - 1}"), "video_id is '18446744073709551615', expected"),
    "date as time": (swap(",50,", ",2022-04-08,"), "time_ms is '2022-04-08', expected an integer"),
    "blank middle line": (swap("0,5,", "\n0,5,"), "line 3: '': expected 19 fields", "as many as the header"),
    "comment": (swap("0,5,", "# user 0\n0,5,"), "line 3: '# user 0': expected 19 fields"),
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("change", KUAIRAND_READ.values(), ids=KUAIRAND_READ)
@pytest.mark.parametrize("folder", ["", "data", "KuaiRand-1K/data"])
def test_logs_that_are_read(folder, change, suffix, tmp_path):
    write_kuairand(tmp_path / folder, change(LOG), suffix=suffix)
    (tmp_path / "data").mkdir(exist_ok=True)  # even if the files are elsewhere
    expected = [(1, [1], [2], [40]), (2, [2], [1], [50])]
    assert histories_of(tmp_path, tmp_path / "out") == expected


@pytest.mark.parametrize("variant", KUAIRAND_REFUSED.values(), ids=KUAIRAND_REFUSED)
def test_logs_that_are_refused(variant, tmp_path):
    change, *expected = variant
    write_kuairand(tmp_path, change(LOG))
    arguments = ("--dataset", "kuairand-1k", "--raw", tmp_path, "--out", tmp_path / "out")
    error = error_of(kuairand_preprocess.main, *arguments)
    assert error.startswith(f"error: {tmp_path / LOGS_1K[0]}")
    assert all(text in error for text in expected), error


@pytest.mark.parametrize("change", SAME_TEXT.values(), ids=SAME_TEXT)
def test_user_features_that_are_read(change, tmp_path):
    write_kuairand(tmp_path, users=change(USERS))
    assert len(histories_of(tmp_path, tmp_path / "out")) == 2


@pytest.mark.parametrize("variant", NO_TEXT.values(), ids=NO_TEXT)
def test_user_features_that_are_refused(variant, tmp_path):
    change, *expected = variant
    write_kuairand(tmp_path, users=change(USERS))
    arguments = ("--dataset", "kuairand-1k", "--raw", tmp_path, "--out", tmp_path / "out")
    error = error_of(kuairand_preprocess.main, *arguments)
    assert error.startswith(f"error: {tmp_path / 'user_features_1k.csv'}")
    assert all(text in error for text in expected), error


INTERACTIONS = b"".join(
    json.dumps({"user": user, "history": [user], "next": 3}).encode() + b"\n" for user in range(3)
)
MINE = '{"user": 1, "history": [1], "next": 3}'
SID_REFUSED = NO_TEXT | {
    "blank middle line": (swap(MINE, "\n" + MINE), "line 2: '': malformed JSON", "expected an object"),
    "one JSON array": (
        lambda text: b"[" + text.replace(b"\n", b",")[:-1] + b"]",
        "line 1: '[{",
        "a JSON obj",
    ),
    "single quotes": (swap(MINE, MINE.replace('"', "'")), "line 2: \"{'user': 1,", "malformed JSON"),
    "comma at the end": (swap(MINE, MINE + ","), f"line 2: '{MINE},': malformed JSON"),
    "another key": (swap(MINE, MINE.replace("next", "target")), "there is no 'next', expected an object as"),
    "CSV": (lambda _: b"user,history,next\n1,2,3\n", "line 1: 'user,history,next': malformed JSON"),
    "empty file": (lambda _: b"", "has no interactions"),
}


@pytest.mark.parametrize("change", SAME_TEXT.values(), ids=SAME_TEXT)
def test_interactions_that_are_read(change, tmp_path):
    path = tmp_path / "interactions.jsonl"
    path.write_bytes(change(INTERACTIONS))
    options = ["--split", "100", "0", "0"]
    sid_preprocess.main(["--interactions", str(path), "--out", str(tmp_path / "out"), *options])
    rows = pl.read_parquet(tmp_path / "out/training.parquet").rows()
    assert rows == [(str(user), [user, 3]) for user in range(3)]


@pytest.mark.parametrize("variant", SID_REFUSED.values(), ids=SID_REFUSED)
def test_interactions_that_are_refused(variant, tmp_path):
    change, *expected = variant
    path = tmp_path / "interactions.jsonl"
    path.write_bytes(change(INTERACTIONS))
    error = error_of(sid_preprocess.main, "--interactions", path, "--out", tmp_path / "out")
    assert error.startswith(f"error: {path}")
    assert all(text in error for text in expected), error
