"""Absent raw files come from the official archive, which is downloaded, and is whole or refused."""

import urllib.error
import zipfile

import pytest
import torch

from tests.commons.datasets.raw_files import FORMATS, MOVIELENS, error_of, text_of, write_archive, write_file

RAW = FORMATS["u.data"]


def error_on(folder):
    return error_of(MOVIELENS, *RAW.arguments(folder), "--out", folder / "out")


def test_absent_files_are_downloaded_and_unpacked(tmp_path, monkeypatch):
    served, open_url = write_archive(tmp_path / "ml-100k.zip").as_uri(), torch.hub.urlopen
    monkeypatch.setattr(torch.hub, "urlopen", lambda _: open_url(served))
    raw = tmp_path / "fresh/raw"
    mine = [write_file(raw / f"{name}.part", b"mine") for name in ("u.data", "u.user", "ml-100k.zip")]
    assert RAW.read(raw, tmp_path / "out") == RAW.rows
    assert {path.name for path in raw.iterdir()} == {"ml-100k.zip", *RAW.files, *(path.name for path in mine)}
    assert {path.read_bytes() for path in mine} == {b"mine"}


def test_an_archive_without_users(tmp_path):
    stars = FORMATS["ml-20m"]
    write_archive(tmp_path / "ml-latest.zip", "ml-latest", stars.files)
    MOVIELENS(["--dataset", "ml-latest", "--raw", str(tmp_path), "--out", str(tmp_path / "out")])
    assert stars.read(tmp_path, tmp_path / "out") == stars.rows


@pytest.mark.parametrize("own", RAW.files)
def test_a_users_own_file_is_kept_beside_the_archive(own, tmp_path):
    write_archive(tmp_path / "ml-100k.zip")
    mine = text_of(*reversed(RAW.files[own].decode().splitlines()))  # as long, in another order
    write_file(tmp_path / own, mine)
    assert RAW.read(tmp_path, tmp_path / "out") == RAW.rows
    assert (tmp_path / own).read_bytes() == mine


def test_a_failed_download_says_what_to_put_where_and_then_it_is_used(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    raw = tmp_path / "raw"
    error = error_on(raw)
    url = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
    assert all(text in error for text in (url, "no route to host", f"{raw / 'ml-100k.zip'}")), error
    assert list(raw.iterdir()) == []
    write_archive(raw / "ml-100k.zip")
    assert RAW.read(raw, tmp_path / "out") == RAW.rows


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_an_error_wherever_the_damage_is(compression, tmp_path):
    archive = write_archive(tmp_path / "ml-100k.zip", compression=compression)
    whole, refused = archive.read_bytes(), set()
    assert RAW.read(tmp_path, tmp_path / "out") == RAW.rows
    for place in range(0, len(whole), 8):
        for name in RAW.files:
            (tmp_path / name).unlink(missing_ok=True)
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert RAW.read(tmp_path, tmp_path / "out") == RAW.rows  # a time, an attribute
        except SystemExit as stopped:
            assert f"{archive} is not the official ml-100k archive" in str(stopped), place
            assert "delete it" in str(stopped), place
            refused.add(place)
    assert len(refused) > len(whole) / 16


def test_an_archive_with_other_contents_is_an_error_and_leaves_no_file(tmp_path):
    archive = write_file(tmp_path / "ml-100k.zip", b"not a zip")
    assert f"{archive} is not the official" in error_on(tmp_path)
    write_archive(archive, files={"readme": b""})
    assert "u.data" in error_on(tmp_path)
    contents = write_archive(archive).read_bytes()
    archive.write_bytes(contents.replace(b"7\t11\t5\t100", b"7\t11\t1\t100"))
    assert "CRC" in error_on(tmp_path)
    assert not any((tmp_path / name).exists() for name in RAW.files)
