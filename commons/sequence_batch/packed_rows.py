"""Rows of a batch, whatever its fields, as a few flat tensors of machine words.

A batch has many fields of many dtypes. Selecting rows, or moving them between ranks, only has to copy bits,
so fields of equal element width are fused: every key of a jagged field (and of its weights) becomes one
jagged column of words, every dense field a fixed number of words per row. Rows then cost the same few tensor
operations for two fields as for fifty.
"""

from __future__ import annotations

import dataclasses
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
    RowSchema,
    jagged_columns,
)


@dataclass
class PackedRows:
    """Rows of a batch as words.

    Attributes:
        schema: the layout.
        num_rows: rows.
        num_elements: elements of each jagged field, over all rows.
        lengths: int32 `[keys, rows]`, lengths of every key of every jagged field.
        fixed: by width, `[rows, words]`, the dense fields.
        jagged: by width, flat: all rows of the first jagged column, then all of the second, and so on.
    """

    schema: RowSchema
    num_rows: int
    num_elements: list[int]
    lengths: torch.Tensor
    fixed: dict[int, torch.Tensor]
    jagged: dict[int, torch.Tensor]

    @staticmethod
    def pack(fields: Mapping[str, FieldValue], schema: RowSchema, num_rows: int) -> PackedRows:
        """Packs all rows of a batch's per-sample fields; no host-device synchronisation."""
        return PackedRows(
            schema=schema,
            num_rows=num_rows,
            num_elements=[fields[field.name].values().shape[0] for field in schema.jagged_fields],
            lengths=key_lengths(fields, schema, num_rows),
            fixed={
                width: torch.cat(
                    [
                        block.to_words(fields[block.field.name]).view(num_rows, block.words)
                        for block in blocks
                    ],
                    1,
                )
                for width, blocks in schema.fixed_blocks.items()
            },
            jagged={
                width: torch.cat([block.to_words(fields[block.field.name]) for block in blocks])
                for width, blocks in schema.jagged_blocks.items()
            },
        )

    def unpack(self) -> dict[str, FieldValue]:
        """The fields, bit for bit as they were packed."""
        values = self._values()
        lengths = iter(self.lengths.split([len(field.keys) for field in self.schema.jagged_fields]))
        fields: dict[str, FieldValue] = {}
        for field in self.schema.fields:
            if field.is_dense:
                fields[field.name] = values[field.name, False]
                continue
            parts = {
                "values": values[field.name, False],
                "weights": values.get((field.name, True)),
                "lengths": next(lengths).reshape(-1).to(field.lengths_dtype),
            }
            if field.kind == "keyed":
                fields[field.name] = KeyedJaggedTensor(keys=list(field.keys), stride=self.num_rows, **parts)
            else:
                fields[field.name] = JaggedTensor(**parts)
        return fields

    def pad_to(self, num_rows: int) -> PackedRows:
        """These rows and padding behind them: zero length in jagged fields, zeros in dense ones."""
        extra = num_rows - self.num_rows
        if extra == 0:
            return self
        return dataclasses.replace(
            self,
            num_rows=num_rows,
            lengths=F.pad(self.lengths, (0, extra)),
            fixed={width: F.pad(words, (0, 0, 0, extra)) for width, words in self.fixed.items()},
            # The jagged columns stay as they are: a row of zero length takes no space in them.
        )

    def select(self, rows: np.ndarray) -> PackedRows:
        """The given rows, int64 `[selected]`, in the given order; one host-device synchronisation on CUDA."""
        return select_from([self], rows)

    def to_chunks(self, rows: Sequence[np.ndarray], num_elements: np.ndarray) -> torch.Tensor:
        """Copies chunks of rows into one uint8 buffer, each as `from_bytes` reads it.

        As many device operations for many chunks as for one; no host-device synchronisation.

        Args:
            rows: for each chunk the rows in it.
            num_elements: int64 `[chunks, jagged fields]`, elements of each jagged field in each chunk.

        Returns:
            The chunks one behind the other, each taking the bytes of its rows, up to the next multiple of
            `BUFFER_ALIGNMENT`.
        """
        schema, counts = self.schema, np.array([len(of_chunk) for of_chunk in rows])
        keys = np.arange(schema.num_keys)
        indices = [np.concatenate(rows), _column_by_column(rows, keys, self.num_rows)]
        for width in schema.jagged_blocks:
            of_keys, words = jagged_columns(schema, width)
            indices.append(_column_by_column([np.arange(self.num_rows)], of_keys, self.num_rows))
            indices.append(words.repeat(self.num_rows))
            indices.append(_column_by_column(rows, np.arange(len(words)), self.num_rows))
        in_order, length_order, *of_widths = to_device_together(indices, self.lengths.device)
        by_width = dict(zip(schema.jagged_blocks, _in_threes(of_widths), strict=True))
        jagged_words = schema.jagged_words_of_chunks(num_elements)
        lengths = self.lengths.reshape(-1)
        sections: list[tuple[torch.Tensor, np.ndarray]] = []  # all chunks' words, bytes of each chunk
        for width in WORD_DTYPES:
            if width == LENGTH_WIDTH:
                sections.append((lengths.index_select(0, length_order), counts * len(keys) * width))
            if width in self.fixed:
                words_in_order = self.fixed[width].index_select(0, in_order)
                sections.append((words_in_order, counts * schema.fixed_words[width] * width))
            if width in self.jagged:
                total = int(jagged_words[width].sum())
                selected = _select_segments(self.jagged[width], lengths, *by_width[width], total)
                sections.append((selected, jagged_words[width] * width))
        return _interleave(sections)

    @staticmethod
    def from_bytes(
        buffer: torch.Tensor, schema: RowSchema, num_rows: int, num_elements: Sequence[int]
    ) -> PackedRows:
        """The rows in a chunk that `to_chunks` made, as views of it.

        Args:
            buffer: uint8, aligned to eight bytes; may be longer than the rows need.
            schema: the layout.
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

        jagged_words = schema.jagged_words(num_elements)
        lengths, fixed, jagged = buffer, {}, {}
        for width in WORD_DTYPES:
            if width == LENGTH_WIDTH:
                lengths = take(width, schema.num_keys, num_rows)
            if width in schema.fixed_words:
                fixed[width] = take(width, num_rows, schema.fixed_words[width])
            if width in jagged_words:
                jagged[width] = take(width, jagged_words[width])
        return PackedRows(schema, num_rows, list(num_elements), lengths, fixed, jagged)

    def _values(self) -> dict[tuple[str, bool], torch.Tensor]:
        """Values and weights of every field, by its name and whether they are weights."""
        values = {}
        for width, blocks in self.schema.fixed_blocks.items():
            words = self.fixed[width].split([block.words for block in blocks], 1)
            for block, block_words in zip(blocks, words, strict=True):
                values[block.field.name, False] = block.from_words(block_words, self.num_rows)
        elements = dict(zip(self.schema.jagged_fields, self.num_elements, strict=True))
        for width, blocks in self.schema.jagged_blocks.items():
            words = self.jagged[width].split([block.words * elements[block.field] for block in blocks])
            for block, block_words in zip(blocks, words, strict=True):
                values[block.field.name, block.is_weights] = block.from_words(
                    block_words, elements[block.field]
                )
        return values


def select_from(sources: Sequence[PackedRows], positions: np.ndarray) -> PackedRows:
    """`gather_rows` that reads the numbers of elements by itself: one host-device synchronisation on CUDA."""
    lengths = _together([source.lengths for source in sources], 1).cpu()[:, torch.from_numpy(positions)]
    return gather_rows(sources, positions, row_elements(lengths, sources[0].schema).sum(0).tolist())


def gather_rows(
    sources: Sequence[PackedRows], positions: np.ndarray, num_elements: Sequence[int]
) -> PackedRows:
    """Rows taken from several packed batches of one schema and device; no host-device synchronisation.

    Args:
        sources: the batches.
        positions: int64 `[selected]`, each selected row's position among all rows of all sources.
        num_elements: elements of each jagged field in the selected rows together.
    """
    schema, device = sources[0].schema, sources[0].lengths.device
    sizes = np.array([source.num_rows for source in sources])
    ends = np.cumsum(sizes)
    rows_of_sources = np.split(np.arange(ends[-1]), ends[:-1])
    source_of = np.searchsorted(ends, positions, side="right")
    before, in_source = (ends - sizes)[source_of], sizes[source_of]
    indices = [positions]
    for width in schema.jagged_blocks:
        # The segments of a source lie column by column, behind all those of the sources before it.
        keys, words = jagged_columns(schema, width)
        column = np.arange(len(keys))[:, None]
        indices.append(_column_by_column(rows_of_sources, keys, int(ends[-1])))
        indices.append(np.concatenate([words.repeat(size) for size in sizes]))
        indices.append((before * (len(keys) - 1) + positions + column * in_source).ravel())
    in_order, *of_widths = to_device_together(indices, device)
    lengths = _together([source.lengths for source in sources], 1)
    jagged_words = schema.jagged_words(num_elements)
    jagged = {
        width: _select_segments(
            _together([source.jagged[width] for source in sources]),
            lengths.view(-1),
            *of_width,
            jagged_words[width],
        )
        for width, of_width in zip(schema.jagged_blocks, _in_threes(of_widths), strict=True)
    }
    return PackedRows(
        schema=schema,
        num_rows=len(positions),
        num_elements=list(num_elements),
        lengths=lengths.index_select(1, in_order),
        fixed={
            width: _together([source.fixed[width] for source in sources]).index_select(0, in_order)
            for width in schema.fixed_blocks
        },
        jagged=jagged,
    )


def _together(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The tensors one behind the other; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


def _select_segments(
    words: torch.Tensor,
    lengths: torch.Tensor,
    length_of: torch.Tensor,
    words_per_element: torch.Tensor,
    segments: torch.Tensor,
    num_selected: int,
) -> torch.Tensor:
    """Segments of jagged words, one behind the other; no host-device synchronisation.

    Args:
        words: flat, segment after segment.
        lengths: int32, elements of every key of every row.
        length_of: int64 `[segments]`, where in `lengths` each segment's is.
        words_per_element: int64 `[segments]`.
        segments: int64 `[selected]`, the segments to take, in order; they may repeat.
        num_selected: words in the selected segments together.
    """
    sizes = lengths.index_select(0, length_of) * words_per_element
    starts = sizes.cumsum(0) - sizes
    positions = spread(starts.index_select(0, segments), sizes.index_select(0, segments), num_selected)
    return words.index_select(0, positions)


def key_lengths(fields: Mapping[str, Any], schema: RowSchema, num_rows: int) -> torch.Tensor:
    """int32 `[keys, rows]`: lengths of every key of every jagged field."""
    lengths = [
        fields[field.name].lengths().view(len(field.keys), num_rows).int() for field in schema.jagged_fields
    ]
    if lengths:
        return torch.cat(lengths)
    dense = fields[schema.fields[0].name]
    return torch.zeros(0, num_rows, dtype=torch.int32, device=dense.device)


def check_jagged_fields(fields: Mapping[str, Any]) -> None:
    """Checks on the host that the lengths of every jagged field account for all of its values.

    Raises:
        ValueError: a field has values before, behind or between its rows; they belong to no sample.
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
    """int64 `[rows, jagged fields]`: elements of each row in each field, from `key_lengths`."""
    per_field = lengths.split([len(field.keys) for field in schema.jagged_fields])
    if not per_field:
        return torch.zeros(lengths.shape[1], 0, dtype=torch.int64, device=lengths.device)
    return torch.stack([field_lengths.sum(0, dtype=torch.int64) for field_lengths in per_field], 1)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int64 arrays `[any]` on a device, in one copy that does not wait for it, which takes pinned memory."""
    together = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
    if device.type == "cuda":
        together = together.pin_memory()
    return list(together.to(device, non_blocking=True).split([len(array) for array in arrays]))


def _column_by_column(rows: Sequence[np.ndarray], columns: np.ndarray, stride: int) -> np.ndarray:
    """Positions in a flat matrix `[any, stride]`: chunk after chunk of rows, each by the given columns."""
    first_of_column = columns[:, None] * stride
    return np.concatenate([(first_of_column + of_chunk).ravel() for of_chunk in rows])


def _in_threes(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True))


def _interleave(sections: Sequence[tuple[torch.Tensor, np.ndarray]]) -> torch.Tensor:
    """uint8 chunks, aligned: of each section, which has all chunks' words and each one's bytes, its part."""
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
