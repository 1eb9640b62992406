"""Rows of a batch, whatever its fields, as a few tensors of machine words.

A batch has many fields of many dtypes. To select rows, or to move them between ranks, only takes copying
bits, so fields share tensors of words: dense fields by the width of their words, jagged fields by the size of
their elements. Rows then cost the same few tensor operations for fifty fields as for two, and the indices
that select them take 8 bytes per element, however large it is.

The way in is `PackedRows.pack`, the way out `PackedRows.unpack`. Between them `gather_rows` selects rows, and
`to_chunks` and `from_bytes` turn rows into the bytes that ranks exchange, and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .optional_types import JaggedTensor, KeyedJaggedTensor
from .row_schema import (
    BUFFER_ALIGNMENT,
    LENGTH_WIDTH,
    WORD_DTYPES,
    FieldValue,
    RowSchema,
    Section,
    lengths_of,
)


@dataclass(frozen=True)
class PackedRows:
    """Rows of a batch as words.

    Attributes:
        num_elements: elements of each jagged field, over all rows.
        lengths: int32 `[keys, rows]`, lengths of every key of every jagged field.
        sections: the words of each section of the schema, `[rows or elements, words]`.
    """

    schema: RowSchema
    num_rows: int
    num_elements: list[int]
    lengths: torch.Tensor
    sections: list[torch.Tensor]

    @staticmethod
    def pack(fields: Mapping[str, Any], schema: RowSchema, num_rows: int) -> PackedRows:
        """Copies all rows of a batch's per-sample fields; no host-device synchronization."""
        num_elements = [fields[field.name].values().shape[0] for field in schema.jagged_fields]
        sections = [
            torch.cat(
                [block.to_words(fields[block.field]) for block in section.blocks], int(section.is_dense)
            )
            for section in schema.sections
        ]
        return PackedRows(schema, num_rows, num_elements, key_lengths(fields, schema, num_rows), sections)

    def unpack(self, num_rows: int | None = None) -> dict[str, FieldValue]:
        """Returns the fields, bit for bit as they were packed, each tensor in memory of its own.

        So TorchRec may free one early, a model may change it in place, and who keeps it keeps no other.
        Memory that holds a single field is handed over: unpack rows once.

        Args:
            num_rows: rows of the fields; those after the packed ones are padding, with zero length in jagged
                fields and zeros in dense ones. None for no padding.

        Raises:
            ValueError: there are more than `num_rows` rows.
        """
        num_rows = self.num_rows if num_rows is None else num_rows
        missing = num_rows - self.num_rows
        if missing < 0:
            raise ValueError(f"unpack got num_rows={num_rows} for {self.num_rows} rows; it drops none")
        values: dict[tuple[str, bool], torch.Tensor] = {}
        for section, words in zip(self.schema.sections, self.sections, strict=True):
            block_words = _block_words(words, section, self.num_elements, missing)
            for block, words_of_block in zip(section.blocks, block_words, strict=True):
                values[block.field, block.is_weights] = block.from_words(words_of_block)
        lengths = F.pad(self.lengths, (0, missing)) if missing else self.lengths
        lengths_of = iter(lengths.split([len(field.keys) for field in self.schema.jagged_fields]))
        fields: dict[str, FieldValue] = {}
        for field in self.schema.fields:
            if field.is_dense:
                fields[field.name] = values[field.name, False]
                continue
            parts: dict[str, Any] = {
                "values": values[field.name, False],
                "weights": values.get((field.name, True)),
                "lengths": next(lengths_of).to(field.lengths_dtype, copy=True).view(-1),
            }
            if field.kind == "keyed":
                fields[field.name] = KeyedJaggedTensor(keys=list(field.keys), stride=num_rows, **parts)
            else:
                fields[field.name] = JaggedTensor(**parts)
        return fields

    def to_chunks(self, rows: Sequence[np.ndarray], num_elements: np.ndarray) -> torch.Tensor:
        """Copies chunks of rows into one uint8 buffer, each as `from_bytes` reads it.

        Takes as many device operations for many chunks as for one; no host-device synchronization.

        Args:
            rows: for each chunk the rows in it.
            num_elements: int64 `[chunks, jagged fields]`, elements of each jagged field in each chunk.

        Returns:
            The chunks one after another, each taking the bytes of its rows, up to the next multiple of
            `BUFFER_ALIGNMENT`.
        """
        schema, counts = self.schema, np.array([len(chunk) for chunk in rows])
        lengths, sections = _gather([self], rows, num_elements)
        sized = [
            (words, section.num_bytes(counts, num_elements.T))
            for words, section in zip(sections, schema.sections, strict=True)
        ]
        sized.insert(schema.lengths_at, (lengths, counts * schema.num_keys * LENGTH_WIDTH))
        section_bytes = [w.view(-1).view(torch.uint8).split(num_bytes.tolist()) for w, num_bytes in sized]
        missing = -sum(num_bytes for _, num_bytes in sized) % BUFFER_ALIGNMENT
        padding = lengths.new_zeros(BUFFER_ALIGNMENT, dtype=torch.uint8)
        chunk_parts = zip(zip(*section_bytes, strict=True), missing.tolist(), strict=True)
        return torch.cat([part for parts, count in chunk_parts for part in (*parts, padding[:count])])

    @staticmethod
    def from_bytes(
        buffer: torch.Tensor, schema: RowSchema, num_rows: int, num_elements: Sequence[int]
    ) -> PackedRows:
        """Returns the rows in a chunk that `to_chunks` made, as views of it, for `gather_rows` to copy.

        Args:
            buffer: uint8, aligned to eight bytes; may be longer than the rows need.
            schema, num_rows: of the rows in the buffer.
            num_elements: their elements in each jagged field.
        """
        shapes = [
            (section.width, section.size(num_rows, num_elements), section.words)
            for section in schema.sections
        ]
        shapes.insert(schema.lengths_at, (LENGTH_WIDTH, schema.num_keys, num_rows))
        sections, start = [], 0
        for width, size, words in shapes:
            end = start + width * size * words
            sections.append(buffer[start:end].view(WORD_DTYPES[width]).view(size, words))
            start = end
        lengths = sections.pop(schema.lengths_at)
        return PackedRows(schema, num_rows, list(num_elements), lengths, sections)


