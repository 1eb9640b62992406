"""Preprocessors destroy nothing of a user's, and leave no mix of two runs."""

import itertools
import shutil
from pathlib import Path

import pytest

from tests.commons.datasets.internals import replaced_files
from tests.commons.datasets.raw_files import FORMATS, error_of, write_file

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
            (out / output).symlink_to(tmp_path / ("raw" if kind == "link" else "absent"))
        refused(name, tmp_path, f"{out / output} is {'no file' if kind == 'folder' else 'a link'}")


@PREPROCESSORS
@pytest.mark.parametrize("is_link", [False, True])
def test_an_input_is_never_an_output(is_link, name, tmp_path):
    raw, out = FORMATS[name], tmp_path / "out"
    path, output = raw.write(tmp_path / "raw"), out / raw.outputs[-1]
    out.mkdir()
    if is_link:
        path.rename(output)
        path.symlink_to(output)
    else:
        output.hardlink_to(path)
    refused(name, tmp_path, f"{output} is an input", "another --out")


@pytest.mark.parametrize("name", ["u.data", "ml-100k.zip"])
def test_a_raw_file_that_is_a_broken_link_stays(name, tmp_path):
    link, gone = tmp_path / "raw" / name, tmp_path / "unmounted"
    link.parent.mkdir()
    link.symlink_to(gone)
    refused("u.data", tmp_path, f"{link} is a link to {gone}, which does not exist")


def test_what_a_user_puts_there_meanwhile_stays(tmp_path):
    path, out = write_file(tmp_path / "mine", b"mine"), tmp_path / "out"
    with pytest.raises(FileExistsError, match="is a link"), replaced_files(out, ("data",), []) as folder:
        (folder / "data").write_bytes(b"prepared")
        (out / "data").symlink_to(path)
    assert contents(tmp_path) == {"mine": b"mine", "out": False, "out/data": path}


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

    rename, calls = Path.rename, itertools.count()

    def interrupt(*arguments):
        if next(calls) == num_renamed:
            raise KeyboardInterrupt
        return rename(*arguments)

    run(b"old")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", interrupt)
        run(b"new", is_interrupted=num_renamed is None)
    kept, content = (names, b"old") if num_renamed is None else (names[:num_renamed], b"new")
    assert contents(tmp_path) == dict.fromkeys(kept, content)
    run(b"new")
    assert contents(tmp_path) == dict.fromkeys(names, b"new")
