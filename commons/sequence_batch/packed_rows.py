"""Rows of a batch, whatever its fields, as a few tensors of machine words.

A batch has many fields of many dtypes. To select rows, or to move them between ranks, only takes copying
bits. So dense fields with words of one width are fused into one tensor, and jagged fields with elements of
one size into another. Rows then cost the same few tensor operations for fifty fields as for two, and the
indices that select them take 8 bytes per element, however large it is.

The way in is `PackedRows.pack`, the way out `PackedRows.unpack`. Between them `gather_rows` selects rows, and
`to_chunks` and `from_bytes` turn rows into the bytes that ranks exchange, and back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.sequence_batch.jagged_indices import spread
from commons.sequence_batch.row_schema import (
    BUFFER_ALIGNMENT,
    LENGTH_WIDTH,
    WORD_DTYPES,
    FieldValue,
    Group,
    RowSchema,
)


@dataclass(frozen=True)
class PackedRows:
    """Rows of a batch as words.

    Attributes:
        schema: the fields.
        num_rows: rows.
        num_elements: elements of each jagged field, over all rows.
        lengths: int32 `[keys, rows]`, lengths of every key of every jagged field.
        dense: by width of the words, `[rows, words]`, the dense fields.
        jagged: for each group of the schema, `[elements, words]`, its blocks, one after another.
        is_aligned: whether blocks are padded, so that each starts at a multiple of 16 bytes, as those that
            `gather_rows` returns.
    """

    schema: RowSchema
    num_rows: int
    num_elements: list[int]
    lengths: torch.Tensor
    dense: dict[int, torch.Tensor]
    jagged: list[torch.Tensor]
    is_aligned: bool = False

    @staticmethod
    def pack(fields: Mapping[str, Any], schema: RowSchema, num_rows: int) -> PackedRows:
        """Copies all rows of a batch's per-sample fields; no host-device synchronization."""
        return PackedRows(
            schema=schema,
            num_rows=num_rows,
            num_elements=[fields[field.name].values().shape[0] for field in schema.jagged_fields],
            lengths=key_lengths(fields, schema, num_rows),
            dense={
                width: torch.cat([block.to_words(fields[block.field]) for block in blocks], 1)
                for width, blocks in schema.dense_blocks.items()
            },
            jagged=[
                torch.cat([block.to_words(fields[block.field]) for block in group.blocks])
                for group in schema.groups
            ],
        )

    def unpack(self, num_rows: int | None = None) -> dict[str, FieldValue]:
        """Returns the fields, bit for bit as they were packed; each tensor starts at a multiple of 16 bytes.

        Args:
            num_rows: rows of the fields; those after the packed ones are padding, with zero length in jagged
                fields and zeros in dense ones. None for no padding.

        Raises:
            ValueError: these rows do not come from `gather_rows`, and their fields are not aligned.
        """
        if not self.is_aligned:
            raise ValueError("these rows are not aligned: unpack what gather_rows returns")
        num_rows = self.num_rows if num_rows is None else num_rows
        values = self._dense_values(num_rows) | self._jagged_values()
        lengths = _padded(self.lengths, 1, num_rows)
        lengths_of = iter(lengths.split([len(field.keys) for field in self.schema.jagged_fields]))
        fields: dict[str, FieldValue] = {}
        for field in self.schema.fields:
            if field.is_dense:
                fields[field.name] = values[field.name, False]
                continue
            parts: dict[str, Any] = {
                "values": values[field.name, False],
                "weights": values.get((field.name, True)),
                # A copy, even of int32: only the first key's lengths are aligned.
                "lengths": next(lengths_of).to(field.lengths_dtype, copy=True).view(-1),
            }
            if field.kind == "keyed":
                fields[field.name] = KeyedJaggedTensor(keys=list(field.keys), stride=num_rows, **parts)
            else:
                fields[field.name] = JaggedTensor(**parts)
        return fields

    def _dense_values(self, num_rows: int) -> dict[tuple[str, bool], torch.Tensor]:
        """The values of each dense field, by its name and whether they are weights."""
        values = {}
        for width, blocks in self.schema.dense_blocks.items():
            words = _padded(self.dense[width], 0, num_rows)
            for block, of_block in zip(blocks, words.split([block.words for block in blocks], 1), strict=True):
                alone = of_block if len(blocks) == 1 else of_block.clone(memory_format=torch.contiguous_format)
                values[block.field, False] = block.from_words(alone)
        return values

    def _jagged_values(self) -> dict[tuple[str, bool], torch.Tensor]:
        """The values and weights of each jagged field, by its name and whether they are weights."""
        elements = self.schema.block_elements(np.array([self.num_elements], dtype=np.int64))
        sizes = (elements + self.schema.alignment_padding(elements))[0]
        values = {}
        for group, words in zip(self.schema.groups, self.jagged, strict=True):
            padded = words.split(sizes[group.block_slice].tolist())
            for block, of_block in zip(group.blocks, padded, strict=True):
                count = self.num_elements[block.jagged_field]
                values[block.field, block.is_weights] = block.from_words(of_block[:count])
        return values

    def to_chunks(self, rows: Sequence[np.ndarray], num_elements: np.ndarray) -> torch.Tensor:
        """Copies chunks of rows into one uint8 buffer, each as `from_bytes` reads it.

        As many device operations for many chunks as for one; no host-device synchronization.

        Args:
            rows: for each chunk the rows in it.
            num_elements: int64 `[chunks, jagged fields]`, elements of each jagged field in each chunk.

        Returns:
            The chunks one after another, each taking the bytes of its rows, up to the next multiple of
            `BUFFER_ALIGNMENT`.
        """
        lengths, dense, jagged = _gather([self], rows, num_elements, None)
        counts = np.array([len(of_chunk) for of_chunk in rows])
        elements = self.schema.block_elements(num_elements)
        sections = []  # words of all chunks, and the bytes that each chunk has of them
        for width in WORD_DTYPES:  # widest first, so that every section starts at a multiple of its words
            if width == LENGTH_WIDTH:
                sections.append((lengths, counts * self.schema.num_keys * width))
            if width in dense:
                sections.append((dense[width], counts * self.schema.dense_words[width] * width))
            for group, words in zip(self.schema.groups, jagged, strict=True):
                if group.width == width:
                    num_words = elements[:, group.block_slice].sum(1) * group.words
                    sections.append((words, num_words * width))
        return _interleaved(sections)

    @staticmethod
    def from_bytes(
        buffer: torch.Tensor, schema: RowSchema, num_rows: int, num_elements: Sequence[int]
    ) -> PackedRows:
        """Returns the rows in a chunk that `to_chunks` made, as views of it, for `gather_rows` to copy.

        Args:
            buffer: uint8, aligned to eight bytes; may be longer than the rows need.
            schema: the fields.
            num_rows: rows in the buffer.
            num_elements: elements of each jagged field in the buffer.
        """
        start = 0

        def take(width: int, *shape: int) -> torch.Tensor:
            nonlocal start
            end = start + width * math.prod(shape)
            words = buffer[start:end].view(WORD_DTYPES[width]).view(shape)
            start = end
            return words

        lengths, dense, jagged = buffer, {}, []
        for width in WORD_DTYPES:
            if width == LENGTH_WIDTH:
                lengths = take(width, schema.num_keys, num_rows)
            if width in schema.dense_words:
                dense[width] = take(width, num_rows, schema.dense_words[width])
            for group in schema.groups:
                if group.width == width:
                    elements = sum(num_elements[block.jagged_field] for block in group.blocks)
                    jagged.append(take(width, elements, group.words))
        return PackedRows(schema, num_rows, list(num_elements), lengths, dense, jagged)


    def _compact(self) -> PackedRows:
        """Returns these rows without padding between blocks."""
        if not self.is_aligned:
            return self
        return PackedRows.pack(self.unpack(), self.schema, self.num_rows)


