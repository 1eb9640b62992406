"""Fetching the official MovieLens files."""

from __future__ import annotations

import shutil
import urllib.request
import zipfile
from pathlib import Path

from tqdm import tqdm

from commons.datasets.movielens_format import MovieLensFormat

ARCHIVES_URL = "https://files.grouplens.org/datasets/movielens"
_TIMEOUT_S = 60
_CHUNK_BYTES = 1 << 20


def fetch_raw_files(raw_dir: Path, movielens: MovieLensFormat) -> None:
    """Makes sure that the dataset's files are in `raw_dir`, from the archive there or else GroupLens'.

    Raises:
        ConnectionError: the archive cannot be downloaded; says what to put where by hand.
        ValueError: the archive is damaged or lacks a file.
    """
    if all((raw_dir / name).exists() for name in movielens.files):
        return
    raw_dir.mkdir(parents=True, exist_ok=True)
    archive = raw_dir / f"{movielens.dataset}.zip"
    if not archive.exists():
        _download(f"{ARCHIVES_URL}/{archive.name}", archive)
    _extract(archive, movielens)


def _download(url: str, archive: Path) -> None:
    part = archive.with_suffix(".part")  # an interrupted download must not look like an archive
    try:
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response,
            part.open("wb") as file,
            tqdm(
                total=int(response.headers.get("Content-Length", 0)) or None,
                desc=archive.name,
                unit="B",
                unit_scale=True,
            ) as progress,
        ):
            while chunk := response.read(_CHUNK_BYTES):
                file.write(chunk)
                progress.update(len(chunk))
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConnectionError(
            f"could not download {url} ({error}); fetch it by hand, put it at {archive} and run this again"
        ) from error
    part.replace(archive)


def _extract(archive: Path, movielens: MovieLensFormat) -> None:
    """Extracts only the files that are needed, next to the archive."""
    try:
        with zipfile.ZipFile(archive) as members:
            for name in movielens.files:
                part = archive.with_name(f"{name}.part")  # a damaged member must not look like a file
                with members.open(f"{movielens.dataset}/{name}") as member, part.open("wb") as file:
                    shutil.copyfileobj(member, file)
                part.replace(archive.with_name(name))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(
            f"{archive} is not the official {movielens.dataset} archive ({error}); "
            "delete it to download it again"
        ) from error
