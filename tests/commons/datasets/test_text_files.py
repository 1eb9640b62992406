"""Raw files as people have them: each is read right, or refused in one line that names what was found."""

import pytest

from tests.commons.datasets.kuairand_files import LOG_HEADER, log_line, user_line
from tests.commons.datasets.raw_files import (
    FORMATS,
    RATINGS_HEADER,
    RawFiles,
    error_of,
)
from tests.commons.datasets.text_variants import NO_TEXT, SAME_TEXT, replaced, with_fields

DATES = {"1112486027": "2005-04-02 23:53:47", "1112484676": "2005-04-02 23:31:16", "7": "1970-01-01 00:00:07"}
READ = {
    **{(name, change): SAME_TEXT[change] for name in FORMATS for change in SAME_TEXT},
    ("ml-20m", "quoted fields"): with_fields(lambda fields: [f'"{field}"' for field in fields]),
    ("ml-20m", "dates, as Kaggle has them"): with_fields(
        lambda fields: [*fields[:3], f'"{DATES.get(fields[3], fields[3])}"']
    ),
    ("ml-20m", "pandas' index, other order, commas in quotes, Latin-1"): with_fields(
        lambda fields: ["" if fields[0] == "userId" else "5", *fields[::-1], '"a,""b"" c"', "é"]
    ),
    ("ml-20m", "tabs"): replaced(",", "\t"),
    ("ml-20m", "semicolons"): replaced(",", ";"),
    ("ml-20m", "bars"): replaced(",", "|"),
    ("ml-20m", "other order of lines"): lambda text: b"\n".join([text.split()[0], *text.split()[:0:-1]]),
    ("ml-20m", "whole ratings, leading zeros and signs"): lambda text: replaced("1,29,", "+1,0029,")(
        replaced("5.0", "5")(text)
    ),
    ("log", "other order, extra column"): with_fields(lambda fields: [*fields[::-1], "x"]),
    ("log", "quoted fields"): with_fields(lambda fields: [f'"{field}"' for field in fields]),
    ("log", "tabs"): replaced(",", "\t"),
    ("log", "unused columns that are no integers"): lambda text: replaced(",5000,15000,", ",,15000.0,")(
        with_fields(lambda fields: [*fields[:-1], "unknown"])(text)
    ),
}
STAR, LINE_100K = "1,29,0.5,1112484676", "7\t11\t5\t100"
EVENT, USER = log_line(9, 70, 50), user_line(9)
FLAGS = LOG_HEADER.split(",").index("is_click")
INTERACTION = '{"user": 0, "history": [8, 1], "next": 3}'

