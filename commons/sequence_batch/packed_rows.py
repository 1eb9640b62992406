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

    def select(self, rows: torch.Tensor) -> PackedRows:
        """The given rows, int64 `[selected]`, in the given order; one host-device synchronisation on CUDA."""
        locations = torch.stack([rows, torch.zeros_like(rows), torch.full_like(rows, self.num_rows)])
        keys_per_field = [len(field.keys) for field in self.schema.jagged_fields]
        selected = self.lengths.index_select(1, rows).split(keys_per_field)
        num_elements = torch.stack([lengths.sum() for lengths in selected]).tolist() if selected else []
        return gather_rows([self], locations, num_elements)

    def to_bytes(self) -> torch.Tensor:
        """All words in one uint8 buffer: the bytes of its rows, up to the next multiple of eight."""
        parts = []
        for width in WORD_DTYPES:
            blocks = [self.lengths] if width == LENGTH_WIDTH else []
            blocks += [block[width] for block in (self.fixed, self.jagged) if width in block]
            parts += [block.reshape(-1).view(torch.uint8) for block in blocks]
        size = sum(part.numel() for part in parts)
        return torch.cat([*parts, parts[0].new_zeros(-size % BUFFER_ALIGNMENT)])

    @staticmethod
    def from_bytes(
        buffer: torch.Tensor, schema: RowSchema, num_rows: int, num_elements: Sequence[int]
    ) -> PackedRows:
        """The rows in a buffer that `to_bytes` made, as views of it.

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


def gather_rows(
    sources: Sequence[PackedRows], locations: torch.Tensor, num_elements: Sequence[int]
) -> PackedRows:
    """Rows taken from several packed batches of one schema; no host-device synchronisation.

    Args:
        sources: the batches.
        locations: int64 `[3, selected]` on their device: for each selected row its position among all rows of
            all sources, the number of rows in the sources before its own, and the number of rows in its own.
        num_elements: elements of each jagged field in the selected rows together.
    """
    schema = sources[0].schema
    positions, rows_before, rows_in_source = locations
    jagged_words = schema.jagged_words(num_elements)
    jagged = {}
    for width in schema.jagged_blocks:
        keys, words_per_element = jagged_columns(schema, width, locations.device)
        segment_lengths = torch.cat(
            [(s.lengths.index_select(0, keys) * words_per_element[:, None]).view(-1) for s in sources]
        )
        # The segments of a source lie column by column, behind all those of the sources before it.
        column = torch.arange(len(keys), device=locations.device)[:, None]
        segments = rows_before * (len(keys) - 1) + positions + column * rows_in_source
        jagged[width] = select_segments(
            torch.cat([s.jagged[width] for s in sources]),
            segment_lengths,
            segments.view(-1),
            jagged_words[width],
        )
    return PackedRows(
        schema=schema,
        num_rows=locations.shape[1],
        num_elements=list(num_elements),
        lengths=torch.cat([s.lengths for s in sources], 1).index_select(1, positions),
        fixed={
            width: torch.cat([s.fixed[width] for s in sources]).index_select(0, positions)
            for width in schema.fixed_blocks
        },
        jagged=jagged,
    )


def select_segments(
    values: torch.Tensor, lengths: torch.Tensor, segments: torch.Tensor, num_selected: int
) -> torch.Tensor:
    """Segments of a jagged tensor, one behind the other; no host-device synchronisation.

    Args:
        values: flat, segment after segment.
        lengths: `[segments]`, values in each.
        segments: int64 `[selected]`, the segments to take, in order; they may repeat.
        num_selected: values in the selected segments together.
    """
    starts = lengths.cumsum(0) - lengths
    rows = spread(starts.index_select(0, segments), lengths.index_select(0, segments), num_selected)
    return values.index_select(0, rows)


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
