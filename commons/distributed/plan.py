"""A step as data: the format of its rows, their numbers, and for each row the rank that computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..partition.problem import indices_of_parts
from ..perf_model.cost import Cost, sum_counts

if TYPE_CHECKING:
    from ..sequence_batch.fields import Schema
    from ..sequence_batch.packed_rows import Selection


@dataclass(frozen=True)
class Format:
    """The format of batches and rows in all steps, equal on all ranks.

    Attributes:
        schema: schema of the batch's fields.
        num_work: number of columns that `get_workloads` returns.
        count_names: names of the batch's `row_counts`.
        column_names: names of the columns of a row: `count_names`, and then those of the extensions.
        loss_dtype: dtype of loss tokens, "int64" or "float64".
        pads: whether batches know their padding rows, and so may be padded.
        agreed: values that the extensions agree on, by extension name.
    """

    schema: Schema
    num_work: int
    count_names: tuple[str, ...] = ()
    column_names: tuple[str, ...] = ()
    loss_dtype: str = "int64"
    pads: bool = True
    agreed: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        columns = f", and {', '.join(self.column_names)}" if self.column_names else ""
        weights = ", loss tokens of float64" if self.loss_dtype == "float64" else ""
        return f"{self.num_work} columns of get_workloads{weights}{columns}"

    def row(self, is_wide: bool) -> np.dtype:
        """The numbers of a row. Unless it is wide, tokens and whole loss tokens take 4 bytes."""
        tokens = np.int64 if is_wide else np.int32
        return np.dtype(
            [
                ("work", np.int64, (self.num_work,)),
                ("tokens", tokens),
                ("loss_tokens", tokens if self.loss_dtype == "int64" else self.loss_dtype),
                ("columns", np.int64, (len(self.column_names),)),
                ("key_lengths", np.int32, (self.schema.num_keys,)),
            ]
        )

    def message(self, posts: np.dtype, num_rows: int, is_wide: bool = False) -> np.dtype:
        """The numbers that a rank sends for a step.

        `facts` is a hash of its batch's plain values. A batch has at least one row, so a `num_rows` of 0
        means that a rank has no batch.
        """
        return np.dtype(
            [
                *((name, np.int64) for name in ("failed", "is_wide", "facts", "num_rows", "num_real")),
                ("padding_lengths", np.int64, (self.schema.num_keys,)),
                ("posts", posts),
                ("rows", self.row(is_wide), (num_rows,)),
            ]
        )

    def table(self, messages: np.ndarray) -> RowTable:
        """Returns the rows of all ranks, from their messages, `[ranks]`. A row costs the sum of its work."""
        is_real = np.arange(messages["rows"].shape[1]) < messages["num_real"][:, None]
        rows = messages["rows"][is_real]
        key_lengths, tokens = (rows[name].astype(np.int64) for name in ("key_lengths", "tokens"))
        work, columns = (np.ascontiguousarray(rows[name]) for name in ("work", "columns"))
        return RowTable(
            batch_sizes=messages["num_rows"].copy(),
            num_loaded=messages["num_real"].copy(),
            workloads=Cost.sum_of_columns(self.num_work).of(1, tokens, work),
            tokens=tokens,
            loss_tokens=rows["loss_tokens"].astype(self.loss_dtype),
            key_lengths=key_lengths,
            sample_bytes=self.schema.row_bytes(key_lengths),
            padding_lengths=messages["padding_lengths"].copy(),
            work=work,
            columns=dict(zip(self.column_names, columns.T, strict=True)),
            format=self,
        )

    def row_counts(self, rows: RowTable, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Returns what `BaseBatch.row_counts_on_host` does, for the rows with these numbers."""
        counts = {name: rows.columns[name][numbers] for name in self.count_names}
        return self.schema.by_name(rows.key_lengths[numbers]) | counts

    def check_same(self, first: int | None, rank: int, other: Format) -> None:
        """Checks that `rank`'s format `other` equals this one, of rank `first` (None means the first batch).

        Raises:
            ValueError: the formats differ.
        """
        whose = "the first batch" if first is None else f"rank {first}"
        if other.schema != self.schema:
            raise ValueError(
                f"rank {rank} has a batch that differs from that of {whose}: "
                f"{self.schema.difference(other.schema)}; batches of all ranks and steps must have the same "
                "fields, keys, dtypes and trailing shapes. Give an empty or zero tensor for a field that a "
                "step lacks. To change fields for good, make a new shuffler, and a new pipeline with it"
            )
        for name, value in other.agreed.items():
            if value != self.agreed[name]:
                raise ValueError(
                    f"rank {rank}'s batch has {value} for {name}, but that of {whose} has {self.agreed[name]}"
                )
        if str(other) != str(self):
            raise ValueError(
                f"rank {rank} has a batch with {other}, but {whose} has {self}. All ranks need the same "
                "shuffler and row_counts, in all steps"
            )
        if other.pads != self.pads:
            raise ValueError(
                f"a batch of rank {rank} and that of {whose} are of different types, of which only one knows "
                "its padding rows; all ranks must have batches of one type"
            )


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
        bins: int64 `[ranks]`, bin of each rank, in which ranks gather and compute all rows. None without.
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
    bins: np.ndarray | None = None
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
        per_rank = ("batch_sizes", "num_loaded", "padding_lengths", "speeds", "bins")
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


