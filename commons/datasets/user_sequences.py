"""Users' sequences on disk, as the preprocessors write them and the sources read them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from commons.datasets import kuairand_format, movielens_format

SEQUENCES_FILE = "sequences.parquet"
META_FILE = "meta.json"
# The module that prepares each dataset.
PREPROCESSORS = dict.fromkeys(movielens_format.FORMATS, "commons.datasets.movielens_preprocess")
PREPROCESSORS |= dict.fromkeys(kuairand_format.FORMATS, "commons.datasets.kuairand_preprocess")


@dataclass(frozen=True)
class SequencesMeta:
    """What `meta.json` says.

    Attributes:
        dataset: the dataset's name.
        contextual_feature_names: columns with one id per user.
        item_feature_name: name of the feature in the column "items".
        action_feature_name: name of the feature in the column "actions".
        vocab_sizes: ids of each feature are 0 to this, exclusive.
        num_classes: action ids are 1 + a class, of which there are so many.
        positive_class: classes from this on are positive; None where classes have no such order.
        num_tasks: if above 1, a class is a bit mask, bit t that of task t, and `num_classes` is 2 to
            this. The file has the entry only then, and files from before there were tasks still open.
    """

    dataset: str
    contextual_feature_names: list[str]
    item_feature_name: str
    action_feature_name: str
    vocab_sizes: dict[str, int]
    num_classes: int
    positive_class: int | None
    num_tasks: int = 1

    def write(self, path: Path) -> None:
        """Writes the JSON file."""
        entries = dataclasses.asdict(self)
        if self.num_tasks == 1:
            del entries["num_tasks"]
        path.write_text(json.dumps(entries, indent=2) + "\n")

    @staticmethod
    def read(path: Path) -> SequencesMeta:
        """Reads the JSON file.

        Raises:
            ValueError: it is no JSON, or its entries are not those of this class.
            TypeError: an entry is of another type.
        """
        entries = json.loads(path.read_text())
        expected = [spec.name for spec in dataclasses.fields(SequencesMeta)]
        if not isinstance(entries, dict) or {*entries, "num_tasks"} != set(expected):
            raise ValueError(f"expected the entries {expected}, num_tasks only of several tasks")
        meta = SequencesMeta(**entries)
        if meta.num_tasks < 1 or (meta.num_tasks > 1 and meta.num_classes != 2**meta.num_tasks):
            raise ValueError(
                f"num_tasks = {meta.num_tasks} does not go with num_classes = {meta.num_classes}"
            )
        features = [*meta.contextual_feature_names, meta.item_feature_name, meta.action_feature_name]
        if sorted(meta.vocab_sizes) != sorted(features):
            raise ValueError(f"vocab_sizes has {sorted(meta.vocab_sizes)}, expected {sorted(features)}")
        return meta


@dataclass(frozen=True)
class UserSequences:
    """All users' sequences, one behind the other.

    Attributes:
        meta: the dataset's features.
        contextual: `[users]` by contextual feature.
        items: `[events]` int32, each user's oldest first.
        actions: `[events]` int32.
        offsets: `[users + 1]` int64; user u's events are `offsets[u]` to `offsets[u + 1]`, exclusive.
    """

    meta: SequencesMeta
    contextual: dict[str, np.ndarray]
    items: np.ndarray
    actions: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def open(directory: Path, dataset: str) -> UserSequences:
        """Reads what the dataset's preprocessor wrote to `directory`.

        Raises:
            FileNotFoundError: a file is absent.
            ValueError: a file is malformed, or of another dataset.
            Both name the file and the command that prepares it.
            ValueError: no preprocessor prepares such a dataset.
        """
        if dataset not in PREPROCESSORS:
            raise ValueError(f"dataset = {dataset!r}: expected one of {sorted(PREPROCESSORS)}")
        prepare = f"python -m {PREPROCESSORS[dataset]} --dataset {dataset} --out {directory}"
        paths = (directory / META_FILE, directory / SEQUENCES_FILE)
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist; prepare it with: {prepare}")
        path = paths[0]
        try:
            meta = SequencesMeta.read(path)
            if meta.dataset != dataset:
                raise ValueError(f"it is of {meta.dataset!r}, expected {dataset!r}")
            path = paths[1]
            return _read_sequences(path, meta)
        except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
            raise ValueError(f"{path} is malformed: {error}; prepare it again with: {prepare}") from error


def _read_sequences(path: Path, meta: SequencesMeta) -> UserSequences:
    list_columns = ["items", "actions"]
    table = pl.read_parquet(path, columns=[*meta.contextual_feature_names, *list_columns])
    lengths = table["items"].list.len()
    if not (lengths == table["actions"].list.len()).all() or not (lengths > 0).all():
        raise ValueError("a user has no items, or not one action per item")
    ids = {name: table[name].cast(pl.Int64).to_numpy() for name in meta.contextual_feature_names}
    items, actions = (table[name].explode().cast(pl.Int32).to_numpy() for name in list_columns)
    for name, values in {**ids, meta.item_feature_name: items, meta.action_feature_name: actions}.items():
        _check_range(name, values, meta.vocab_sizes[name])
    if len(actions) and int(actions.min()) < 1:
        raise ValueError("an action id is 0; classes start at action id 1")
    offsets = np.concatenate([[0], lengths.cast(pl.Int64).cum_sum().to_numpy()])
    return UserSequences(meta, ids, items, actions, offsets)


def _check_range(feature: str, ids: np.ndarray, vocab_size: int) -> None:
    # Nulls arrive as NaN, which fails the comparison.
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(
            f"feature {feature!r} has ids {ids.min()} to {ids.max()} in a vocabulary of {vocab_size}"
        )
