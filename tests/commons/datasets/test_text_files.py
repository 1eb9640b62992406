"""Raw files as people have them: each is read right, or refused in one line that names what was found."""

import gzip
from dataclasses import replace

import pytest

from tests.commons.datasets.kuairand_files import log_line, user_line
from tests.commons.datasets.raw_files import FORMATS, error_of
from tests.commons.datasets.text_variants import SAME_TEXT, replaced, with_fields

DATES = {"1112486027": "2005-04-02 23:53:47", "1112484676": "2005-04-02 23:31:16", "7": "1970-01-01 00:00:07"}
READ = {
    **{(name, change): SAME_TEXT[change] for name in FORMATS for change in SAME_TEXT},
    ("ml-20m", "byte order mark"): lambda text: b"\xef\xbb\xbf" + text,
    ("ml-20m", "dates, as Kaggle has them"): with_fields(
        lambda fields: [*fields[:3], f'"{DATES.get(fields[3], fields[3])}"']
    ),
    ("ml-20m", "pandas' index, other order, commas in quotes, Latin-1"): with_fields(
        lambda fields: ["" if fields[0] == "userId" else "5", *fields[::-1], '"a,""b"" c"', "é"]
    ),
    ("ml-20m", "other order of lines"): lambda text: b"\n".join([text.split()[0], *text.split()[:0:-1]]),
    ("ml-20m", "whole ratings, leading zeros and signs"): lambda text: replaced("1,29,", "+1,0029,")(
        replaced("5.0", "5")(text)
    ),
    ("log", "other order, extra column"): with_fields(lambda fields: [*fields[::-1], "x"]),
    ("log", "quoted fields"): with_fields(lambda fields: [f'"{field}"' for field in fields]),
    ("log", "unused columns that are no integers"): lambda text: replaced(",5000,15000,", ",,15000.0,")(
        with_fields(lambda fields: [*fields[:-1], "unknown"])(text)
    ),
}
STAR, INTERACTION = "1,29,0.5,1112484676", '{"user": 0, "history": [8, 1], "next": 3}'

# By format and text: what it is replaced by, and what the error shows of the row, the value, and the mend.
REPLACED = {
    ("ml-20m", STAR): [
        (STAR.replace("29", ""), "row 3: ", "movieId is ''", "integer"),
        (STAR.replace("1,", "0,", 1), "userId is '0'", "1 to"),
        (STAR.replace("29", f"{2**31}"), f"movieId is '{2**31}'"),
        (STAR.replace("0.5", "0.7"), "rating is '0.7'", "0.5 to 5"),
        (STAR.replace("1112484676", "today"), "timestamp is 'today'", "Unix time"),
    ],
    ("u.data", "7\t11\t5\t100"): [
        ("7\t11\t4.5\t100", "row 1: ", "rating is '4.5'", "1 to 5"),
        ("5\t11\t5\t100", "user 5"),
    ],
    ("u.user", "7|24|F|artist|T8H1N"): [("3|53|F|x|1", "line 2: ", "user 3", "one line per user")],
    ("log", log_line(9, 70, 50)): [
        (log_line(3, 70, 50), "row 2: ", "user_id is '3'", "a user of"),
        (log_line(9, -70, 50), "video_id is '-70'"),
        (log_line(9, 70, 50).replace(",0,", ",2,", 1), "is_click is '2'", "0 to 1"),
    ],
    ("users", user_line(0)): [(user_line(9), "line 3: ", "user 9", "one line per user")],
    ("interactions", INTERACTION): [
        ("[" * 100_000, "cannot be read"),
        (INTERACTION.replace("8", "-8"), "row 1: ", "-8", "item ids from 0"),
        (INTERACTION.replace("8", "null"), "row 1: ", "None"),
        (INTERACTION.replace("0", "null"), "row 1: ", "'user': None"),
        (INTERACTION.replace("3", f"{2**63}"), f"{2**63}", "Int64"),
    ],
}
REFUSED = {
    ("ml-20m", "header only"): (lambda text: text.splitlines(keepends=True)[0], "no rows"),
    ("log", "header only"): (lambda text: text.splitlines(keepends=True)[0], "no events"),
    **{
        (name, "; ".join(expected)): (replaced(text, other), *expected)
        for (name, text), cases in REPLACED.items()
        for other, *expected in cases
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


PLACES = [
    *(("ml-20m", place) for place in ("ratings.csv.gz", "rating.csv", "ml-20m/ratings.csv")),
    *(("log", f"{folder}{{}}") for folder in ("", "data/", "KuaiRand-1K/data/")),
    ("log", "{}.gz"),
]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_files_are_found_under_their_other_names(name, place, tmp_path):
    raw = FORMATS[name]
    compress = gzip.compress if place.endswith(".gz") else bytes
    files = {place.format(file): compress(of) for file, of in raw.files.items()}
    replace(raw, files=files).write(tmp_path)
    (tmp_path / "data").mkdir(exist_ok=True)  # even if the files are elsewhere
    assert raw.read(tmp_path, tmp_path / "out") == raw.rows


def test_files_that_are_not_there(tmp_path):
    log, file = FORMATS["log"], tmp_path / "archive.zip"
    file.write_bytes(b"")
    log.write(tmp_path / "raw")
    for raw, raw_folder, out, *expected in (
        (log, tmp_path, "out", *log.files, "https://kuairand.com"),
        (log, file / "folder", "out", f"--raw {file / 'folder'}", f"{file} is a file"),
        (log, tmp_path / "raw", file.name, f"--out {file}", f"{file} is a file"),
    ):
        error = error_of(raw.main, *raw.arguments(raw_folder), "--out", tmp_path / out)
        assert str(tmp_path) in error and all(text in error for text in expected), error
    with pytest.raises(SystemExit, match="max_history_seqlen = 0: expected at least 1"):
        log.main([*log.arguments(tmp_path), "--max-history-seqlen", "0"])