def gather_rows(
    sources: Sequence[PackedRows], positions: np.ndarray, num_elements: Sequence[int]
) -> PackedRows:
    """Copies rows of several packed batches of one schema and device; no host-device synchronization.

    Args:
        sources: the batches.
        positions: int64 `[selected]`, each selected row's position among all rows of all sources.
        num_elements: elements of each jagged field in the selected rows together.
    """
    of_all = np.array([num_elements], dtype=np.int64)
    schema = sources[0].schema
    padding = schema.alignment_padding(schema.block_elements(of_all))[0]
    lengths, dense, jagged = _gather(sources, [positions], of_all, padding)
    lengths = lengths.view(schema.num_keys, len(positions))
    return PackedRows(schema, len(positions), list(num_elements), lengths, dense, jagged, is_aligned=True)


def select_from(sources: Sequence[PackedRows], positions: np.ndarray) -> PackedRows:
    """Runs `gather_rows` with numbers of elements that it reads itself: one host-device synchronization."""
    lengths = _together([source.lengths for source in sources], 1).cpu()[:, torch.from_numpy(positions)]
    return gather_rows(sources, positions, row_elements(lengths, sources[0].schema).sum(0).tolist())


def _gather(
    sources: Sequence[PackedRows],
    chunks: Sequence[np.ndarray],
    num_elements: np.ndarray,
    padding: np.ndarray | None,
) -> tuple[torch.Tensor, dict[int, torch.Tensor], list[torch.Tensor]]:
    """Copies chunks of rows, with as many device operations for many chunks as for one.

    Args:
        sources: the rows.
        chunks: for each chunk int64 `[selected]`, positions among all rows of all sources.
        num_elements: int64 `[chunks, jagged fields]`, elements of each jagged field in each chunk.
        padding: int64 `[blocks]`, elements of padding after each block, where there is one chunk.

    Returns:
        Lengths, flat; dense words by width; words of each group. In each tensor one chunk follows another.
    """
    schema, sources = sources[0].schema, [source._compact() for source in sources]
    num_rows = np.array([source.num_rows for source in sources])
    positions, total_rows = np.concatenate(chunks), int(num_rows.sum())
    keys = np.arange(schema.num_keys)[:, None] * total_rows
    indices = [positions, np.concatenate([(keys + rows).ravel() for rows in chunks])]
    for group in schema.groups:
        padding_of = None if padding is None else padding[group.block_slice]
        indices += _segments(group, num_rows, chunks, positions, padding_of)
    in_order, of_keys, *of_groups = to_device_together(indices, sources[0].lengths.device)
    lengths = _together([source.lengths for source in sources], 1).view(-1)
    dense = {
        width: _together([source.dense[width] for source in sources]).index_select(0, in_order)
        for width in schema.dense_blocks
    }
    sizes_of_rows = torch.cat([torch.arange(-1, 2, dtype=torch.int32, device=lengths.device), lengths])
    of_blocks = schema.block_elements(num_elements).sum(0) + (0 if padding is None else padding)
    jagged = []
    for number, group in enumerate(schema.groups):
        size_at, chosen = of_groups[2 * number : 2 * number + 2]
        sizes = sizes_of_rows.index_select(0, size_at)
        starts = sizes.cumsum(0, dtype=torch.int64) - sizes
        total = int(of_blocks[group.block_slice].sum())
        elements = spread(starts.index_select(0, chosen), sizes.index_select(0, chosen), total)
        words = _together([source.jagged[number] for source in sources])
        if group.words == 1:  # torch selects from flat tensors faster
            jagged.append(words.view(-1).index_select(0, elements).view(-1, 1))
        else:
            jagged.append(words.index_select(0, elements))
    return lengths.index_select(0, of_keys), dense, jagged


