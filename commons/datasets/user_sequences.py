"""Users' sequences of events: in memory, on disk, and by dataset name."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import polars as pl

from ..registry import NamedFactory

SEQUENCES_FILE = "sequences.parquet"
META_FILE = "meta.json"


@dataclass(frozen=True)
class SequencesMeta:
    """Features and labels of a dataset, as `meta.json` stores them.

    Attributes:
        dataset: the dataset's name.
        contextual_feature_names: columns with one id per user.
        item_feature_name: name of the feature in the column "items".
        action_feature_name: name of the feature in the column "actions".
        vocab_sizes: ids of each feature are 0 to this, exclusive.
        num_classes: number of classes. An action id is 1 + its class.
        positive_class: classes from this one on are positive; None if classes have no order.
        num_tasks: if above 1, a class is a bit mask, bit t for task t, and `num_classes` is 2 ** `num_tasks`.
            The file has the entry only then, so files written before there were tasks still open.

    Raises:
        ValueError: `vocab_sizes` does not match the features, or `num_tasks` the classes.
    """

    dataset: str
    contextual_feature_names: list[str]
    item_feature_name: str
    action_feature_name: str
    vocab_sizes: dict[str, int]
    num_classes: int
    positive_class: int | None
    num_tasks: int = 1

    def __post_init__(self) -> None:
        if self.num_tasks < 1 or (self.num_tasks > 1 and self.num_classes != 2**self.num_tasks):
            raise ValueError(
                f"num_tasks = {self.num_tasks} does not go with num_classes = {self.num_classes}"
            )
        features = [*self.contextual_feature_names, self.item_feature_name, self.action_feature_name]
        if sorted(self.vocab_sizes) != sorted(features):
            raise ValueError(f"vocab_sizes has {sorted(self.vocab_sizes)}, expected {sorted(features)}")

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
            ValueError: the file is not JSON, or its entries are not those of this class.
            TypeError: an entry has the wrong type.
        """
        entries = json.loads(path.read_text())
        expected = [entry.name for entry in dataclasses.fields(SequencesMeta)]
        if not isinstance(entries, dict) or {*entries, "num_tasks"} != set(expected):
            raise ValueError(f"expected the entries {expected}, num_tasks only for several tasks")
        return SequencesMeta(**entries)


@dataclass(frozen=True)
class UserSequences:
    """The sequences of all users, concatenated.

    Attributes:
        meta: features and labels.
        contextual: `[users]` int64 per contextual feature.
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
        """Reads a dataset from its folder by the name it is registered under.

        Raises:
            FileNotFoundError: a file is missing. The message says how to prepare it.
            ValueError: a file is malformed or belongs to another dataset, or no dataset has this name.
        """
        if not DatasetFactory.is_registered(dataset):
            raise ValueError(f"dataset = {dataset!r}: expected one of {DatasetFactory.list_available()}")
        return DatasetFactory.create(dataset).read(directory)

    @staticmethod
    def from_table(table: pl.DataFrame, meta: SequencesMeta) -> UserSequences:
        """Takes a table with one row per user.

        Args:
            table: an integer column per contextual feature, and the list columns "items" and "actions", each
                user's oldest event first. Other columns are ignored.
            meta: features and labels.

        Raises:
            ValueError: a column does not hold integers, an id is outside its vocabulary, or a user lacks
                items or actions.
            PolarsError: a column is missing.
        """
        list_columns = ["items", "actions"]
        table = table.select(*meta.contextual_feature_names, *list_columns)
        for name, dtype in table.schema.items():
            _check_integers(name, dtype, in_lists=name in list_columns)
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


def _check_integers(column: str, dtype: pl.DataType, in_lists: bool) -> None:
    inner = dtype.inner if in_lists and isinstance(dtype, pl.List) else dtype
    if in_lists != isinstance(dtype, pl.List) or not inner.is_integer():
        expected = "lists of integers" if in_lists else "integers"
        raise ValueError(f"column {column!r} is {dtype}: expected {expected}")


def _check_range(feature: str, ids: np.ndarray, vocab_size: int) -> None:
    # Nulls arrive as NaN, which fails the comparison.
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(
            f"feature {feature!r} has ids {ids.min()} to {ids.max()} in a vocabulary of {vocab_size}"
        )


class UserDataset(ABC):
    """A dataset of users' events, which gin files name in `DatasetArgs.dataset_name`.

    Subclass it for data of your own and register the class with `register_dataset`.
    """

    @abstractmethod
    def read(self, directory: Path) -> UserSequences:
        """Reads all events. `directory` is `DatasetArgs.dataset_path`, by default data/`dataset_name`."""


class DatasetFactory(NamedFactory[UserDataset]):
    """Registers datasets and creates them by name."""

    kind = "dataset"
    base = UserDataset


Dataset = TypeVar("Dataset", bound=type[UserDataset])


def register_dataset(name: str) -> Callable[[Dataset], Dataset]:
    """Class decorator that registers a `UserDataset` under a name.

    Raises:
        TypeError: the class does not derive from `UserDataset`.
        ValueError: the name is taken.
    """

    def register(dataset: Dataset) -> Dataset:
        DatasetFactory.register(name, dataset)
        return dataset

    return register


class PreparedDataset(UserDataset):
    """A dataset that a preprocessor has converted to `sequences.parquet` and `meta.json`.

    Attributes:
        name: the dataset's name.
        preprocessor: module with the command that writes the files.
    """

    name: ClassVar[str]
    preprocessor: ClassVar[str]

    def read(self, directory: Path) -> UserSequences:
        """Reads what the preprocessor wrote to `directory`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is malformed or belongs to another dataset.
            Both name the file and the command that prepares it.
        """
        prepare = f"python -m {self.preprocessor} --dataset {self.name} --out {directory}"
        paths = (directory / META_FILE, directory / SEQUENCES_FILE)
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist; prepare it with: {prepare}")
        path = paths[0]
        try:
            meta = SequencesMeta.read(path)
            if meta.dataset != self.name:
                raise ValueError(f"it belongs to {meta.dataset!r}, expected {self.name!r}")
            path = paths[1]
            columns = [*meta.contextual_feature_names, "items", "actions"]
            return UserSequences.from_table(pl.read_parquet(path, columns=columns), meta)
        except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
            raise ValueError(f"{path} is malformed: {error}; prepare it again with: {prepare}") from error
