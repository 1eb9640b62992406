"""Preprocessors destroy nothing of a user's."""

import shutil
import zipfile
from pathlib import Path

import pytest

from commons.datasets import kuairand_preprocess, movielens, movielens_preprocess, sid_preprocess
from commons.datasets.prepared_files import new_file, replaced_files
from tests.commons.datasets.conftest import error_of, write_lines
from tests.commons.datasets.kuairand_files import write_kuairand_1k

NAMES = {
    "sid": ("training.parquet", "validation.parquet", "testing.parquet"),
    "ml-100k": ("sequences.parquet", "meta.json"),
    "kuairand-1k": ("sequences.parquet", "meta.json"),
}


@pytest.fixture(params=NAMES)
def preprocessor(request, raw_100k, tmp_path):
    """Returns a preprocessor's name, its main, its arguments without the output, and one of its inputs."""
    name = request.param
    if name == "sid":
        path = write_lines(tmp_path / "in/lines.jsonl", ['{"user": "a", "history": [], "next": 2}'])
        return name, sid_preprocess.main, ["--interactions", path], path
    if name == "ml-100k":
        return name, movielens_preprocess.main, ["--dataset", name, "--raw", raw_100k], raw_100k / "u.data"
    write_kuairand_1k(tmp_path / "logs", num_events=50, num_users=5, num_videos=9)
    path = tmp_path / "logs/user_features_1k.csv"
    return name, kuairand_preprocess.main, ["--dataset", name, "--raw", path.parent], path


def contents(folder: Path) -> dict[str, object]:
    """Returns what is in a folder: links by where they lead, files by their bytes."""
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("kind", ["link", "broken link", "folder"])
def test_an_output_that_is_no_file_of_an_earlier_run_stays(kind, preprocessor, tmp_path):
    name, main, arguments, _ = preprocessor
    out = tmp_path / "out"
    for output in NAMES[name]:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for other in NAMES[name]:
            if other != output:
                (out / other).write_text("of an earlier run")
        if kind == "folder":
            (out / output / "mine").mkdir(parents=True)
        else:
            target = write_lines(tmp_path / "elsewhere", ["mine"]) if kind == "link" else tmp_path / "absent"
            (out / output).symlink_to(target)
        before = contents(tmp_path)
        error = error_of(main, *arguments, "--out", out)
        assert error.startswith(
            f"error: {out / output} is {'no file' if kind == 'folder' else 'a link'}, and"
        )
        assert contents(tmp_path) == before


@pytest.mark.parametrize("way", ["its name", "a link to it", "another name"])
def test_an_input_is_never_an_output(way, preprocessor, tmp_path):
    name, main, arguments, path = preprocessor
    out, output = tmp_path / "out", NAMES[name][-1]
    out.mkdir()
    if way == "its name":  # of the two that have fixed names, by a link of the user's
        path.rename(out / output)
        path.symlink_to(out / output)
    elif way == "a link to it":
        path.rename(tmp_path / "data")
        path.symlink_to(tmp_path / "data")
        (out / output).hardlink_to(tmp_path / "data")
    else:
        (out / output).hardlink_to(path)
    before = contents(tmp_path)
    assert f"error: {out / output} is an input, and would be replaced" in error_of(
        main, *arguments, "--out", out
    )
    assert contents(tmp_path) == before


def test_interactions_with_the_name_of_an_output_stay(tmp_path):
    path = write_lines(tmp_path / "training.parquet", ['{"user": "a", "history": [], "next": 2}'])
    before = contents(tmp_path)
    assert "is an input" in error_of(sid_preprocess.main, "--interactions", path, "--out", tmp_path)
    assert contents(tmp_path) == before
    sid_preprocess.main(["--interactions", str(path), "--out", str(tmp_path / "out")])
    assert path.read_bytes() == before["training.parquet"]


def test_a_users_own_temporary_folder_stays(preprocessor, tmp_path):
    name, main, arguments, _ = preprocessor
    unfinished = tmp_path / "out/.unfinished"
    mine = write_lines(unfinished / "thesis.tex", ["mine"])
    assert f"error: {mine} is not of an earlier run" in error_of(main, *arguments, "--out", unfinished.parent)
    shutil.rmtree(unfinished)
    unfinished.symlink_to(tmp_path)
    assert f"error: {unfinished} is not a folder" in error_of(main, *arguments, "--out", unfinished.parent)
    unfinished.unlink()
    write_lines(unfinished / "run-000003.parquet", ["of a run that was killed"])
    write_lines(unfinished / NAMES[name][0], ["of a run that was killed"])
    main([str(argument) for argument in (*arguments, "--out", unfinished.parent)])
    assert {path.name for path in unfinished.parent.iterdir()} == set(NAMES[name])


@pytest.fixture
def archived(raw_100k, tmp_path, monkeypatch):
    """A server with the archive; returns an empty folder for raw files."""
    (tmp_path / "server").mkdir()
    with zipfile.ZipFile(tmp_path / "server/ml-100k.zip", "w") as archive:
        for name in ("u.data", "u.user"):
            archive.write(raw_100k / name, f"ml-100k/{name}")
    monkeypatch.setattr(movielens, "ARCHIVES_URL", (tmp_path / "server").as_uri())
    (tmp_path / "fresh").mkdir()
    return tmp_path / "fresh"


def test_files_named_part_stay(archived, tmp_path):
    mine = [write_lines(archived / f"{name}.part", ["mine"]) for name in ("u.data", "u.user", "ml-100k")]
    mine.append(write_lines(archived / "ml-100k.zip.part", ["mine"]))
    movielens_preprocess.main(
        ["--dataset", "ml-100k", "--raw", str(archived), "--out", str(tmp_path / "out")]
    )
    assert [path.read_text() for path in mine] == ["mine\n"] * 4
    found = {path.name for path in archived.iterdir()} - {path.name for path in mine}
    assert found == {"ml-100k.zip", "u.data", "u.user"}


@pytest.mark.parametrize("name", ["u.data", "u.user", "ml-100k.zip"])
def test_a_raw_file_that_is_a_broken_link_stays(name, archived, tmp_path):
    (archived / name).symlink_to(tmp_path / "unmounted")
    before = contents(archived)
    arguments = ("--dataset", "ml-100k", "--raw", archived, "--out", tmp_path / "out")
    error = error_of(movielens_preprocess.main, *arguments)
    assert f"{archived / name} is a link to {tmp_path / 'unmounted'}, which does not exist" in error
    assert contents(archived) == before


def test_what_a_user_puts_there_meanwhile_stays(tmp_path):
    path = tmp_path / "archive.zip"
    with pytest.raises(FileExistsError, match=r"meanwhile.*archive\.zip"), new_file(path) as file:
        file.write(b"downloaded")
        path.write_bytes(b"mine")
    assert contents(tmp_path) == {"archive.zip": b"mine"}
    out = tmp_path / "out"
    with pytest.raises(FileExistsError, match="is a link"), replaced_files(out, ("data",), []) as folder:
        (folder / "data").write_bytes(b"prepared")
        (out / "data").symlink_to(path)
    assert contents(tmp_path) == {"archive.zip": b"mine", "out": False, "out/data": path}