# What is malformed: the change, and what the error shows of the value, the column and the mend.
HEADERS = {
    ("ml-20m", "empty"): (lambda _: b"", "is empty", "'userId'"),
    ("ml-20m", "header only"): (lambda text: text.splitlines()[0], "no lines"),
    ("ml-20m", "no header"): (replaced(RATINGS_HEADER + "\n", ""), "'1,2,3.5,1112486027'", "'userId'"),
    ("ml-20m", "missing column"): (with_fields(lambda fields: fields[:3]), "'timestamp'"),
    ("ml-20m", "column twice"): (with_fields(lambda fields: [*fields, fields[2]]), "2 columns 'rating'"),
    ("u.data", "header"): (lambda text: b"user_id\tmovie_id\trating\ttime\n" + text, "'user_id'"),
    ("u.data", "empty"): (lambda _: b"", "no lines"),
    ("log", "no header"): (replaced(LOG_HEADER + "\n", ""), "'9,70,", "'user_id'"),
    ("log", "missing column"): (replaced("is_profile_enter", "entered"), "'is_profile_enter'"),
    ("log", "empty"): (lambda _: b"", "is empty"),
    ("log", "header only"): (lambda text: text.splitlines()[0], "no events"),
    ("users", "missing column"): (replaced("fans_user_num_range", "fans"), "'fans_user_num_range'"),
    ("interactions", "empty"): (lambda _: b"", "no interactions"),
    ("interactions", "CSV"): (lambda _: b"user,history,next\n1,2,3\n", "'user,history,next'", "JSON"),
}
LINES = {
    "ml-20m": {
        "blank middle line": ("\n" + STAR, "''", "4 fields"),
        "short line": ("1,29,0.5", "'1,29,0.5'", "4 fields"),
        "open quote": ('"' + STAR, "4 fields"),
        "empty field": (STAR.replace("29", ""), "movieId", "''", "integer"),
        "float as id": (STAR.replace("1,", "1.0,", 1), "userId", "'1.0'", "integer"),
        "id 0": (STAR.replace("1,", "0,", 1), "userId", "'0'", "1 to"),
        "id beyond int32": (STAR.replace("29", f"{2**31}"), "movieId", f"'{2**31}'"),
        "space before a number": (STAR.replace("29", " 29"), "movieId", "' 29'"),
        "too good a rating": (STAR.replace("0.5", "5.5"), "rating", "'5.5'", "0.5 to 5"),
        "rating 0": (STAR.replace("0.5", "0"), "rating", "'0'", "0.5 to 5"),
        "rating between steps": (STAR.replace("0.5", "0.7"), "rating", "'0.7'", "0.5 to 5"),
        "time as a word": (STAR.replace("1112484676", "today"), "timestamp", "'today'", "Unix time"),
    },
    "u.data": {
        "half stars": (LINE_100K.replace("5", "4.5"), "rating", "'4.5'", "1 to 5"),
        "unknown user": (LINE_100K.replace("7", "5"), "user 5"),
    },
    "u.user": {
        "short line": ("7|24|F|artist", "'7|24|F|artist'", "5 fields"),
        "age as a word": ("7|old|F|artist|1", "age", "'old'"),
        "empty field": ("7|24||artist|1", "gender", "''"),
        "user twice": ("3|53|F|x|1", "user 3", "one line per user"),
    },
    "log": {
        "blank middle line": ("\n" + EVENT, "''", "19 fields"),
        "half a line": (EVENT[: len(EVENT) // 2], "19 fields"),
        "user as a word": (EVENT.replace("9,", "x,", 1), "user_id", "'x'"),
        "unknown user": (EVENT.replace("9,", "3,", 1), "user 3"),
        "negative hash": (EVENT.replace("70", "-7000000000000"), "video_id", "'-7000000000000'"),
        "flag of two": (EVENT.replace(",0,", ",2,", 1), "is_click", "'2'", "0 to 1"),
    },
    "users": {
        "short line": (USER.rpartition(",")[0], "fields"),
        "user as a word": ("x" + USER, "user_id", "'x9'"),
        "open quote": (USER.replace(",0,", ',"0,', 1), "fields"),
        "user twice": (f"{USER}\n{USER}", "user 9", "one line per user"),
    },
    "interactions": {
        "blank middle line": ("\n" + INTERACTION, "''", "JSON"),
        "too deep": ("[" * 100_000, "JSON"),
        "no object": ("[1, 2]", "'[1, 2]'", "object"),
        "another key": (INTERACTION.replace("next", "target"), "'next'"),
        "user of another type": (INTERACTION.replace("0", "1.5"), "user", "1.5", "integer"),
        "history of another type": (INTERACTION.replace("[8, 1]", "3"), "history", "3", "list"),
        "negative item": (INTERACTION.replace("8", "-8"), "item -8", "integer"),
        "item as a float": (INTERACTION.replace("8", "8.0"), "item 8.0", "integer"),
        "item beyond int64": (INTERACTION.replace("3", f"{2**63}"), f"item {2**63}", "int64"),
    },
}
ORIGINAL = {
    "ml-20m": STAR,
    "u.data": LINE_100K,
    "u.user": "7|24|F|artist|T8H1N",
    "log": EVENT,
    "users": USER,
    "interactions": INTERACTION,
}
REFUSED = {
    **{(name, kind): NO_TEXT[kind] for name in FORMATS for kind in NO_TEXT},
    **HEADERS,
    **{
        (name, kind): (replaced(ORIGINAL[name], line), *expected)
        for name, lines in LINES.items()
        for kind, (line, *expected) in lines.items()
    },
}


def named(cases):
    """Parametrizes a test over cases, whose ids are the format and the change."""
    return [pytest.param(FORMATS[name], value, id=f"{name}: {kind}") for (name, kind), value in cases.items()]


@pytest.mark.parametrize(("raw", "change"), named(READ))
def test_files_that_are_read(raw, change, tmp_path):
    raw.write(tmp_path, change)
    assert raw.read(tmp_path, tmp_path / "out") == raw.rows


@pytest.mark.parametrize(("raw", "variant"), named(REFUSED))
def test_files_that_are_refused(raw, variant, tmp_path):
    change, *expected = variant
    path = raw.write(tmp_path, change)
    error = error_of(raw.main, *raw.arguments(tmp_path), "--out", tmp_path / "out")
    assert str(path) in error and all(text in error for text in expected), error
    assert not list((tmp_path / "out").glob("*")) and not list((tmp_path / "out").glob(".*"))


def test_the_line_of_a_malformed_field_is_named_with_headers_counted(tmp_path):
    for name, row, line in (("ml-20m", STAR, 3), ("u.data", LINE_100K, 1), ("log", EVENT, 2)):
        raw, folder = FORMATS[name], tmp_path / name
        path = raw.write(folder, replaced(row, "x" + row))
        error = error_of(raw.main, *raw.arguments(folder), "--out", tmp_path / "out")
        assert f"{path}, line {line}: " in error


OFFICIAL = ("", "data", "KuaiRand-1K/data")
PLACES = {
    "ml-20m": ("ratings.csv.gz", "rating.csv", "ml-20m/ratings.csv"),
    "log": tuple(f"{folder}/%s{suffix}" for folder in OFFICIAL for suffix in ("", ".gz")),
}


@pytest.mark.parametrize(("name", "place"), [(name, place) for name in PLACES for place in PLACES[name]])
def test_files_are_found_under_their_other_names(name, place, tmp_path):
    raw = FORMATS[name]
    files = {place.lstrip("/") % file if "%" in place else place: of for file, of in raw.files.items()}
    RawFiles(raw.main, raw.dataset, files, raw.rows).write(tmp_path)
    (tmp_path / "data").mkdir(exist_ok=True)  # even if the files are elsewhere
    assert raw.read(tmp_path, tmp_path / "out") == raw.rows


@pytest.mark.parametrize("name", ["ml-20m", "log"])
@pytest.mark.parametrize("option", ["--raw", "--out"])
def test_a_file_where_a_folder_belongs(option, name, tmp_path):
    raw, file = FORMATS[name], tmp_path / "archive.zip"
    raw.write(tmp_path)
    file.write_bytes(b"")
    for path in (file, file / "folder"):
        folders = {"--raw": tmp_path, "--out": tmp_path / "out"} | {option: path}
        arguments = [word for pair in folders.items() for word in pair]
        error = error_of(raw.main, "--dataset", raw.dataset, *arguments)
        assert f"{option} {path}" in error and f"{file} is a file" in error


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "ratings.csv").mkdir()
    interactions, log = FORMATS["interactions"], FORMATS["log"]
    for raw, expected in (
        (FORMATS["ml-20m"], ("ratings.csv is a folder",)),
        (interactions, ("lines.jsonl does not exist",)),
        (log, (*log.files, "https://kuairand.com")),
    ):
        error = error_of(raw.main, *raw.arguments(tmp_path), "--out", tmp_path / "out")
        assert str(tmp_path) in error and all(text in error for text in expected), error
    with pytest.raises(SystemExit, match="max_history_seqlen = 0: expected at least 1"):
        log.main([*log.arguments(tmp_path), "--max-history-seqlen", "0"])
