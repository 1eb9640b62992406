"""The rows of one step as numbers: all that planning knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ..perf_model.cost import Cost


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows that ranks loaded for one step, a column for each thing that is known of them.

    Rows are numbered over the ranks: the real rows of rank 0's batch, then those of rank 1's, and so on. A
    row is a whole sample, or a piece of one; pieces of a sample follow one another.

    Arrays are read-only here: views of those that were given.

    Attributes:
        batch_sizes: int64 `[ranks]`, rows that each rank brings, padding included; 0 where it has no batch.
        num_loaded: int64 `[ranks]`, real rows that each rank brings.
        workloads: int64 `[rows]`, the cost of each.
        tokens: int64 `[rows]`.
        loss_tokens: int64 `[rows]`, or float64 where they are weights.
        key_lengths: int64 `[rows, keys]`, lengths of every key of every jagged field.
        sample_bytes: int64 `[rows]`, bytes of a row: its values, and its lengths in the planning gather.
        row_counts: int64 `[rows, names]`, what `BaseBatch.row_counts` says of each.
        padding_lengths: int64 `[ranks, keys]`, sums of the lengths in each rank's padding rows; None for
            zeros.
        work: int64 `[rows, columns]`, what `get_workloads` says of each; None for `workloads`.
        starts_sample: bool `[rows]`, False for the second and later pieces of a sample; None if there are
            none.
        columns: `[rows, ...]` each, what extensions know of the rows, by name. A partitioner gets those that
            its signature names.
        posts: int64 `[ranks, numbers]` each, what extensions posted, by their names.
        arguments: of partitioners, by name, in place of those from settings.
        cost: of rows by their counts; None for the sum of the columns of `work`.
        ranks: of the job, those that loaded the rows; None for 0 and those that follow.
        speeds: float64 `[ranks]`, for loads to be proportional to; None if all ranks are equally fast.
        ranks_per_node: consecutive ranks per node, where moves across nodes cost more; None if they do not.
    """

    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    workloads: np.ndarray
    tokens: np.ndarray
    loss_tokens: np.ndarray
    key_lengths: np.ndarray
    sample_bytes: np.ndarray
    row_counts: np.ndarray
    padding_lengths: np.ndarray = None  # type: ignore[assignment]  # see __post_init__
    work: np.ndarray = None  # type: ignore[assignment]
    starts_sample: np.ndarray = None  # type: ignore[assignment]
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    posts: Mapping[str, np.ndarray] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = None  # type: ignore[assignment]
    ranks: tuple[int, ...] = None  # type: ignore[assignment]
    speeds: np.ndarray | None = None
    ranks_per_node: int | None = None

    _per_rank: ClassVar = ("batch_sizes", "num_loaded", "padding_lengths", "speeds")

    def __post_init__(self) -> None:
        num_columns = 1 if self.work is None else max(self.work.shape[1], 1)
        defaults = {
            "padding_lengths": np.zeros((self.num_ranks, self.key_lengths.shape[1]), dtype=np.int64),
            "work": self.workloads[:, None],
            "starts_sample": np.ones(len(self.workloads), dtype=bool),
            "cost": Cost.sum_of_columns(num_columns),
            "ranks": tuple(range(self.num_ranks)),
        }
        for spec in fields(self):
            value = getattr(self, spec.name)
            value = defaults.get(spec.name) if value is None else value
            object.__setattr__(self, spec.name, _read_only(value) if isinstance(value, np.ndarray) else value)
        columns = {name: _read_only(column) for name, column in self.columns.items()}
        object.__setattr__(self, "columns", columns)

    @staticmethod
    def empty(num_ranks: int) -> RowTable:
        """Returns the table of a step without rows."""
        none, no_batch = np.zeros(0, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
        return RowTable(no_batch, no_batch, none, none, none, none.reshape(0, 0), none, none.reshape(0, 0))

    @property
    def num_ranks(self) -> int:
        """Ranks that loaded the rows."""
        return len(self.batch_sizes)

    @cached_property
    def home(self) -> np.ndarray:
        """int64 `[rows]`, the rank that loaded each row."""
        return np.repeat(np.arange(self.num_ranks), self.num_loaded)

    @cached_property
    def home_start(self) -> np.ndarray:
        """int64 `[ranks]`, number of the first row that each rank loaded."""
        return np.cumsum(self.num_loaded) - self.num_loaded

    @cached_property
    def sample_of(self) -> np.ndarray:
        """int64 `[rows]`, the number that the sample of each row has among whole samples."""
        return np.cumsum(self.starts_sample) - 1

    def loaded_by(self, rank: int) -> np.ndarray:
        """int64, the ascending numbers of the rows that a rank brings."""
        return self.home_start[rank] + np.arange(self.num_loaded[rank])

    def lengths_as_loaded(self, rank: int) -> np.ndarray:
        """Returns the lengths of a rank's batch, padding rows included, int64 `[rows, keys]`.

        The first padding row has what all of them have: together they take the same place.
        """
        own = self.key_lengths[self.loaded_by(rank)]
        lengths = np.zeros((max(int(self.batch_sizes[rank]), 1), own.shape[1]), dtype=np.int64)
        lengths[: len(own)] = own
        lengths[len(own) : len(own) + 1] = self.padding_lengths[rank]
        return lengths

    def where_loaded(self, number: int) -> tuple[int, int]:
        """Returns the rank that loaded a row, and the row in its batch.

        The row of a piece is that of its sample, in the batch as it was before the cut.
        """
        rank = int(self.home[number])
        return rank, int(self.starts_sample[self.home_start[rank] : number + 1].sum()) - 1

    def with_cost(self, cost: Cost) -> RowTable:
        """Returns whole samples with this cost of each."""
        return replace(self, workloads=cost.of(1, self.tokens, self.work), cost=cost)

    def take(self, numbers: np.ndarray) -> RowTable:
        """Returns the rows of these ascending numbers, which may repeat, with the ranks that loaded them."""
        per_row = {name: of for name, of in self._arrays().items() if name not in self._per_rank}
        taken: dict[str, Any] = {name: array.take(numbers, axis=0) for name, array in per_row.items()}
        num_loaded = np.bincount(self.home.take(numbers), minlength=self.num_ranks)
        return replace(
            self,
            **taken,
            columns={name: column[numbers] for name, column in self.columns.items()},
            batch_sizes=self.batch_sizes + num_loaded - self.num_loaded,
            num_loaded=num_loaded,
        )

    def arrays(self) -> list[np.ndarray]:
        """Returns all that the table holds, without names, in one order on all ranks."""
        return [*self._arrays().values(), *(self.columns[name] for name in sorted(self.columns))]

    def _arrays(self) -> dict[str, np.ndarray]:
        values = ((spec.name, getattr(self, spec.name)) for spec in fields(self))
        return {name: value for name, value in values if isinstance(value, np.ndarray)}


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.setflags(write=False)
    return view
