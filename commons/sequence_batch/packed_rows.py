"""The rows of a batch, whatever its fields, as a few tensors of machine words.

Selecting rows, or moving them between ranks, only copies bits, so fields share tensors of words. Dense fields
share one if their words have the same width, and jagged fields if their elements have the same size. Fifty
fields then take as few tensor operations as two. An index of an element takes 8 bytes, however large it is.

The lengths of rows are on the host, which computes all indices as a `Selection`. The device only copies
words, in `gather_fields` and `to_chunks`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from .fields import BUFFER_ALIGNMENT, WORD_DTYPES, FieldValue, Schema, Section, lengths_of


@dataclass(frozen=True)
class PackedRows:
    """The rows of a batch as words.

    `lengths`, int64 `[rows, keys]` on the host, are those of every key of every jagged field. The words of a
    section are `[rows, words]` if it is dense, or `[elements, words]` if it is jagged.
    """

    schema: Schema
    lengths: np.ndarray
    sections: list[torch.Tensor]

    @staticmethod
    def pack(fields: Mapping[str, Any], schema: Schema, lengths: np.ndarray) -> PackedRows:
        """Packs all rows of a batch's per-sample fields. A section with one field is a view if possible."""
        sections = [
            _together([field.to_words(fields[field.name]) for field in section.fields], int(section.is_dense))
            for section in schema.sections
        ]
        return PackedRows(schema, lengths, sections)

    @staticmethod
    def from_bytes(buffer: torch.Tensor, schema: Schema, lengths: np.ndarray) -> PackedRows:
        """Returns the rows of a chunk from `to_chunks`, as views of `buffer`.

        `buffer` is uint8, aligned to 8 bytes, and may be longer than rows of these lengths need.
        """
        sections, start = [], 0
        for section, size in zip(schema.sections, schema.sizes(lengths).sum(1).tolist(), strict=True):
            end = start + size * section.words * section.width
            words = buffer[start:end].view(WORD_DTYPES[section.width])
            sections.append(words.view(size, section.words))
            start = end
        return PackedRows(schema, lengths, sections)


@dataclass(frozen=True)
class Selection:
    """The indices that copy chunks of rows out of several packed batches.

    Example: select rows [2, 0] of two batches, whose one field has lengths [2, 1] and [3]. Row 2 has 3
    elements, starting at 3, and row 0 has 2, starting at 0. `indices` holds [3, -3], each start minus the
    elements of the runs before it; [3, 2], the elements per run; and [3, 2], the lengths. The device repeats
    the first by the second, [3, 3, 3, -3, -3], adds 0, 1, …, and copies elements [3, 4, 5, 0, 1].

    `indices`, int64, has the parts of one section after another: for a dense section its rows, for a jagged
    one the starts of all runs of elements and then their sizes. Last are the lengths of each jagged field, by
    key. Padding rows are copies of one row, without elements and of zeros, that follows those of all sources.
    """

    schema: Schema
    lengths: np.ndarray  # int64 `[rows, keys]`, of the selected rows, one chunk after another
    pads: bool  # whether some rows are padding
    sizes: np.ndarray  # int64 `[sections, chunks]`, number of rows or elements
    indices: torch.Tensor
    index_sizes: list[int]  # of the parts of `indices`

    @staticmethod
    def of(
        schema: Schema, sources: Sequence[np.ndarray], chunks: Sequence[np.ndarray], num_padding: int = 0
    ) -> Selection:
        """Selects rows of sources that share a schema, given the row lengths of each, int64 `[rows, keys]`.

        `chunks` has the rows of each chunk, int64 `[selected]`, as positions among the rows of all sources.
        `num_padding` padding rows are appended to the last chunk.
        """
        if num_padding:
            padding = np.full(num_padding, sum(map(len, sources)))
            sources = [*sources, np.zeros((1, schema.num_keys), dtype=np.int64)]
            chunks = [*chunks[:-1], np.append(chunks[-1], padding)]
        positions = np.concatenate(chunks)
        lengths, ends = np.concatenate(sources)[positions], np.cumsum([0, *map(len, chunks)])
        parts: list[np.ndarray] = []
        for section in schema.sections:
            parts += [positions] if section.is_dense else _runs(section, sources, positions, lengths, ends)
        parts += [lengths[:, keys].T.ravel() for keys in schema.keys.values()]
        through = np.pad(schema.sizes(lengths).cumsum(1), ((0, 0), (1, 0)))
        indices = torch.from_numpy(np.concatenate([*parts, np.zeros(0, dtype=np.int64)]))
        sizes = np.diff(through[:, ends])
        return Selection(schema, lengths, num_padding > 0, sizes, indices, [len(part) for part in parts])

    def pinned(self) -> Selection:
        """Returns the selection with its indices in pinned memory."""
        return replace(self, indices=self.indices.pin_memory())

    @property
    def chunk_bytes(self) -> np.ndarray:
        """The aligned size of each chunk in bytes, int64 `[chunks]`."""
        return self.schema.chunk_bytes(self.sizes)