def _segments(
    group: Group,
    num_rows: np.ndarray,
    chunks: Sequence[np.ndarray],
    positions: np.ndarray,
    padding: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Works out which segments of a group to gather; a segment is the elements of one key of one row.

    Segments are numbered source by source, column by column, row by row. The first three are none of these:
    one element of padding, one that makes up for it, and nothing.

    Args:
        group: the group.
        num_rows: int64 `[sources]`, rows of each source.
        chunks, positions: the rows to gather, and all of them.
        padding: int64 `[blocks]`, elements of padding after each block, where there is one chunk.

    Returns:
        int64 `[segments]`: where each segment's size is among -1, 0, 1 and all lengths. And int64 `[chosen]`:
        the segments to gather, chunk by chunk, column by column, row by row.
    """
    keys, num_columns = group.keys[:, None], len(group.keys)
    ends = num_rows.cumsum()
    firsts, lengths_at = ends - num_rows, 3 + keys * ends[-1]
    size_at = [(lengths_at + np.arange(*rows)).ravel() for rows in zip(firsts, ends, strict=True)]
    source = np.searchsorted(ends, positions, side="right")
    first_segment = 3 + firsts[source] * (num_columns - 1) + positions
    chosen = first_segment + np.arange(num_columns)[:, None] * num_rows[source]
    if padding is not None and padding.any():
        missing = np.zeros(num_columns, dtype=np.int64)
        np.add.at(missing, group.last_columns, padding)
        of_columns = np.where(np.arange(padding.max()) < missing[:, None], 0, 2)
        chosen = np.concatenate([chosen, of_columns], 1)
    if len(chunks) > 1:
        ends_of_chunks = np.cumsum([len(rows) for rows in chunks])
        chosen = np.concatenate([part.ravel() for part in np.split(chosen, ends_of_chunks[:-1], 1)])
    return np.concatenate([[2, 0, 1], *size_at]), chosen.ravel()


def key_lengths(fields: Mapping[str, Any], schema: RowSchema, num_rows: int) -> torch.Tensor:
    """int32 `[keys, rows]`: lengths of every key of every jagged field."""
    lengths = [fields[field.name].lengths().view(len(field.keys), num_rows) for field in schema.jagged_fields]
    if lengths:
        return torch.cat(lengths).int()
    dense = fields[schema.fields[0].name]
    return torch.zeros(0, num_rows, dtype=torch.int32, device=dense.device)


def _padded(tensor: torch.Tensor, dim: int, num_rows: int) -> torch.Tensor:
    """Returns a tensor `[any, any]` with zeros appended along `dim`; itself if there are none to append."""
    missing = num_rows - tensor.shape[dim]
    return F.pad(tensor, (0, missing) if dim else (0, 0, 0, missing)) if missing else tensor


def check_jagged_fields(fields: Mapping[str, Any]) -> None:
    """Checks on the host that the lengths of every jagged field account for all of its values.

    Raises:
        ValueError: a field has values before, after or between its rows; they belong to no sample.
    """
    for name, field in fields.items():
        if isinstance(field, torch.Tensor):
            continue
        values, total = field.values().shape[0], int(field.lengths().sum())
        if values != total or int(field.offsets()[0]) != 0:
            raise ValueError(
                f"field {name!r} has {values} values, its lengths add up to {total} and its first row starts "
                f"at {int(field.offsets()[0])}; rows must follow each other without gaps from value 0 on"
            )


def row_elements(lengths: torch.Tensor, schema: RowSchema) -> torch.Tensor:
    """Returns the elements of each row in each jagged field, int64 `[rows, jagged fields]`.

    Args:
        lengths: `[keys, rows]`, lengths of every key of every jagged field.
        schema: the fields.
    """
    per_field = lengths.split([len(field.keys) for field in schema.jagged_fields])
    if not per_field:
        return torch.zeros(lengths.shape[1], 0, dtype=torch.int64, device=lengths.device)
    return torch.stack([of_field.sum(0, dtype=torch.int64) for of_field in per_field], 1)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies int64 arrays `[any]` to a device at once, from pinned memory so that the host does not wait."""
    together = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
    if device.type == "cuda":
        together = together.pin_memory()
    return list(together.to(device, non_blocking=True).split([len(array) for array in arrays]))


def _together(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Returns the tensors one after another; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


def _interleaved(sections: Sequence[tuple[torch.Tensor, np.ndarray]]) -> torch.Tensor:
    """uint8 chunks, aligned: each chunk has its bytes of every section."""
    of_sections = [
        words.reshape(-1).view(torch.uint8).split(num_bytes.tolist()) for words, num_bytes in sections
    ]
    padding = sections[0][0].new_zeros(BUFFER_ALIGNMENT, dtype=torch.uint8)
    missing = -np.sum([num_bytes for _, num_bytes in sections], axis=0) % BUFFER_ALIGNMENT
    return torch.cat(
        [
            part
            for parts, missing_bytes in zip(zip(*of_sections, strict=True), missing.tolist(), strict=True)
            for part in (*parts, padding[:missing_bytes])
        ]
    )
