"""The samples that ranks loaded, as numbers: what planning knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from ..perf_model.cost import Cost


@dataclass(frozen=True, eq=False)
class LoadedSamples:
    """The samples of one step, as ranks loaded them.

    Samples are numbered over the ranks: the real rows of rank 0's batch, then those of rank 1's, and so on.
    Where samples are cut, each of their pieces is a row with a number of its own, and batches are those with
    the pieces in the samples' places.

    Arrays are read-only here: views of those that were given.

    Attributes:
        batch_sizes: int64 `[ranks]`, rows that each rank brings; 0 where it has no batch.
        num_loaded: int64 `[ranks]`, real rows that each rank brings.
        workloads: int64 `[samples]`, the cost of each.
        tokens, loss_tokens: int64 `[samples]`.
        num_elements: int64 `[samples, jagged fields]`, elements of each sample in each jagged field.
        sample_bytes: int64 `[samples]`, bytes of a sample on the wire.
        row_counts: int64 `[samples, names]`, what `BaseBatch.row_counts` says of each.
        pieces: `[samples]` of dtype `PIECE`, the place of each row in its sample; None where none is cut.
        work: int64 `[samples, columns]`, what `get_workloads` says of each; None for `workloads`.
        groups: int64 `[samples]`, equal for samples that belong together, negative for one that belongs to
            none; None where none do.
    """

    batch_sizes: np.ndarray
    num_loaded: np.ndarray
    workloads: np.ndarray
    tokens: np.ndarray
    loss_tokens: np.ndarray
    num_elements: np.ndarray
    sample_bytes: np.ndarray
    row_counts: np.ndarray
    pieces: np.ndarray | None = field(default=None, kw_only=True)
    groups: np.ndarray | None = field(default=None, kw_only=True)
    work: np.ndarray = field(default=None, kw_only=True)  # type: ignore[arg-type]  # see __post_init__

    _per_sample: ClassVar[Sequence[str]] = (
        "workloads",
        "tokens",
        "loss_tokens",
        "num_elements",
        "sample_bytes",
        "row_counts",
        "work",
    )

    def __post_init__(self) -> None:
        if self.work is None:
            object.__setattr__(self, "work", self.workloads[:, None])
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, np.ndarray):
                view = value.view()
                view.setflags(write=False)
                object.__setattr__(self, spec.name, view)

    @cached_property
    def starts_sample(self) -> np.ndarray:
        """bool `[samples]`, False for the second and later pieces of a sample."""
        if self.pieces is None:
            return np.ones(len(self.workloads), dtype=bool)
        return self.pieces["first_item"] == 0

    @cached_property
    def sample_of(self) -> np.ndarray:
        """int64 `[samples]`, the number that the sample of each row has among whole samples."""
        return np.cumsum(self.starts_sample) - 1

    def with_cost(self, cost: Cost) -> Self:
        """Returns whole samples with this cost of each."""
        return replace(self, workloads=cost.of(1, self.tokens, self.work))

    @property
    def num_ranks(self) -> int:
        """Ranks that loaded the samples."""
        return len(self.batch_sizes)

    @cached_property
    def home(self) -> np.ndarray:
        """int64 `[samples]`, the rank that loaded each sample."""
        return np.repeat(np.arange(self.num_ranks), self.num_loaded)

    @cached_property
    def home_start(self) -> np.ndarray:
        """int64 `[ranks]`, number of the first sample that each rank loaded."""
        return np.cumsum(self.num_loaded) - self.num_loaded

    def loaded_by(self, ranks: int | np.ndarray) -> np.ndarray:
        """int64, the numbers of the samples that a rank brings, or several, one rank after another."""
        start, count = self.home_start[ranks], self.num_loaded[ranks]
        before = np.cumsum(count) - count  # samples of the ranks before
        return np.repeat(start - before, count) + np.arange(count.sum())

    def where_loaded(self, sample: int) -> tuple[int, int]:
        """Returns the rank that loaded a sample, and the row in its batch.

        The row of a piece is that of its sample, in the batch as it was before the cut.
        """
        rank = int(self.home[sample])
        return rank, int(self.starts_sample[self.home_start[rank] : sample + 1].sum()) - 1

    def within(self, ranks: np.ndarray) -> Self:
        """Returns what `ranks`, int64 and ascending, loaded, numbered anew."""
        among = self._of_samples(self.loaded_by(ranks))
        return replace(among, batch_sizes=self.batch_sizes[ranks], num_loaded=self.num_loaded[ranks])

    def _of_samples(self, numbers: np.ndarray) -> Self:
        """Keeps these samples; what is not per sample stays."""
        of_samples = {name: getattr(self, name).take(numbers, axis=0) for name in self._per_sample}
        for name in ("pieces", "groups"):
            of_all = getattr(self, name)
            of_samples[name] = None if of_all is None else of_all[numbers]
        return replace(self, **of_samples)
