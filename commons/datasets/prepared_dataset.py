"""Datasets that a command converts to two files, which training reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import polars as pl

from ..local_paths import local_path
from .id_columns import errors_name_file
from .user_sequences import DatasetFactory, SequencesMeta, UserDataset, UserSequences

SEQUENCES_FILE = "sequences.parquet"
META_FILE = "meta.json"
# Prepared folders record this order of tied events. A new order needs a new version.
TIE_ORDER = "splitmix64 of user and item, version 1"

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEPS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


class PreparedDataset(UserDataset):
    """A dataset that a preprocessor has converted to `sequences.parquet` and `meta.json`.

    Attributes:
        name: the dataset's name.
        preprocessor: module with the command that writes the files.
    """

    name: ClassVar[str]
    preprocessor: ClassVar[str]
    prepare: Callable[..., SequencesMeta]  # takes input folder, output folder, and options

    def read(self, directory: Path) -> UserSequences:
        """Reads the files that the preprocessor wrote to `directory`.

        Raises:
            FileNotFoundError: a file is missing. The message names the command that prepares it.
            ValueError: a file is malformed or belongs to another dataset.
        """
        prepare = f"python -m {self.preprocessor} --dataset {self.name} --out {directory}"
        paths = (directory / META_FILE, directory / SEQUENCES_FILE)
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist; prepare it with: {prepare}")
        advice = f"; prepare it again with: {prepare}"
        with errors_name_file(paths[0], advice):
            meta = SequencesMeta.read(paths[0])
            if meta.dataset != self.name:
                raise ValueError(f"it belongs to {meta.dataset!r}, expected {self.name!r}")
        with errors_name_file(paths[1], advice):
            columns = [*meta.contextual_feature_names, "items", "actions"]
            return UserSequences.from_table(pl.read_parquet(paths[1], columns=columns, glob=False), meta)


Dataset = TypeVar("Dataset", bound=PreparedDataset)


def register_formats(
    base: type[Dataset], formats: Mapping[str, Mapping[str, Any]]
) -> dict[str, type[Dataset]]:
    """Registers datasets that differ only in class attributes, and returns their classes by name.

    `formats` maps the name of each dataset to the attributes that differ from those of `base`.
    """
    datasets = {
        name: type(base.__name__, (base,), {"name": name, **attributes})
        for name, attributes in formats.items()
    }
    for name, dataset in datasets.items():
        DatasetFactory.register(name, dataset)
    return datasets


def run_preprocessor(
    datasets: Mapping[str, type[PreparedDataset]],
    description: str,
    arguments: Sequence[str] | None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Prepares a dataset as the command line says. On an error, prints one line and exits with code 1.

    Args:
        datasets: datasets of one preprocessor, by name.
        description, arguments: the command's description and arguments. None means this process's arguments.
        more: additional options of `prepare`, and the keyword arguments of `add_argument` for each.
    """
    from .. import quiet_logs  # noqa: F401  only here, where this is the program

    preprocessor = next(iter(datasets.values())).preprocessor
    parser = argparse.ArgumentParser(prog=f"python -m {preprocessor}", description=description)
    parser.add_argument("--dataset", required=True, choices=list(datasets))
    parser.add_argument("--raw", type=local_path, help="folder of the official files (data/DATASET/raw)")
    parser.add_argument("--out", type=local_path, help="folder to write to (data/DATASET)")
    for option, settings in (more or {}).items():
        parser.add_argument(option, **settings)
    options = vars(parser.parse_args(arguments))
    name, raw_dir, out_dir = (options.pop(option) for option in ("dataset", "raw", "out"))
    out_dir, raw_dir = out_dir or Path("data") / name, raw_dir or Path("data") / name / "raw"
    try:
        datasets[name]().prepare(raw_dir, out_dir, **options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{name} is in {out_dir}")


def check_one_line_per_user(path: Path, users: pl.Series, first_line: int) -> None:
    """Raises a ValueError that names the file and the line if a user has two lines in a file."""
    repeated = (~users.is_first_distinct()).arg_true()
    if len(repeated):
        row = repeated[0]
        raise ValueError(
            f"{path}, line {first_line + row}: user {users[row]} has a line above, expected one line per user"
        )


def tie_keys(users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Returns keys that order events of equal time, uint64 `[events]`, from integers `[events]`.

    The keys do not depend on the order of a file, which often follows the items' ids: a model would learn
    that order from histories in which most events are tied. The keys depend on the user, because a model
    could also learn an order of items that all users share.
    """
    return _mixed(_mixed(users.astype(np.uint64) + _GOLDEN) ^ items.astype(np.uint64))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Applies the finalizer of splitmix64 (Steele et al., OOPSLA 2014), a bijection of uint64."""
    for shift, factor in _STEPS:
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> np.uint64(31))
