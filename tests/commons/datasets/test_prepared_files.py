"""Preprocessors destroy nothing of a user's, and leave no mix of two runs."""

import shutil
from pathlib import Path

import pytest

from commons.datasets.prepared_files import new_file, replaced_files
from tests.commons.datasets.raw_files import FORMATS, error_of, write_archive, write_file

PREPROCESSORS = pytest.mark.parametrize("name", ["interactions", "u.data", "users"])


def contents(folder: Path) -> dict[str, object]:
    """Returns what is in a folder: links by where they lead, files by their bytes."""
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def refused(name, folder, *expected):
    """Runs a preprocessor that stops with what is expected, and changes nothing."""
    raw, before = FORMATS[name], contents(folder)
    error = error_of(raw.main, *raw.arguments(folder / "raw"), "--out", folder / "out")
    assert all(text in error for text in expected), error
    assert contents(folder) == before


@PREPROCESSORS
@pytest.mark.parametrize("kind", ["link", "broken link", "folder"])
def test_an_output_that_is_no_file_of_an_earlier_run_stays(kind, name, tmp_path):
    raw, out = FORMATS[name], tmp_path / "out"
    raw.write(tmp_path / "raw")
    for output in raw.outputs:
        shutil.rmtree(out, ignore_errors=True)
        for other in raw.outputs:
            write_file(out / other, b"of an earlier run")
        (out / output).unlink()
        if kind == "folder":
            (out / output / "mine").mkdir(parents=True)
        else:
            elsewhere = write_file(tmp_path / "elsewhere", b"mine")
            (out / output).symlink_to(elsewhere if kind == "link" else tmp_path / "absent")
        refused(name, tmp_path, f"{out / output} is {'no file' if kind == 'folder' else 'a link'}")


@PREPROCESSORS
@pytest.mark.parametrize("way", ["its name", "a link to it", "another name"])
def test_an_input_is_never_an_output(way, name, tmp_path):
    raw, out = FORMATS[name], tmp_path / "out"
    path, output = raw.write(tmp_path / "raw"), out / raw.outputs[-1]
    out.mkdir()
    if way == "its name":  # of those that have fixed names, by a link of the user's
        path.rename(output)
        path.symlink_to(output)
    elif way == "a link to it":
        path.rename(tmp_path / "data")
        path.symlink_to(tmp_path / "data")
        output.hardlink_to(tmp_path / "data")
    else:
        output.hardlink_to(path)
    refused(name, tmp_path, f"{output} is an input", "another --out")


@PREPROCESSORS
def test_a_users_own_temporary_folder_stays(name, tmp_path):
    raw, unfinished = FORMATS[name], tmp_path / "out/.unfinished"
    raw.write(tmp_path / "raw")
    mine = write_file(unfinished / "thesis.tex", b"mine")
    refused(name, tmp_path, f"{mine} is not of an earlier run")
    shutil.rmtree(unfinished)
    unfinished.symlink_to(tmp_path)
    refused(name, tmp_path, f"{unfinished} is not a folder")
    unfinished.unlink()
    write_file(unfinished / "run-000003.parquet", b"of a run that was killed")
    write_file(unfinished / raw.outputs[0], b"of a run that was killed")
    raw.prepare(tmp_path / "raw", tmp_path / "out")
    assert {path.name for path in unfinished.parent.iterdir()} == set(raw.outputs)


@pytest.mark.parametrize("name", ["u.data", "u.user", "ml-100k.zip"])
def test_a_raw_file_that_is_a_broken_link_stays(name, tmp_path):
    raw, gone = tmp_path / "raw", tmp_path / "unmounted"
    if name != "ml-100k.zip":
        write_archive(raw / "ml-100k.zip")
    raw.mkdir(exist_ok=True)
    (raw / name).symlink_to(gone)
    refused("u.data", tmp_path, f"{raw / name} is a link to {gone}, which does not exist")


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


@pytest.mark.parametrize("num_renamed", [None, 0, 1])
def test_an_interrupted_run_leaves_no_mix(num_renamed, tmp_path, monkeypatch):
    """The run is interrupted while it writes, or after it has moved some of its two files."""
    names = ("table", "meta")

    def run(content, is_interrupted=False):
        with replaced_files(tmp_path, names, []) as folder:
            for name in names:
                write_file(folder / name, content)
            if is_interrupted:
                raise KeyboardInterrupt

    rename, calls = Path.rename, []

    def interrupt(*arguments):
        if len(calls) == num_renamed:
            raise KeyboardInterrupt
        calls.append(arguments)
        return rename(*arguments)

    run(b"old")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", interrupt)
        run(b"new", is_interrupted=num_renamed is None)
    expected = (
        dict.fromkeys(names, b"old") if num_renamed is None else dict.fromkeys(names[:num_renamed], b"new")
    )
    assert contents(tmp_path) == expected
    run(b"new")
    assert contents(tmp_path) == dict.fromkeys(names, b"new")