# Name of the column in `RowTable.columns` with each row's micro-batch on its rank, if `num_parts` is not 0.
MICRO_BATCH = "micro_batch"


@dataclass(frozen=True)
class RankLoads:
    """Loads of ranks that are not sums over their rows, as in models that pad rows to the longest one."""

    before: np.ndarray  # float64 [ranks], as loaded
    after: np.ndarray  # float64 [ranks], as placed
    least: float  # largest load of the best placement


@dataclass(frozen=True, eq=False)
class JobStep:
    """Facts about a step that all ranks of a job know, even if only some of them exchange.

    Attributes mean the same as in `ShufflePlan`, over all ranks of the job. Loads follow the shuffler's cost,
    because each set of ranks may learn a cost of its own.

    Attributes:
        posts: posts of extensions with a `take` hook, `[ranks]`, with a field for each extension.
        total_load: sum of all workloads, float64.
    """

    has_batch: bool
    num_loss_tokens: int | float
    num_placed: np.ndarray
    loads_before: np.ndarray
    loads: np.ndarray
    posts: np.ndarray
    total_load: float

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the job."""
        return len(self.num_placed)


@dataclass(frozen=True)
class Route:
    """The rows that one rank sends, receives, and ends up with, computed on the host.

    Attributes:
        leaving: chunks of rows to send, one per receiving rank or one for all. None means no collective.
        sent_bytes, received_bytes: bytes to and from each rank.
        arriving: sending ranks, ascending, each with the lengths of its rows, int64 `[rows, keys]`.
        keeps: whether `placed` selects from the rows that the rank held, followed by the arriving rows. If
            False, it selects only from the arriving rows.
        placed: rows that the rank ends up with, padding included.
        gathers: whether an all-gather sends the rows of every rank to all ranks, padded to equal sizes.
    """

    leaving: Selection | None
    sent_bytes: list[int]
    received_bytes: list[int]
    arriving: list[tuple[int, np.ndarray]]
    keeps: bool
    placed: Selection
    gathers: bool = False

    def pinned(self) -> Route:
        """Returns the route with its indices in pinned memory."""
        leaving = None if self.leaving is None else self.leaving.pinned()
        return replace(self, leaving=leaving, placed=self.placed.pinned())


@dataclass(frozen=True, eq=False)
class ShufflePlan:
    """The placement of one step: plain data, equal on all ranks of the plan but for `route`.

    Provisional: may change in a minor version.

    Attributes:
        rows: rows that the ranks loaded. Pieces replace the samples that were cut.
        destination: int64 `[rows]`, the rank that computes each row.
        num_rows: int64 `[ranks]`, rows of each rank's exchanged batch, padding included; at least 1.
        predicted_seconds: float64 `[ranks]`, compute time by a cost fitted to times. None without one.
        num_parts: number of micro-batches on every rank. 0 means that batches run whole.
        job: facts about the step that all ranks of the job know. None if the plan covers all ranks, or if no
            pipeline shares these facts.
        rank_loads: loads of ranks, from an extension. None if they are the sums of their rows' workloads.
        route: rows that this rank sends and receives. None if samples never move, or outside a shuffler.
    """

    rows: RowTable
    destination: np.ndarray
    num_rows: np.ndarray
    predicted_seconds: np.ndarray | None = None
    num_parts: int = 0
    job: JobStep | None = None
    rank_loads: RankLoads | None = None
    route: Route | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the plan."""
        return self.rows.num_ranks

    @property
    def whole(self) -> ShufflePlan | JobStep:
        """The step over all ranks that plan in step: `job` if it is known, otherwise this plan."""
        return self if self.job is None else self.job

    @property
    def has_batch(self) -> bool:
        """Whether any rank of the plan loaded a batch. If not, the loaders of all its ranks have ended."""
        return bool(self.rows.batch_sizes.any())

    @cached_property
    def num_loss_tokens(self) -> int | float:
        """Sum of `loss_tokens_on` over all ranks of the plan. A float if they are weights."""
        bins = self.rows.bins
        copies = 1 if bins is None else int(np.count_nonzero(bins == bins[0]))
        return sum_loss_tokens(self.rows.loss_tokens) * copies

    def loss_tokens_on(self, rank: int) -> int | float:
        """Returns the loss tokens of the rows that a rank computes, alone or with the ranks of its bin."""
        bins, of_rank = self.rows.bins, self.destination
        is_own = of_rank == rank if bins is None else bins[of_rank] == bins[rank]
        return sum_loss_tokens(self.rows.loss_tokens[is_own])

    @cached_property
    def partition(self) -> tuple[np.ndarray, ...]:
        """Numbers of the rows that each rank computes, ascending, one array per rank."""
        return tuple(indices_of_parts(self.destination, self.num_ranks))

    @cached_property
    def num_placed(self) -> np.ndarray:
        """int64 `[ranks]`, number of rows that each rank computes. They come first in its batch."""
        return np.bincount(self.destination, minlength=self.num_ranks)

    @cached_property
    def moves(self) -> bool:
        """Whether any row leaves its home."""
        return bool((self.rows.home != self.destination).any())

    @property
    def loads_before(self) -> np.ndarray:
        """float64 `[ranks]`, sum of the workloads that each rank loaded, or `rank_loads`."""
        return self._sums(self.rows.home) if self.rank_loads is None else self.rank_loads.before

    @property
    def loads(self) -> np.ndarray:
        """float64 `[ranks]`, sum of the workloads that each rank computes, or `rank_loads`."""
        return self._sums(self.destination) if self.rank_loads is None else self.rank_loads.after

    def _sums(self, rank_of: np.ndarray) -> np.ndarray:
        return np.bincount(rank_of, self.rows.workloads, minlength=self.num_ranks)

    @property
    def total_load(self) -> float:
        """Sum of all workloads."""
        return float(self.rows.workloads.sum(dtype=np.float64))

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that this rank sends to other ranks in the exchange, and receives from them."""
        if self.route is None or not self.moves:
            return 0, 0
        first = int(self.route.gathers)  # one of the equal sizes is for its own bytes
        return sum(self.route.sent_bytes[first:]), sum(self.route.received_bytes[first:])

    @cached_property
    def counts(self) -> np.ndarray:
        """float64 `[ranks, 2 + columns]`, sums of the counts in a cost: samples, tokens, and `work`."""
        rows = self.rows
        return sum_counts(rows.starts_sample, rows.tokens, rows.work, self.destination, self.num_ranks)

    def computed_by(self, rank: int) -> np.ndarray:
        """Returns the ascending numbers of the rows that a rank computes, int64."""
        return np.flatnonzero(self.destination == rank)

    def with_seconds(self, cost: Cost, speeds: np.ndarray | float = 1.0) -> ShufflePlan:
        """Returns the plan with the compute time that a cost predicts for each rank at its speed."""
        return replace(self, predicted_seconds=(cost.per_step + self.loads) * 1e-9 / speeds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShufflePlan):
            return NotImplemented
        mine, others = self.arrays(), other.arrays()
        return len(mine) == len(others) and all(map(np.array_equal, mine, others))

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays that make up the plan, without `job`."""
        values = (self.destination, self.num_rows, self.predicted_seconds, np.array([self.num_parts]))
        return self.rows.arrays() + [value for value in values if value is not None]


def sum_loss_tokens(loss_tokens: np.ndarray) -> int | float:
    """Returns the sum of int64 or float64 `[rows]`, which does not depend on the order of rows.

    Raises:
        OverflowError: the integers add up to 2**63 or more.
    """
    if loss_tokens.dtype.kind == "f":
        return math.fsum(loss_tokens)
    if loss_tokens.sum(dtype=np.float64) >= 2.0**63:
        total = sum(loss_tokens.tolist())
        raise OverflowError(f"loss tokens add up to {total}, more than int64 holds: check get_loss_tokens")
    return int(loss_tokens.sum())
