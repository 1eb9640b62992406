"""Splits a global batch among the workers of a controller, and merges their results.

One process holds all samples, as in reinforcement learning, and hands each worker its chunk. Nothing is
collective, and no process group is needed. Ranks that load their own batches use a `BatchShuffler` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from ...distributed.counting import check_work
from ...distributed.shuffler import BatchShuffler
from ...partition import refined
from ...partition.problem import indices_of_parts, number_of_part
from ...partition.workloads import as_workloads, check_count, check_wide
from ...perf_model.cost import Cost
from .. import more_kinds as more_kinds  # for its effect: batches may have TensorDicts and nested tensors
from ..row_objects import RowsWithObjects, hashes_at, join, shared_in_results

Batch = TypeVar("Batch")


@dataclass(frozen=True, eq=False)
class SplitOrder:
    """The samples in each chunk of a batch. It is plain data that can be pickled.

    Attributes:
        partition: one array per chunk, int64 `[samples]`: the ascending rows of its samples in the batch.
        batch_size: number of rows of the batch, padding included.
        chunk_rows: number of rows of each chunk, padding included.
        shared_fields: paths of the values that all samples share.
        shared_hashes: hashes of the values at these paths.
        field_lists: paths of the batch's lists of tensors, whose entries are fields.
    """

    partition: tuple[np.ndarray, ...]
    batch_size: int
    chunk_rows: tuple[int, ...]
    shared_fields: frozenset[str] = frozenset()
    shared_hashes: Mapping[str, int] = field(default_factory=dict)
    field_lists: frozenset[str] = frozenset()

    @property
    def num_samples(self) -> np.ndarray:
        """The number of real rows of each chunk, int64 `[chunks]`. Real rows come first."""
        return np.array([len(samples) for samples in self.partition], dtype=np.int64)


def split_balanced(
    batch: Batch,
    num_chunks: int,
    workloads: ArrayLike | torch.Tensor | BatchShuffler,
    groups: Sequence[int | str] | np.ndarray | torch.Tensor | None = None,
) -> tuple[list[Batch], SplitOrder]:
    """Splits a batch into chunks with nearly equal numbers of samples and nearly equal loads.

    Each sample is in one chunk. Chunks of a `BaseBatch` get padding rows, so that all have the same number of
    rows, at least one. Other batches cannot mark padding rows, so their chunks have none, and a chunk without
    samples has no rows. For chunks of equal size, give a multiple of `num_chunks` samples. Padding rows of
    the batch itself are left out. Values are detached. A batch on CUDA is split on its device, and the host
    waits for its lengths. The first call compiles, like the first shuffler of an installation.

    Provisional: may change in a minor version.

    Args:
        batch: batch of any type that `BatchShuffler.exchange` takes, on any device. All types except
            `BaseBatch` may also have numpy arrays with one row per sample, such as arrays of objects.
        num_chunks: number of chunks, at least 1. If there are fewer samples, some chunks have none.
        workloads: cost of each row in any unit, `[rows]` or `[real rows]` non-negative numbers, or a
            shuffler whose `get_workloads` returns them.
        groups: group of each row, `[rows]` or `[real rows]` integers or strings. Samples of a group stay in
            one chunk, as responses to one prompt must. None means the groups of the shuffler, if it has any,
            where a negative number means no group. Without groups, the numbers of samples per chunk differ by
            at most one. With groups of equal size, this holds for the numbers of groups. With groups of
            other sizes, the numbers of samples follow the load.

    Returns:
        The chunks, and the order, which `merge` needs. Chunks are batches of the same kind, each in memory of
        its own. Their samples keep the order of the batch, and padding rows follow.

    Raises:
        ValueError: `num_chunks` is below 1; workloads or groups do not have one entry per row; a workload is
            negative, NaN, or infinite, or a shuffler's is not a whole number; or the lengths of a jagged
            field do not account for its values.
        TypeError: `batch` has no rows, or cannot be rebuilt with other rows; workloads are not numbers; or
            groups are not integers or strings.
    """
    check_count("num_chunks", num_chunks)
    shared = workloads.shared_fields if isinstance(workloads, BatchShuffler) else ()
    view = RowsWithObjects(batch, shared)
    sources = [view.packed()]
    view.tree.check_replaceable()
    view.tree.check_no_samples(view.num_rows)
    for path, entries in view.tree.facts_in_attributes().items():
        is_list = isinstance(entries, list | tuple | range)
        if is_list and len(entries) in (view.num_rows, view.num_samples) and path not in shared:
            raise TypeError(
                f"{path} has an entry for each row, and is only an attribute of its container, which chunks "
                "would share: make it an element or a field, or name it in the shuffler's shared_fields"
            )
    batch_size, num_real = view.num_rows, view.num_samples
    group_of = None if groups is None else _numbered_groups(groups, batch_size, num_real)
    if isinstance(workloads, BatchShuffler):
        shown = view.on_host().to_count().batch
        if groups is None:
            columns = [extension.columns(shown).get("groups") for extension in workloads.extensions]
            group_of = next((of[:num_real].numpy() for of in columns if of is not None), None)
        whose = f"{type(workloads).__name__}.get_workloads"
        work = check_work(workloads.get_workloads(shown), batch_size, num_real, whose).numpy()
        costs = Cost.sum_of_columns(work.shape[1]).of(0, np.zeros(len(work)), work)
    else:
        costs = _checked_costs(workloads, batch_size, num_real)
    partition = refined(costs, num_chunks) if group_of is None else split_groups(costs, group_of, num_chunks)
    chunk_rows = tuple(len(samples) for samples in partition)
    if view.pads:
        chunk_rows = (max(1, *chunk_rows),) * num_chunks
    chunks = [view.select(sources, *chunk) for chunk in zip(partition, chunk_rows, strict=True)]
    all_share = frozenset([*shared, *view.shared_lists])
    hashes = hashes_at(batch, all_share)
    lists = frozenset(view.tree.tensor_lists())
    return chunks, SplitOrder(tuple(partition), batch_size, chunk_rows, all_share, hashes, lists)


def split_groups(workloads: ArrayLike, groups: ArrayLike, num_chunks: int) -> list[np.ndarray]:
    """Splits samples as `split_balanced` does with groups, given only numbers. Groups stay whole.

    Provisional: may change in a minor version.

    Args:
        workloads: cost of each sample, `[samples]` non-negative numbers.
        groups: group of each sample, `[samples]` integers. Samples of a group stay in one chunk, however bad
            the balance. A negative number means no group.
        num_chunks: number of chunks, at least 1.

    Returns:
        The ascending int64 indices of the samples in each chunk.

    Raises:
        ValueError: a workload is negative, NaN, or infinite; `groups` is not one integer per sample; or
            `num_chunks` is below 1.
    """
    from ..sample_groups.groups import number_groups  # only callers with groups need it

    work = as_workloads(workloads)
    group_of = number_groups(groups, len(work))
    sizes = np.bincount(group_of)
    has_one_size = len(np.unique(sizes)) <= 1
    partition = refined(np.bincount(group_of, work), num_chunks, has_one_size)
    return indices_of_parts(number_of_part(partition, len(sizes))[group_of], num_chunks)


def merge(batches: Iterable[Batch], order: SplitOrder) -> Batch:
    """Merges batches in the order of the split batch: `merge(*split_balanced(batch, …))` equals `batch`.

    Provisional: may change in a minor version.

    Args:
        batches: one batch per chunk, in the order of the chunks, with one row for each row of the chunk,
            padding rows included. It may be the chunk itself, changed or not, or have other fields, such as a
            dict of a worker's results per row, or one tensor, array, KeyedJaggedTensor, or JaggedTensor.
            Padding rows may hold anything.
        order: order that `split_balanced` returned with the chunks.

    Returns:
        A batch of the same kind as `batches`, with every sample in its row of the split batch. Padding rows
        follow: zero or empty, or None in arrays of objects and in lists. Values that samples share are taken
        from the first of `batches`.

    Raises:
        ValueError: the numbers of batches and chunks differ; a batch has more or fewer rows than its chunk;
            batches differ in their fields; or the lengths of a jagged field do not account for its values.
        TypeError: a batch has no rows, or has a list of tensors that may be samples: the split batch has none
            at its path, and it has an entry for each row of every chunk.
    """
    batches = list(batches)
    shared = shared_in_results(batches, order.shared_fields, order.chunk_rows, order.shared_hashes)
    return join(
        batches, order.partition, order.chunk_rows, order.batch_size, shared, "merge", order.field_lists
    )


def _checked_costs(workloads: Any, num_rows: int, num_real: int) -> np.ndarray:
    """Returns the cost of each sample, `[samples]` finite non-negative numbers."""
    check_wide(workloads, "workloads")
    if isinstance(workloads, torch.Tensor):
        workloads = workloads.detach().to("cpu", torch.float64).numpy()
    values = np.asarray(workloads, dtype=np.float64)
    _check_one_per_row("workloads", values.shape, num_rows, num_real)
    return as_workloads(values[:num_real])


def _numbered_groups(groups: Any, num_rows: int, num_real: int) -> np.ndarray:
    """Returns the group of each sample, numbered from 0, int64 `[samples]`. Any label names a group."""
    labels = groups.tolist() if isinstance(groups, np.ndarray | torch.Tensor) else groups
    if not isinstance(labels, Sequence) or isinstance(labels, str):
        raise TypeError(f"groups is {labels!r}, expected the group of each row")
    _check_one_per_row("groups", (len(labels),), num_rows, num_real)
    numbers: dict[Any, int] = {}
    number_of = []
    for sample, label in enumerate(labels[:num_real]):
        if not isinstance(label, Integral | str):
            raise TypeError(f"groups[{sample}] is {label!r}, expected an integer or a string")
        number_of.append(numbers.setdefault(label, len(numbers)))
    return np.array(number_of, dtype=np.int64)


def _check_one_per_row(name: str, shape: tuple[int, ...], num_rows: int, num_real: int) -> None:
    if shape not in ((num_rows,), (num_real,)):
        raise ValueError(
            f"{name} has shape {shape}, expected one for each of {num_rows} rows, or {num_real} real ones"
        )
