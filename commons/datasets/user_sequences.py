"""Users' sequences of events: in memory, on disk, and by dataset name."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl

from ..argument_checks import require
from ..local_paths import local_path
from ..registry import NamedFactory
from .id_columns import read_ids

USER_ID = "user_id"


@dataclass(frozen=True)
class SequencesMeta:
    """Features and labels of a dataset, as `meta.json` stores them.

    Attributes:
        dataset: name of the dataset.
        contextual_feature_names: names of the columns with one id per user.
        item_feature_name: name of the feature in the column "items".
        action_feature_name: name of the feature in the column "actions".
        vocab_sizes: number of ids of each feature. Ids are at least 0 and below it.
        num_classes: number of classes. An action id is 1 + its class.
        positive_class: first class that counts as positive. None means that classes have no order.
        num_tasks: number of tasks. If it is above 1, a class is a bit mask with bit t for task t, and
            `num_classes` is 2 ** `num_tasks`.
        unbounded_feature_names: features whose ids are any int64 except the smallest. Their `vocab_sizes` are
            the numbers of rows of dynamic tables, which reuse rows for new ids.
        tie_order: description of the order of events of equal time. None means that nothing orders them.

    The file omits `num_tasks`, `unbounded_feature_names`, and `tie_order` if they have their defaults, so
    files from before these entries existed still open.

    Raises:
        ValueError: `vocab_sizes` does not match the features, `num_tasks` does not match `num_classes`, or an
            unbounded feature is neither contextual nor the item feature.
    """

    dataset: str
    contextual_feature_names: list[str]
    item_feature_name: str
    action_feature_name: str
    vocab_sizes: dict[str, int]
    num_classes: int
    positive_class: int | None
    num_tasks: int = 1
    unbounded_feature_names: list[str] = field(default_factory=list)
    tie_order: str | None = None

    def __post_init__(self) -> None:
        are_masks = self.num_tasks > 1 and self.num_classes == 2**self.num_tasks
        require(self.num_tasks == 1 or are_masks, "num_tasks", self.num_tasks, "1, or log2 of num_classes")
        features = [*self.contextual_feature_names, self.item_feature_name, self.action_feature_name]
        if sorted(self.vocab_sizes) != sorted(features):
            raise ValueError(f"vocab_sizes has {sorted(self.vocab_sizes)}, expected {sorted(features)}")
        unbounded = self.unbounded_feature_names
        expected = f"some of {features[:-1]}"
        require(set(unbounded) <= set(features[:-1]), "unbounded_feature_names", unbounded, expected)

    def write(self, path: Path) -> None:
        """Writes the metadata to a JSON file."""
        optional = {"num_tasks": 1, "unbounded_feature_names": [], "tie_order": None}
        entries = dict(entry for entry in dataclasses.asdict(self).items() if entry not in optional.items())
        path.write_text(json.dumps(entries, indent=2) + "\n")

    @staticmethod
    def read(path: Path) -> SequencesMeta:
        """Reads the metadata from a JSON file.

        Raises:
            ValueError: the file is not JSON, or its entries contradict each other.
            TypeError: the entries are not the fields of this class, or an entry has the wrong type.
        """
        return SequencesMeta(**json.loads(local_path(path).read_text()))


@dataclass(frozen=True)
class UserSequences:
    """The sequences of all users, concatenated.

    Attributes:
        meta: features and labels.
        contextual: `[users]` int64 ids of each contextual feature.
        items: `[events]` int32 ids, or int64 if an id needs it. Each user's oldest event comes first.
        actions: `[events]` int32 ids.
        offsets: `[users + 1]` int64. The events of user u are in [offsets[u], offsets[u + 1]).
    """

    meta: SequencesMeta
    contextual: dict[str, np.ndarray]
    items: np.ndarray
    actions: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def open(directory: Path, dataset: str) -> UserSequences:
        """Reads a dataset from its folder, by its registered name.

        Raises:
            FileNotFoundError: a file is missing. The message says how to prepare it.
            ValueError: a file is malformed or belongs to another dataset, or no dataset has this name.
        """
        if not DatasetFactory.is_registered(dataset):
            raise ValueError(f"dataset = {dataset!r}: expected one of {DatasetFactory.list_available()}")
        return DatasetFactory.create(dataset).read(local_path(directory))

    @staticmethod
    def from_table(table: pl.DataFrame, meta: SequencesMeta) -> UserSequences:
        """Returns the sequences in a table with one row per user.

        Args:
            table: table with an integer column per contextual feature, and the list columns "items" and
                "actions", each user's oldest event first. Of other columns, only "user_id" is read.
            meta: features and labels.

        Raises:
            ValueError: a column does not contain integers, an id is outside its vocabulary, a user has no
                events or unequal numbers of items and actions, or a "user_id" is in two rows.
            PolarsError: a column is missing.
        """
        # With fewer ids than rows, as of hashes, users share ids.
        if USER_ID in table.columns and meta.vocab_sizes.get(USER_ID, len(table)) >= len(table):
            _check_one_row_per_user(table[USER_ID])
        names = [*meta.contextual_feature_names, "items", "actions"]
        features = [*names[:-2], meta.item_feature_name, meta.action_feature_name]
        table = table.select(names)
        *contextual, (items, offsets), (actions, action_offsets) = (
            read_ids(table[name], feature, name in ("items", "actions"), *_range_of(feature, meta))
            for name, feature in zip(names, features, strict=True)
        )
        lengths, num_actions = np.diff(offsets), np.diff(action_offsets)
        wrong = np.flatnonzero(lengths != num_actions)
        if len(wrong):
            found = f"a user has {lengths[wrong[0]]} items and {num_actions[wrong[0]]} actions"
            raise ValueError(f"row {wrong[0]}: {found}: expected one action per item")
        ids = {
            name: values.astype(np.int64)
            for name, (values, _) in zip(meta.contextual_feature_names, contextual, strict=True)
        }
        return UserSequences(meta, ids, items, actions, offsets)


def _check_one_row_per_user(users: pl.Series) -> None:
    """Raises a ValueError for a user in two rows, who would train beyond what the other row evaluates."""
    for row in np.flatnonzero((~users.is_first_distinct() & users.is_not_null()).to_numpy())[:1]:
        raise ValueError(
            f"row {row}: {USER_ID} {users[int(row)]!r} is in an earlier row, too: expected one row per user, "
            "with all events in the order of their time. Rows without a user need ids of their own, or none"
        )


def _range_of(feature: str, meta: SequencesMeta) -> tuple[int, int, str]:
    """Returns a feature's smallest and largest valid id, and a hint for an id that may be a hash."""
    if feature in meta.unbounded_feature_names:
        return 1 - 2**63, 2**63 - 1, ""
    most = meta.vocab_sizes[feature] - 1
    if feature == meta.action_feature_name:  # an action id is 1 + its class
        return 1, most, ""
    return 0, most, "; hashes and ids from 2^31 on need unbounded_feature_names"


class UserDataset(ABC):
    """A dataset of users' events, which gin files name in `DatasetArgs.dataset_name`.

    For your own data, subclass it, and register the subclass with `register_dataset`.
    """

    @abstractmethod
    def read(self, directory: Path) -> UserSequences:
        """Reads all events. `directory` is `DatasetArgs.dataset_path`, or data/`dataset_name` by default."""


class DatasetFactory(NamedFactory[UserDataset]):
    """Registers datasets and creates them by name."""

    kind = "dataset"
    base = UserDataset


Dataset = TypeVar("Dataset", bound=type[UserDataset])


def register_dataset(name: str) -> Callable[[Dataset], Dataset]:
    """Returns a class decorator that registers a `UserDataset` under a name.

    Raises:
        TypeError: the class does not derive from `UserDataset`.
        ValueError: the name is taken.
    """

    def register(dataset: Dataset) -> Dataset:
        DatasetFactory.register(name, dataset)
        return dataset

    return register
