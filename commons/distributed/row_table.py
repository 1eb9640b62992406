"""The rows of one step as numbers, which are all that planning knows about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..perf_model.cost import Cost

if TYPE_CHECKING:
    from .batch_format import Format


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows that ranks loaded for one step, as arrays of numbers.

    Rows are numbered across ranks: the real rows of rank 0's batch, then those of rank 1's, and so on. A row
    is a whole sample, or a piece of one. The pieces of a sample follow one another. Arrays are read-only
    views of the given ones.

    Attributes:
        batch_sizes: int64 `[ranks]`, rows of each rank's batch, padding included; 0 for a rank without one.
        num_loaded: int64 `[ranks]`, real rows of each rank's batch.
        workloads: int64 `[rows]`, cost of each row.
        tokens: int64 `[rows]`, tokens of each row.
        loss_tokens: int64 `[rows]`, loss tokens of each row; float64 if they are weights.
        key_lengths: int64 `[rows, keys]`, lengths of every key of every jagged field.
        sample_bytes: int64 `[rows]`, bytes of each row: its values, and its lengths in the planning gather.
        padding_lengths: int64 `[ranks, keys]`, summed lengths of each rank's padding rows. None means 0.
        work: int64 `[rows, columns]`, columns of `get_workloads`. None means one column, `workloads`.
        starts_sample: bool `[rows]`, False for the second and later pieces of a sample. None means all True.
        columns: the batches' `row_counts`, and extensions' arrays about the rows, `[rows, ...]` each, by
            name. A partitioner gets those that its signature names.
        posts: int64 `[ranks, numbers]` arrays of extensions' posts, by extension name.
        arguments: partitioner arguments by name, which override those from settings.
        partitioner: an extension's function that places the rows. None means the partitioner of the settings.
        cost: cost of a row by its counts. None means the sum of the columns of `work`.
        ranks: ranks of the job that loaded the rows. None means 0, 1, 2, and so on.
        speeds: float64 `[ranks]`, speeds that loads should be proportional to. None means that all are equal.
        ranks_per_node: consecutive ranks per node, if moves across nodes cost more. None if they do not.
        format: format that ranks agreed on. None before their first batch, and outside a shuffler.
    """

    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    workloads: np.ndarray
    tokens: np.ndarray
    loss_tokens: np.ndarray
    key_lengths: np.ndarray
    sample_bytes: np.ndarray
    padding_lengths: np.ndarray = None  # type: ignore[assignment]  # see __post_init__
    work: np.ndarray = None  # type: ignore[assignment]
    starts_sample: np.ndarray = None  # type: ignore[assignment]
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    posts: Mapping[str, np.ndarray] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    partitioner: Callable[..., Any] | None = None
    cost: Cost = None  # type: ignore[assignment]
    ranks: tuple[int, ...] = None  # type: ignore[assignment]
    speeds: np.ndarray | None = None
    ranks_per_node: int | None = None
    format: Format | None = None

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
        """Returns a table without rows."""
        none, no_batch = np.zeros(0, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
        return RowTable(no_batch, no_batch, none, none, none, none.reshape(0, 0), none)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that loaded the rows."""
        return len(self.batch_sizes)

    @cached_property
    def home(self) -> np.ndarray:
        """The rank that loaded each row, int64 `[rows]`."""
        return np.repeat(np.arange(self.num_ranks), self.num_loaded)

    @cached_property
    def home_start(self) -> np.ndarray:
        """The number of the first row that each rank loaded, int64 `[ranks]`."""
        return np.cumsum(self.num_loaded) - self.num_loaded

    @cached_property
    def sample_of(self) -> np.ndarray:
        """The number of each row's sample among all samples, int64 `[rows]`."""
        return np.cumsum(self.starts_sample) - 1

    def loaded_by(self, rank: int) -> np.ndarray:
        """Returns the ascending numbers of the rows that a rank loaded, int64."""
        return self.home_start[rank] + np.arange(self.num_loaded[rank])

    def lengths_as_loaded(self, rank: int) -> np.ndarray:
        """Returns the lengths of a rank's batch, padding rows included, int64 `[rows, keys]`.

        The first padding row gets the lengths of all padding rows, whose elements are adjacent.
        """
        own = self.key_lengths[self.loaded_by(rank)]
        lengths = np.zeros((max(int(self.batch_sizes[rank]), 1), own.shape[1]), dtype=np.int64)
        lengths[: len(own)] = own
        lengths[len(own) : len(own) + 1] = self.padding_lengths[rank]
        return lengths

    def where_loaded(self, number: int) -> tuple[int, int]:
        """Returns the rank that loaded a row, and the index of the row in that rank's batch.

        The index of a piece is that of its sample, in the batch before the cut.
        """
        rank = int(self.home[number])
        return rank, int(self.starts_sample[self.home_start[rank] : number + 1].sum()) - 1

    def with_cost(self, cost: Cost) -> RowTable:
        """Returns the table with the workloads that this cost gives; all rows must be whole samples."""
        return replace(self, workloads=cost.of(1, self.tokens, self.work), cost=cost)

    def take(self, numbers: np.ndarray) -> RowTable:
        """Returns the rows with these ascending numbers, which may repeat. Each row keeps its home."""
        per_rank = ("batch_sizes", "num_loaded", "padding_lengths", "speeds")
        per_row = {name: of for name, of in self._arrays().items() if name not in per_rank}
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
        """Returns all arrays of the table except `posts`, in an order that is the same on all ranks."""
        return [*self._arrays().values(), *(self.columns[name] for name in sorted(self.columns))]

    def _arrays(self) -> dict[str, np.ndarray]:
        values = ((spec.name, getattr(self, spec.name)) for spec in fields(self))
        return {name: value for name, value in values if isinstance(value, np.ndarray)}


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.setflags(write=False)
    return view