def gather_rows(
    sources: Sequence[PackedRows], positions: np.ndarray, num_elements: Sequence[int]
) -> PackedRows:
    """Copies rows of several packed batches of one schema and device; no host-device synchronization.

    Args:
        sources: the batches.
        positions: int64 `[selected]`, each selected row's position among all rows of all sources.
        num_elements: elements of each jagged field in the selected rows together.
    """
    schema, num_rows = sources[0].schema, len(positions)
    chunk_elements = np.array([num_elements], dtype=np.int64)
    lengths, sections = _gather(sources, [positions], chunk_elements)
    return PackedRows(schema, num_rows, list(num_elements), lengths.view(schema.num_keys, num_rows), sections)


def select_from(sources: Sequence[PackedRows], positions: np.ndarray) -> PackedRows:
    """Runs `gather_rows` with numbers of elements that it reads itself: one host-device synchronization."""
    lengths = _together([source.lengths for source in sources], 1).cpu()[:, torch.from_numpy(positions)]
    return gather_rows(sources, positions, row_elements(lengths, sources[0].schema).sum(0).tolist())


def _gather(
    sources: Sequence[PackedRows], chunks: Sequence[np.ndarray], num_elements: np.ndarray
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies chunks of rows, with as many device operations for many chunks as for one.

    `chunks` are positions among all rows of all sources, int64 `[selected]` each; `num_elements` is int64
    `[chunks, jagged fields]`. Returns lengths, flat, and the words of each section; in each tensor one chunk
    follows another.
    """
    schema, num_rows = sources[0].schema, np.array([source.num_rows for source in sources])
    all_elements = num_elements.sum(0).tolist()
    keys = np.arange(schema.num_keys)[:, None] * num_rows.sum()
    indices = [np.concatenate(chunks), np.concatenate([(keys + rows).ravel() for rows in chunks])]
    for section in schema.sections:
        if not section.is_dense:
            indices += _segments(section, num_rows, chunks)
    in_order, key_indices, *section_indices = to_device_together(indices, sources[0].lengths.device)
    segments = iter(section_indices)
    lengths = _together([source.lengths for source in sources], 1).view(-1)
    selected = []
    for number, section in enumerate(schema.sections):
        words, rows = _together([source.sections[number] for source in sources]), in_order
        if not section.is_dense:
            total = section.size(None, all_elements)
            rows = _elements(lengths, next(segments), next(segments), total)
        if section.words == 1:  # torch selects from flat tensors faster
            selected.append(words.view(-1).index_select(0, rows).view(-1, 1))
        else:
            selected.append(words.index_select(0, rows))
    return lengths.index_select(0, key_indices), selected


def _segments(
    section: Section, num_rows: np.ndarray, chunks: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Works out which segments of a jagged section to gather: the elements of one key of one row each.

    Segments are numbered source by source, column by column, row by row.

    Args:
        section, chunks: as in `_gather`.
        num_rows: int64 `[sources]`, rows of each source.

    Returns:
        int64 `[segments]`: where each segment's size is among all lengths. And int64 `[chosen]`: the segments
        to gather, chunk by chunk, column by column, row by row.
    """
    positions, ends, num_columns = np.concatenate(chunks), num_rows.cumsum(), len(section.keys)
    firsts, lengths_at = ends - num_rows, section.keys[:, None] * ends[-1]
    sizes_at = [(lengths_at + np.arange(*rows)).ravel() for rows in zip(firsts, ends, strict=True)]
    source = np.searchsorted(ends, positions, side="right")
    first_column = firsts[source] * (num_columns - 1) + positions
    chosen = first_column + np.arange(num_columns)[:, None] * num_rows[source]
    if len(chunks) > 1:
        bounds = np.cumsum([len(rows) for rows in chunks])[:-1]
        chosen = np.concatenate([chunk.ravel() for chunk in np.split(chosen, bounds, 1)])
    return np.concatenate(sizes_at), chosen.ravel()


def _elements(
    lengths: torch.Tensor, sizes_at: torch.Tensor, chosen: torch.Tensor, total: int
) -> torch.Tensor:
    """int64 `[total]`: the elements in the chosen segments, as `_segments` returns them."""
    segment_sizes = lengths.index_select(0, sizes_at)
    starts = segment_sizes.cumsum(0, dtype=torch.int64) - segment_sizes
    return spread(starts.index_select(0, chosen), segment_sizes.index_select(0, chosen), total)


def _block_words(
    words: torch.Tensor, section: Section, num_elements: Sequence[int], missing: int
) -> list[torch.Tensor]:
    """Returns the words of each block in memory of their own, with `missing` rows of padding."""
    if section.is_dense:
        # Not by F.pad, which refuses words without columns in some versions of torch.
        words = torch.cat([words, words.new_zeros(missing, words.shape[1])]) if missing else words
        parts = words.split([block.words for block in section.blocks], 1)
    else:
        parts = words.split([num_elements[block.jagged_field] for block in section.blocks])
    return [_in_own_memory(part) for part in parts]


def _in_own_memory(words: torch.Tensor) -> torch.Tensor:
    """Returns contiguous words, copied unless they are all that their memory holds."""
    if words.untyped_storage().nbytes() == words.nbytes:
        return words
    return words.clone(memory_format=torch.contiguous_format)


def key_lengths(fields: Mapping[str, Any], schema: RowSchema, num_rows: int) -> torch.Tensor:
    """int32 `[keys, rows]`: lengths of every key of every jagged field."""
    lengths = [
        lengths_of(fields[field.name]).view(len(field.keys), num_rows) for field in schema.jagged_fields
    ]
    if lengths:
        return torch.cat(lengths).int()
    dense = fields[schema.fields[0].name]
    return torch.zeros(0, num_rows, dtype=torch.int32, device=dense.device)


def check_jagged_fields(fields: Mapping[str, Any]) -> None:
    """Checks that the lengths of every jagged field account for all of its values and weights. The host waits
    once for a device.

    Raises:
        ValueError: a field has values before, after or between its rows, which belong to no sample; or it has
            more or fewer weights than values, or lengths that are not flat int32 or int64.
    """
    if any(not isinstance(field, torch.Tensor) for field in fields.values()):
        check_extents(fields, jagged_extents(fields).cpu().numpy())


def jagged_extents(fields: Mapping[str, Any]) -> torch.Tensor:
    """Returns the sum of the lengths of each jagged field, and where its first row starts, int64
    `[2, jagged fields]`, for `check_extents`. Raises what `check_jagged_fields` does of lengths."""
    extents = []
    for name, field in fields.items():
        if isinstance(field, torch.Tensor):
            continue
        lengths, offsets = lengths_of(field), _given_offsets(field)
        if lengths.dim() != 1 or (len(lengths) and lengths.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"field {name!r} has {lengths.dtype} lengths of shape {tuple(lengths.shape)}; expected a "
                "flat tensor of int32 or int64"
            )
        total = lengths.sum(dtype=torch.int64)
        first = torch.zeros_like(total) if offsets is None or not len(offsets) else offsets[0].long()
        extents.append(torch.stack([total, first]))
    return torch.stack(extents, 1)


def check_extents(fields: Mapping[str, Any], extents: np.ndarray) -> None:
    """Checks what `jagged_extents` returned, on the host; raises what `check_jagged_fields` does."""
    jagged = [(name, field) for name, field in fields.items() if not isinstance(field, torch.Tensor)]
    for (name, field), (total, first) in zip(jagged, extents.T.tolist(), strict=True):
        values, weights = field.values().shape[0], field.weights_or_none()
        if values != total or first != 0:
            raise ValueError(
                f"field {name!r} has {values} values, its lengths add up to {total} and its first row starts "
                f"at {first}; rows must follow each other without gaps from value 0 on"
            )
        if weights is not None and weights.shape[:1] != (values,):
            raise ValueError(
                f"field {name!r} has {values} values and weights of shape {tuple(weights.shape)}; each value "
                "needs one weight"
            )


def _given_offsets(field: Any) -> torch.Tensor | None:
    """Returns the offsets that a field was made with, or has worked out; it is not asked to."""
    return field.offsets_or_none() if hasattr(field, "offsets_or_none") else None


def row_elements(lengths: torch.Tensor, schema: RowSchema) -> torch.Tensor:
    """Returns the elements of each row in each jagged field, int64 `[rows, jagged fields]`.

    Args:
        lengths: `[keys, rows]`, lengths of every key of every jagged field.
        schema: the fields.
    """
    per_field = lengths.split([len(field.keys) for field in schema.jagged_fields])
    if not per_field:
        return torch.zeros(lengths.shape[1], 0, dtype=torch.int64, device=lengths.device)
    return torch.stack([key_rows.sum(0, dtype=torch.int64) for key_rows in per_field], 1)


def spread(starts: torch.Tensor, lengths: torch.Tensor, total: int, step: int = 1) -> torch.Tensor:
    """Returns for each row b the `lengths[b]` indices `starts[b]`, `starts[b] + step`, …; int64 `[total]`.

    Args:
        starts, lengths: `[B]` integers.
        total: the sum of `lengths`; passed in so that nothing is read from the device.
        step: the difference between an index of a row and the next.
    """
    lengths = lengths.long()
    before = lengths.cumsum(0) - lengths
    first = torch.sub(starts.long(), before, alpha=step).repeat_interleave(lengths, output_size=total)
    return first.add_(torch.arange(total, device=starts.device), alpha=step)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies int64 arrays `[any]` to a device at once, from pinned memory so that the host does not wait."""
    together = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
    if device.type == "cuda":
        together = together.pin_memory()
    return list(together.to(device, non_blocking=True).split([len(array) for array in arrays]))


def _together(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Returns the tensors one after another; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)
