"""Users' sequences of events: in memory, on disk, and by dataset name."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import polars as pl

from ..registry import NamedFactory

SEQUENCES_FILE = "sequences.parquet"
META_FILE = "meta.json"
_OPTIONAL_ENTRIES: dict[str, object] = {"num_tasks": 1, "unbounded_feature_names": [], "tie_order": None}


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
        num_tasks: number of tasks. If above 1, a class is a bit mask, bit t for task t, and `num_classes` is
            2 ** `num_tasks`.
        unbounded_feature_names: features whose ids are any int64 but the smallest. Their `vocab_sizes` are
            rows of a dynamic table, which ids take in turn.
        tie_order: order of a user's events of equal time, in words; None if nothing orders them.

    The file has `num_tasks`, `unbounded_feature_names` and `tie_order` only if they differ from their
    defaults, so files from before there were such entries still open.

    Raises:
        ValueError: `vocab_sizes` does not match the features, `num_tasks` the classes, or an unbounded
            feature is none of the ids'.
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
        if self.num_tasks < 1 or (self.num_tasks > 1 and self.num_classes != 2**self.num_tasks):
            raise ValueError(
                f"num_tasks = {self.num_tasks} does not go with num_classes = {self.num_classes}"
            )
        features = [*self.contextual_feature_names, self.item_feature_name, self.action_feature_name]
        if sorted(self.vocab_sizes) != sorted(features):
            raise ValueError(f"vocab_sizes has {sorted(self.vocab_sizes)}, expected {sorted(features)}")
        unknown = set(self.unbounded_feature_names) - set(features[:-1])
        if unknown:
            raise ValueError(
                f"unbounded_feature_names has {sorted(unknown)}, expected some of {sorted(features[:-1])}"
            )

    def write(self, path: Path) -> None:
        """Writes the JSON file."""
        entries = dataclasses.asdict(self)
        for name, default in _OPTIONAL_ENTRIES.items():
            if entries[name] == default:
                del entries[name]
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
        if not isinstance(entries, dict) or {*entries, *_OPTIONAL_ENTRIES} != set(expected):
            found = list(entries) if isinstance(entries, dict) else type(entries).__name__
            raise ValueError(
                f"expected the entries {expected}, of which {', '.join(_OPTIONAL_ENTRIES)} may be absent; "
                f"it has {found}"
            )
        return SequencesMeta(**entries)


@dataclass(frozen=True)
class UserSequences:
    """The sequences of all users, concatenated.

    Attributes:
        meta: features and labels.
        contextual: `[users]` int64 per contextual feature.
        items: `[events]` int32, or int64 if an id needs it, each user's oldest first.
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
            nulls = table[name].is_null().arg_true()
            if len(nulls):
                raise ValueError(f"row {nulls[0]}: column {name!r} is null")
        lengths, num_actions = (table[name].list.len().cast(pl.Int64).to_numpy() for name in list_columns)
        wrong = np.flatnonzero((lengths != num_actions) | (lengths == 0))
        if len(wrong):
            raise ValueError(
                f"row {wrong[0]}: a user has {lengths[wrong[0]]} items and {num_actions[wrong[0]]} actions: "
                "expected at least one item, and one action per item"
            )
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(len(table) + 1)
        ids = {
            name: _checked_ids(name, table[name], meta, rows).astype(np.int64)
            for name in meta.contextual_feature_names
        }
        items, actions = (
            _checked_ids(feature, table[column].explode(), meta, offsets)
            for feature, column in ((meta.item_feature_name, "items"), (meta.action_feature_name, "actions"))
        )
        return UserSequences(meta, ids, items, actions, offsets)


def _check_integers(column: str, dtype: pl.DataType, in_lists: bool) -> None:
    inner = dtype.inner if in_lists and isinstance(dtype, pl.List) else dtype
    if in_lists != isinstance(dtype, pl.List) or not inner.is_integer():
        expected = "lists of integers" if in_lists else "integers"
        raise ValueError(f"column {column!r} is {dtype}: expected {expected}")


def _checked_ids(feature: str, values: pl.Series, meta: SequencesMeta, offsets: np.ndarray) -> np.ndarray:
    """Returns the ids of all rows, concatenated, in int32 if that holds them.

    Args:
        feature: its name.
        values: integers, row after row.
        meta: description with the feature's range.
        offsets: int64 `[rows + 1]`, where each row's values begin.

    Raises:
        ValueError: an id is null, or outside its range. Names the feature and the row.
    """
    if feature in meta.unbounded_feature_names:
        least, most, hint = 1 - 2**63, 2**63 - 1, ""
    else:
        # An action is 1 + its class.
        least, most = int(feature == meta.action_feature_name), meta.vocab_sizes[feature] - 1
        hint = "; hashes and ids from 2^31 on need unbounded_feature_names" if least == 0 else ""
    ids = values if values.dtype in (pl.Int32, pl.Int64) else values.cast(pl.Int64, strict=False)
    outside = (~ids.is_between(least, most)).fill_null(True).arg_true()
    if len(outside):
        place = outside[0]
        row = int(np.searchsorted(offsets, place, side="right")) - 1
        found = "null" if values[place] is None else str(values[place])
        is_hash = values[place] is not None and not 0 <= values[place] < 2**31
        raise ValueError(
            f"row {row}: feature {feature!r} has id {found}: expected {least} to {most}{hint * is_hash}"
        )
    fits = bool(ids.is_between(-(2**31), 2**31 - 1).all())
    return ids.cast(pl.Int32 if fits else pl.Int64).to_numpy()


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
            reason = " ".join(str(error).split())  # polars' errors have several lines
            raise ValueError(f"{path} is malformed: {reason}; prepare it again with: {prepare}") from error


def check_one_line_per_user(path: Path, users: pl.Series, first_line: int) -> None:
    """Raises ValueError, which names the file and the line, if a user has two lines of a file."""
    repeated = (~users.is_first_distinct()).arg_true()
    if len(repeated):
        row = repeated[0]
        raise ValueError(
            f"{path}, line {first_line + row}: user {users[row]} has a line above, expected one line per user"
        )