def to_chunks(rows: PackedRows, selection: Selection) -> torch.Tensor:
    """Copies chunks of rows into one uint8 buffer, each in the layout that `PackedRows.from_bytes` reads.

    Many chunks take as few device operations as one. Host and device do not synchronize.
    """
    flat = [_choose(*pair).view(-1).view(torch.uint8) for pair in _locate([rows], selection)[0]]
    num_bytes = selection.schema.section_bytes[:, None] * selection.sizes
    missing = selection.chunk_bytes - num_bytes.sum(0)
    if len(flat) == 1 and not missing.any():
        return flat[0]
    parts = [of.split(sizes) for of, sizes in zip(flat, num_bytes.tolist(), strict=True)]
    padding = flat[0].new_zeros(BUFFER_ALIGNMENT)
    chunks = zip(zip(*parts, strict=True), missing.tolist(), strict=True)
    return torch.cat([part for of, count in chunks for part in (*of, padding[:count])])


def gather_fields(sources: Sequence[PackedRows], selection: Selection) -> dict[str, FieldValue]:
    """Copies the selected rows of packed batches into new fields, bit for bit.

    Each tensor has its own memory: TorchRec may free it early, a model may change it in place, and keeping it
    must not keep others. The sources are on one device, the selection is one chunk, and the host never waits.
    """
    schema, parts = selection.schema, defaultdict[str, dict[str, Any]](dict)
    pairs, lengths = _locate(sources, selection)
    totals = schema.totals(selection.lengths)
    for section, (words, index) in zip(schema.sections, pairs, strict=True):
        for field, chosen in zip(section.fields, _select(section, words, index, totals), strict=True):
            parts[field.name]["weights" if field.is_weights else "values"] = field.from_words(chosen)
    fields: dict[str, FieldValue] = {}
    for field in schema.fields:
        of_field = parts[field.name]
        if field.is_dense:
            fields[field.name] = of_field["values"]
        elif not field.is_weights:
            flat = torch.contiguous_format
            of_field["lengths"] = next(lengths).to(field.lengths_dtype, copy=True, memory_format=flat)
            if field.kind == "jagged":
                fields[field.name] = JaggedTensor(**of_field)
            else:  # without the lengths per key, TorchRec would read them from the device
                of_field |= {"keys": list(field.keys), "stride": len(selection.lengths)}
                fields[field.name] = KeyedJaggedTensor(**of_field, length_per_key=totals[field.name])
    return fields


def select_rows(sources: Sequence[PackedRows], positions: np.ndarray, num_rows: int) -> dict[str, FieldValue]:
    """Copies the rows at `positions`, counted over all sources, and then padding rows up to `num_rows`."""
    if num_rows < len(positions):
        raise ValueError(f"select_rows got num_rows={num_rows} for {len(positions)} rows; it cannot drop any")
    schema, lengths = sources[0].schema, [source.lengths for source in sources]
    return gather_fields(sources, Selection.of(schema, lengths, [positions], num_rows - len(positions)))


def _locate(
    sources: Sequence[PackedRows], selection: Selection
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Iterator[torch.Tensor]]:
    """Returns the words of all sources and the indices to copy for each section, and each field's lengths."""
    device = sources[0].sections[0].device
    parts = iter(to_device(selection.indices, device).split(selection.index_sizes))
    found = []
    for number, section in enumerate(selection.schema.sections):
        of_sources = [source.sections[number] for source in sources]
        if section.is_dense:
            if selection.pads:
                of_sources.append(of_sources[0].new_zeros(1, section.words))
            index = next(parts)
        else:
            first, counts = next(parts), next(parts)
            total = int(selection.sizes[number].sum())
            index = first.repeat_interleave(counts, output_size=total)
            index.add_(torch.arange(total, device=device))
        found.append((_together(of_sources), index))
    return found, parts


