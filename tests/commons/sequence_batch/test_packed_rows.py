"""Rows as words and bytes: bit for bit, aligned, and in memory and operations that do not grow needlessly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.commons.sequence_batch.drawn_fields import bytes_of_rows, draw_fields
from tests.commons.sequence_batch.internals import (
    BUFFER_ALIGNMENT,
    PackedRows,
    Schema,
    Selection,
    gather_fields,
    read_lengths,
    select_rows,
    to_chunks,
)
from tests.drawn_batches import tensors_of
from tests.own_memory import check_own_memory


def packed(fields, num_rows: int) -> PackedRows:
    schema = Schema.of(fields)
    return PackedRows.pack(fields, schema, read_lengths(fields, schema, num_rows))


def through_bytes(rows: PackedRows, chunks: list[np.ndarray]) -> list[PackedRows]:
    """Sends chunks of rows through a buffer, whose size is what the selection announces."""
    selection = Selection.of(rows.schema, [rows.lengths], chunks)
    buffer, sizes = to_chunks(rows, selection), selection.chunk_bytes
    assert buffer.dtype == torch.uint8 and len(buffer) == sizes.sum()
    assert not (sizes % BUFFER_ALIGNMENT).any()
    lengths = [rows.lengths[chunk] for chunk in chunks]
    without_lengths = [
        rows.schema.row_bytes(of).sum() - 4 * of.size for of in lengths
    ]  # which the receiver knows
    assert all(0 <= size - num < BUFFER_ALIGNMENT for size, num in zip(sizes, without_lengths, strict=True))
    received = zip(buffer.split(sizes.tolist()), lengths, strict=True)
    return [PackedRows.from_bytes(part, rows.schema, of) for part, of in received]


@given(seed=st.integers(0, 10**6), data=st.data())
def test_rows_of_any_fields_arrive_bit_for_bit_and_every_tensor_is_aligned(seed, data):
    rng = np.random.default_rng(seed)
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any))
    batches = [draw_fields(seed, rng, count) for count in counts]
    sources = [packed(fields, count) for fields, count in zip(batches, counts, strict=True)]
    every = [row for of in zip(batches, counts, strict=True) for row in bytes_of_rows(*of)]
    chunk_of = rng.integers(0, 3, counts[0])
    chunks = [np.flatnonzero(chunk_of == chunk) for chunk in range(3)]
    sources += through_bytes(sources[0], chunks)
    every += [every[row] for chunk in chunks for row in chunk]
    again = rng.permutation(len(every))
    sources.append(packed(select_rows(sources, again, len(again)), len(again)))
    every += [every[row] for row in again]

    chosen = np.array(data.draw(st.lists(st.integers(0, len(every) - 1), max_size=8)), dtype=np.int64)
    num_rows = len(chosen) + data.draw(st.integers(0, 2))
    fields = select_rows(sources, chosen, num_rows)
    assert Schema.of(fields) == Schema.of(batches[0])
    rows = bytes_of_rows(fields, num_rows)
    assert rows[: len(chosen)] == [every[row] for row in chosen]
    assert not any(byte for row in rows[len(chosen) :] for part in row for byte in part)
    assert not any(tensor.data_ptr() % 16 for tensor in tensors_of(fields))
    check_own_memory(fields)


def test_no_row_is_dropped():
    with pytest.raises(ValueError, match="select_rows got num_rows=4 for 7 rows; it cannot drop any"):
        select_rows([packed({"ids": torch.arange(7)}, 7)], np.arange(7), 4)


class Made(TorchDispatchMode):
    """Records the tensors that operations make; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and "empty" not in str(func):
            self.num_bytes.append(result.nbytes)
        return result


def test_indices_of_wide_elements_take_less_than_a_hundredth_of_them():
    values = torch.randn(400, 1024).bfloat16()
    rows = packed({"wide": JaggedTensor(values, lengths=torch.full((20,), 20))}, 20)
    with Made() as made:
        select_rows([rows], np.arange(20)[::-1].copy(), 20)
    assert values.nbytes <= sum(made.num_bytes) < 1.05 * values.nbytes


def test_fifty_dense_fields_take_as_many_operations_as_two():
    counts = []
    for num_fields in (2, 50):
        fields = {f"dense {number}": torch.arange(6) for number in range(num_fields)}
        with Made() as made:
            rows = packed(fields, 6)
            leaving = Selection.of(rows.schema, [rows.lengths], [np.array([0, 3])])
            received = PackedRows.from_bytes(to_chunks(rows, leaving), rows.schema, rows.lengths[[0, 3]])
            lengths = [rows.lengths, received.lengths]
            gather_fields([rows, received], Selection.of(rows.schema, lengths, [np.array([1, 7, 2, 6])]))
        counts.append(len(made.num_bytes))
    assert counts[0] == counts[1]


def test_a_jagged_field_more_takes_an_operation_for_its_values_its_weights_and_its_lengths():
    counts = []
    for num_fields in (2, 3):
        fields = {
            f"jagged {number}": KeyedJaggedTensor(
                ["a", "b"], torch.arange(12), weights=torch.rand(12), lengths=torch.ones(12).long()
            )
            for number in range(num_fields)
        }
        rows = packed(fields, 6)
        with Made() as made:
            select_rows([rows], np.array([1, 3]), 2)
        counts.append(len(made.num_bytes))
    assert counts[1] - counts[0] == 3
