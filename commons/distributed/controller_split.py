"""A global batch that one process holds, split for the workers of a controller, and put together again.

Ranks that load batches of their own use a `BatchShuffler`. Here one process has all samples, as in
reinforcement learning, and hands each worker its part: nothing is collective, and no process group is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed.batch_shuffler import BatchShuffler
from commons.distributed.sample_facts import checked_counts
from commons.partition import refined
from commons.partition.workloads import as_workloads, check_count
from commons.sequence_batch.packed_rows import (
    PackedRows,
    check_jagged_fields,
    gather_rows,
    row_elements,
    select_from,
)
from commons.sequence_batch.row_schema import FieldValue, RowSchema
from commons.sequence_batch.sample_rows import SampleRows

Batch = TypeVar("Batch")


@dataclass(frozen=True, eq=False)
class SplitOrder:
    """Which samples of a batch are in which chunk; plain data, which can be pickled.

    Attributes:
        partition: for each chunk, int64 `[samples]`, the ascending rows of its samples in the batch.
        batch_size: rows of the batch, padding included.
        chunk_rows: rows of every chunk, padding included; at least 1.
        shared_fields: paths of what all samples share.
    """

    partition: tuple[np.ndarray, ...]
    batch_size: int
    chunk_rows: int
    shared_fields: frozenset[str] = frozenset()

    @property
    def num_samples(self) -> np.ndarray:
        """int64 `[chunks]`: real rows of each chunk, which are its first."""
        return np.array([len(samples) for samples in self.partition], dtype=np.int64)


def split_balanced(
    batch: Batch,
    num_chunks: int,
    workloads: ArrayLike | torch.Tensor | BatchShuffler,
    groups: Sequence[int | str] | np.ndarray | torch.Tensor | None = None,
) -> tuple[list[Batch], SplitOrder]:
    """Splits a batch into chunks of the same number of rows and nearly the same load.

    No sample is dropped: where numbers do not divide, chunks end with padding rows. Padding rows of the
    batch itself do not travel. Values are detached. A batch on CUDA is split there, while the host waits
    for its lengths. The first call compiles, as the first shuffler of an installation does.

    Args:
        batch: what `BatchShuffler.exchange` takes, on any device.
        num_chunks: chunks to make, at least 1; some have no samples if there are fewer of these.
        workloads: `[rows]` or `[real rows]` numbers of at least 0, what each row costs in any unit, or a
            shuffler whose `get_workloads` tells.
        groups: `[rows]` or `[real rows]` integers or strings; samples with the same one stay in one
            chunk, as the responses to one prompt have to. Without, the chunks' real rows differ by at
            most one; with groups of one size, their numbers of groups do; with others, real rows follow
            the load, and every chunk is padded to the rows of the largest.

    Returns:
        The chunks, batches of the same kind, each in memory of its own, with its samples in the order of
        the batch and padding rows behind them: `actual_batch_size` of a `BaseBatch`, and `num_samples`
        of the order, tell how many are samples. And the order, which `merge` needs.

    Raises:
        ValueError: `num_chunks` below 1; workloads or groups of another number than rows; a workload is
            negative, NaN or infinite (of a shuffler also: no whole number); or the lengths of a jagged
            field do not account for its values.
        TypeError: `batch` has no rows; workloads are no numbers, or groups no integers or strings.
    """
    check_count("num_chunks", num_chunks)
    rows = workloads.sample_rows if isinstance(workloads, BatchShuffler) else SampleRows()
    fields = rows.per_sample_fields(batch)
    check_jagged_fields(fields)
    batch_size, num_real = rows.batch_rows(batch)
    costs = _costs(workloads, batch, batch_size, num_real)
    if groups is None:
        partition = refined(costs, num_chunks, equal_size=True)
    else:
        group_of = _numbered_groups(groups, batch_size, num_real)
        partition = _partition_of_groups(costs, num_chunks, group_of)
    chunk_rows = max(1, *(len(samples) for samples in partition))
    order = SplitOrder(tuple(partition), batch_size, chunk_rows, rows.shared)
    packed = PackedRows.pack(fields, RowSchema.of(fields), batch_size)
    elements = row_elements(packed.lengths.cpu(), packed.schema).numpy()
    chunks = []
    for samples, num_elements in zip(partition, _sums(elements, partition), strict=True):
        of_chunk = gather_rows([packed], samples, num_elements)
        own = {name: _in_own_memory(value) for name, value in of_chunk.unpack(chunk_rows).items()}
        chunks.append(rows.with_rows(batch, own, chunk_rows, len(samples)))
    return chunks, order


def merge(batches: Sequence[Batch], order: SplitOrder) -> Batch:
    """The inverse of `split_balanced`: `merge(*split_balanced(batch, …))` is the batch again.

    Args:
        batches: for each chunk one, with a row for each row of the chunk, padding rows included: the
            chunk itself, changed or not, or a batch with other fields, such as a dict of what a worker
            computed of each row, or one tensor, KeyedJaggedTensor or JaggedTensor. What is in padding rows
            does not matter.
        order: what `split_balanced` returned beside the chunks.

    Returns:
        A batch of the same kind as `batches`, its samples where they were in the batch that was split,
        padding rows, zero or empty, behind them. What samples share is that of the first.

    Raises:
        ValueError: another number of batches, or of rows in one, than was split; batches differ in their
            fields; or the lengths of a jagged field do not account for its values.
        TypeError: a batch has no rows.
    """
    if len(batches) != len(order.partition):
        raise ValueError(
            f"merge got {len(batches)} batches, expected one for each of {len(order.partition)} chunks, "
            "in the order in which split_balanced returned them"
        )
    rows = SampleRows(order.shared_fields)
    sources: list[PackedRows] = []
    for chunk, batch in enumerate(batches):
        packed = _packed_chunk(rows, batch, chunk, order.chunk_rows)
        if sources and (difference := sources[0].schema.difference(packed.schema)):
            raise ValueError(
                f"batches 0 and {chunk} differ: {difference}; give merge the same fields of all chunks"
            )
        sources.append(packed)
    positions = np.empty(order.num_samples.sum(), dtype=np.int64)
    for chunk, samples in enumerate(order.partition):
        positions[samples] = chunk * order.chunk_rows + np.arange(len(samples))
    merged = select_from(sources, positions)
    fields = merged.unpack(order.batch_size)
    return rows.with_rows(batches[0], fields, order.batch_size, len(positions))


def _costs(workloads: Any, batch: Any, num_rows: int, num_real: int) -> np.ndarray:
    """`[samples]` finite numbers of at least 0."""
    if isinstance(workloads, BatchShuffler):
        whose = f"{type(workloads).__name__}.get_workloads"
        rows = workloads.sample_rows
        returned = workloads.get_workloads(rows.with_long_lengths(rows.on_host(batch)))
        return checked_counts(returned, num_rows, num_real, whose)[:num_real].numpy()
    if isinstance(workloads, torch.Tensor):
        workloads = workloads.detach().to("cpu", torch.float64).numpy()
    try:
        values = np.asarray(workloads, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"workloads are of type {type(workloads).__name__}; expected one number per row, or a "
            "BatchShuffler (a made one, not the class)"
        ) from error
    _check_one_per_row("workloads", values.shape, num_rows, num_real)
    return as_workloads(values[:num_real])


def _numbered_groups(groups: Any, num_rows: int, num_real: int) -> np.ndarray:
    """int64 `[samples]`: the group of each, numbered from 0 in the order in which samples name them.

    Numbers in sorted order would let the choice of labels, such as random ids, decide ties.
    """
    labels = groups.tolist() if isinstance(groups, np.ndarray | torch.Tensor) else groups
    if not isinstance(labels, Sequence) or isinstance(labels, str):
        raise TypeError(f"groups is {labels!r}, expected the group of each row")
    _check_one_per_row("groups", (len(labels),), num_rows, num_real)
    numbers: dict[Integral | str, int] = {}
    for sample, label in enumerate(labels[:num_real]):
        if not isinstance(label, Integral | str):
            raise TypeError(
                f"groups[{sample}] is {label!r}, expected an integer or a string that names the group"
            )
        numbers.setdefault(label, len(numbers))
    return np.array([numbers[label] for label in labels[:num_real]], dtype=np.int64)


def _partition_of_groups(costs: np.ndarray, num_chunks: int, group_of: np.ndarray) -> list[np.ndarray]:
    """For each chunk the ascending indices of its samples; `costs` and `group_of` `[samples]`."""
    sizes, of_groups = np.bincount(group_of), np.bincount(group_of, costs)
    groups_of_chunks = refined(of_groups, num_chunks, equal_size=len(np.unique(sizes)) <= 1)
    chunk_of_group = np.empty(len(sizes), dtype=np.int64)
    for chunk, members in enumerate(groups_of_chunks):
        chunk_of_group[members] = chunk
    chunk_of = chunk_of_group[group_of]
    ends = np.cumsum(np.bincount(chunk_of, minlength=num_chunks))
    return np.split(np.argsort(chunk_of, kind="stable"), ends[:-1])


def _sums(elements: np.ndarray, partition: Sequence[np.ndarray]) -> list[list[int]]:
    """`[chunks, jagged fields]` elements, of int64 `[rows, jagged fields]`; all chunks at once."""
    ends = np.cumsum([0, *map(len, partition)])
    before = np.zeros((ends[-1] + 1, elements.shape[1]), dtype=np.int64)
    np.cumsum(elements[np.concatenate(partition)], axis=0, out=before[1:])
    return np.diff(before[ends], axis=0).tolist()


def _packed_chunk(rows: SampleRows, batch: Any, chunk: int, chunk_rows: int) -> PackedRows:
    fields = rows.per_sample_fields(batch)
    check_jagged_fields(fields)
    num_rows, _ = rows.batch_rows(batch)
    if num_rows != chunk_rows:
        raise ValueError(
            f"batch {chunk} has {num_rows} rows, expected {chunk_rows}: give merge a row for each row "
            "of the chunk, padding rows included"
        )
    return PackedRows.pack(fields, RowSchema.of(fields), num_rows)


def _in_own_memory(value: FieldValue) -> FieldValue:
    """The value, copied where its memory also holds others, which pickle would take along with it."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    weights = value.weights_or_none()
    parts: dict[str, Any] = {
        "values": _in_own_memory(value.values()),
        "weights": None if weights is None else _in_own_memory(weights),
        "lengths": _in_own_memory(value.lengths()),
    }
    if isinstance(value, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys=value.keys(), stride=value.stride(), **parts)
    return JaggedTensor(**parts)


def _check_one_per_row(name: str, shape: tuple[int, ...], num_rows: int, num_real: int) -> None:
    if shape not in ((num_rows,), (num_real,)):
        raise ValueError(
            f"{name} has shape {shape}, expected one for each of {num_rows} rows, or only for "
            f"the {num_real} real ones"
        )