def _select(
    section: Section, words: torch.Tensor, index: torch.Tensor, totals: Mapping[str, Sequence[int]]
) -> Sequence[torch.Tensor]:
    """Returns the selected words of each field of a section, each field in its own memory."""
    if section.is_dense:
        rows = _choose(words, index)
        widths = [field.element_bytes // section.width for field in section.fields]
        if len(widths) == 1:
            return [rows]
        of_fields = [rows.new_empty(len(rows), width) for width in widths]
        if filled := [of_field for of_field in of_fields if of_field.numel()]:
            torch.split_with_sizes_copy(rows, [of.shape[1] for of in filled], dim=1, out=filled)
        return of_fields
    sizes = [sum(totals[field.name]) for field in section.fields]
    return [_choose(words, part) for part in index.split(sizes)]


def _choose(words: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the rows of `words` at `index`, `[chosen, words]`."""
    if words.shape[1] == 1:  # torch selects from flat tensors faster
        return words.view(-1).index_select(0, index).view(-1, 1)
    return words.index_select(0, index)


def _runs(
    section: Section, sources: Sequence[np.ndarray], rows: np.ndarray, lengths: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the runs of elements to copy from a jagged section: starts and sizes, each int64 `[runs]`.

    A run is one key of one row. Its start is reduced by the elements of the runs before it. Sources order
    runs by key, then row, and the selection orders them by chunk, key, then row.
    """
    starts, before = [], 0
    for of_source in sources:
        of_keys = of_source[:, section.keys].T  # [keys, rows]
        through = np.cumsum(of_keys.ravel()).reshape(of_keys.shape)
        starts.append(through - of_keys + before)
        before += int(of_keys.sum())
    chunks = [slice(*span) for span in pairwise(ends.tolist())]
    first, counts = (
        np.concatenate([runs[:, chunk].ravel() for chunk in chunks])
        for runs in (np.concatenate(starts, 1)[:, rows], lengths[:, section.keys].T)
    )
    return first - (np.cumsum(counts) - counts), counts


def read_lengths(fields: Mapping[str, Any], schema: Schema, num_rows: int) -> np.ndarray:
    """Returns the checked row lengths, int64 `[rows, keys]`. The host waits for lengths on a device."""
    return checked_lengths(fields, schema, num_rows, read_together(jagged_parts(fields, schema)))


def jagged_parts(fields: Mapping[str, Any], schema: Schema) -> list[torch.Tensor]:
    """Returns two tensors per jagged field for `checked_lengths` to check on the host: its flat lengths, and
    the start of its first row, which is empty if the field has no offsets. Raises a ValueError if lengths are
    not flat int32 or int64."""
    parts = []
    for field in schema.jagged_fields:
        value = fields[field.name]
        lengths = lengths_of(value)
        if lengths.dim() != 1 or (len(lengths) and lengths.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"field {field.name!r} has {lengths.dtype} lengths of shape {tuple(lengths.shape)}; expected "
                "a flat tensor of int32 or int64"
            )
        # Read only offsets that the value already has, so that it need not compute any.
        offsets = value.offsets_or_none()
        parts += [lengths, lengths[:0] if offsets is None else offsets[:1]]
    return parts


def checked_lengths(
    fields: Mapping[str, Any], schema: Schema, num_rows: int, parts: Sequence[np.ndarray], whose: str = ""
) -> np.ndarray:
    """Returns the row lengths, int64 `[rows, keys]`. Raises a ValueError if the rows of a field do not cover
    its values exactly, or there is not one weight per value."""
    for field, lengths, start in zip(schema.jagged_fields, parts[::2], parts[1::2], strict=True):
        value, total, first = fields[field.name], lengths.sum(), start.sum()
        values, weights = value.values().shape[0], value.weights_or_none()
        if values != total or first:
            raise ValueError(
                f"field '{field.name}{whose}' has {values} values, its lengths add up to {total} and its "
                f"first row starts at {first}; rows must follow each other without gaps from value 0 on: "
                "make it of values[offsets[0] : offsets[-1]] and lengths=offsets.diff()"
            )
        if weights is not None and weights.shape[:1] != (values,):
            raise ValueError(
                f"field '{field.name}{whose}' has {values} values and weights of shape "
                f"{tuple(weights.shape)}; each value needs one weight"
            )
    by_key = np.concatenate([np.zeros(0, dtype=np.int64), *parts[::2]]).reshape(schema.num_keys, num_rows)
    return np.ascontiguousarray(by_key.T)


def read_together(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Returns integer tensors of any shapes as int64 arrays on the host, which waits only once."""
    if not tensors:
        return []
    together = _together([tensor.reshape(-1) for tensor in tensors]).cpu().long().numpy()
    parts = np.split(together, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_device(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies indices to a device, from pinned memory so that the host does not wait."""
    if device.type == "cuda" and not indices.is_pinned():
        indices = indices.pin_memory()
    return indices.to(device, non_blocking=True)


def _together(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenates tensors. A single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)
