"""Rows of a batch, whatever its fields, as a few tensors of machine words.

A batch has many fields of many dtypes. To select rows, or to move them between ranks, only takes copying
bits, so fields share tensors of words: dense fields by the width of their words, jagged fields by the size of
their elements. Rows then cost the same few tensor operations for fifty fields as for two, and the indices
that select them take 8 bytes per element, however large it is.

The lengths of rows are on the host, where all indices are worked out: `Selection` has them. What is left for
the device is to copy words, in `gather_fields` and `to_chunks`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .optional_types import JaggedTensor, KeyedJaggedTensor
from .row_schema import BUFFER_ALIGNMENT, WORD_DTYPES, FieldValue, Schema, Section, lengths_of


@dataclass(frozen=True)
class PackedRows:
    """Rows of a batch as words.

    Attributes:
        lengths: int64 `[rows, keys]`, lengths of every key of every jagged field; on the host.
        sections: the words of each section of the schema, `[rows or elements, words]`.
    """

    schema: Schema
    lengths: np.ndarray
    sections: list[torch.Tensor]

    @staticmethod
    def pack(fields: Mapping[str, Any], schema: Schema, lengths: np.ndarray) -> PackedRows:
        """Returns all rows of a batch's per-sample fields; a lone field is not copied."""
        sections = [
            _together([field.to_words(fields[field.name]) for field in section.fields], int(section.is_dense))
            for section in schema.sections
        ]
        return PackedRows(schema, lengths, sections)

    @staticmethod
    def from_bytes(buffer: torch.Tensor, schema: Schema, lengths: np.ndarray) -> PackedRows:
        """Returns the rows in a chunk that `to_chunks` made, as views of it.

        `buffer` is uint8, aligned to eight bytes, and may be longer than rows of these lengths need.
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
    """Chunks of rows of several packed batches, as the indices that copy their words.

    Example: two batches of a field with lengths [2, 1] and [3], and the rows [2, 0] of both together. Their
    elements start at 3 and 0, and are 3 and 2. `indices` has [3, -3], the starts less the elements of the
    runs before them; [3, 2], how many there are; and [3, 2], the lengths. The device repeats the first by the
    second, [3, 3, 3, -3, -3], and adds 0, 1, …, so that it copies the elements [3, 4, 5, 0, 1].

    Attributes:
        lengths: int64 `[rows, keys]`, of the selected rows, one chunk after another.
        pads: whether some rows are padding, with zero length in jagged fields and zeros in dense ones: they
            are the one row of a source after all others.
        sizes: int64 `[sections, chunks]`, rows or elements of each section in each chunk.
        indices: int64, of all sections one after another, and then the lengths by field and key. A dense
            section has the rows. A jagged one has for each run of elements the first, less the elements
            before the run, and then for each run how many there are.
        index_sizes: how many indices each section has, in one or two parts, and then each field's lengths.
    """

    schema: Schema
    lengths: np.ndarray
    pads: bool
    sizes: np.ndarray
    indices: torch.Tensor
    index_sizes: list[int]

    @staticmethod
    def of(
        schema: Schema, sources: Sequence[np.ndarray], chunks: Sequence[np.ndarray], num_padding: int = 0
    ) -> Selection:
        """Selects rows of sources of one schema.

        Args:
            sources: lengths of the rows of each, int64 `[rows, keys]`.
            chunks: int64 `[selected]` each, positions among all rows of all sources.
            num_padding: rows of padding after the last chunk.
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
        """int64 `[chunks]`, aligned bytes of each."""
        return self.schema.chunk_bytes(self.sizes)


def to_chunks(rows: PackedRows, selection: Selection) -> torch.Tensor:
    """Copies chunks of rows into one uint8 buffer, each as `PackedRows.from_bytes` reads it.

    Takes as many device operations for many chunks as for one; no host-device synchronization.
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
    """Copies rows of packed batches of one device into fields, bit for bit as they were packed.

    Each tensor has memory of its own: TorchRec may free one early, a model may change it in place, and who
    keeps it keeps no other. The selection is a single chunk. No host-device synchronization.
    """
    schema, parts = selection.schema, defaultdict[str, dict[str, Any]](dict)
    pairs, lengths = _locate(sources, selection)
    for section, (words, index) in zip(schema.sections, pairs, strict=True):
        for field, chosen in zip(section.fields, _select(section, words, index, selection), strict=True):
            parts[field.name]["weights" if field.is_weights else "values"] = field.from_words(chosen)
    fields: dict[str, FieldValue] = {}
    for field in schema.fields:
        of_field = parts[field.name]
        if field.is_dense:
            fields[field.name] = of_field["values"]
        elif not field.is_weights:
            of_field["lengths"] = next(lengths).to(
                field.lengths_dtype, copy=True, memory_format=torch.contiguous_format
            )
            if field.kind == "keyed":
                of_field |= {"keys": list(field.keys), "stride": len(selection.lengths)}
            made_of = KeyedJaggedTensor if field.kind == "keyed" else JaggedTensor
            fields[field.name] = made_of(**of_field)
    return fields


def select_rows(
    sources: Sequence[PackedRows], positions: np.ndarray, num_rows: int | None = None
) -> dict[str, FieldValue]:
    """Copies the rows at these positions among all rows of all sources, then padding up to `num_rows`."""
    num_padding = 0 if num_rows is None else num_rows - len(positions)
    if num_padding < 0:
        raise ValueError(f"select_rows got num_rows={num_rows} for {len(positions)} rows; it drops none")
    lengths = [source.lengths for source in sources]
    return gather_fields(sources, Selection.of(sources[0].schema, lengths, [positions], num_padding))


def _locate(
    sources: Sequence[PackedRows], selection: Selection
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Iterator[torch.Tensor]]:
    """Returns for each section the words of all sources, and which to copy; and each field's lengths."""
    device = sources[0].sections[0].device
    parts = iter(_to_device(selection.indices, device).split(selection.index_sizes))
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
            index = first.repeat_interleave(counts, output_size=total).add_(
                torch.arange(total, device=device)
            )
        found.append((_together(of_sources), index))
    return found, parts


def _select(
    section: Section, words: torch.Tensor, index: torch.Tensor, selection: Selection
) -> Sequence[torch.Tensor]:
    """Returns the chosen words of each field of a section, in memory of their own."""
    if section.is_dense:
        rows = _choose(words, index)
        widths = [field.element_bytes // section.width for field in section.fields]
        if len(widths) == 1:
            return [rows]
        of_fields = [rows.new_empty(len(rows), width) for width in widths]
        if filled := [of_field for of_field in of_fields if of_field.numel()]:
            torch.split_with_sizes_copy(rows, [of.shape[1] for of in filled], dim=1, out=filled)
        return of_fields
    keys = [selection.schema.keys[field.name] for field in section.fields]
    sizes = [int(selection.lengths[:, of_field].sum()) for of_field in keys]
    return [_choose(words, part) for part in index.split(sizes)]


def _choose(words: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns these rows of words, `[chosen, words]`."""
    if words.shape[1] == 1:  # torch selects from flat tensors faster
        return words.view(-1).index_select(0, index).view(-1, 1)
    return words.index_select(0, index)


def _runs(
    section: Section,
    sources: Sequence[np.ndarray],
    positions: np.ndarray,
    lengths: np.ndarray,
    ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the runs of elements to copy of a jagged section, each of one key of one row: the first element
    of each, less the elements of the runs before it, and how many; int64 `[runs]`.

    A source has runs key by key and row by row. The selection has them chunk by chunk, then likewise.
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
        for runs in (np.concatenate(starts, 1)[:, positions], lengths[:, section.keys].T)
    )
    return first - (np.cumsum(counts) - counts), counts


def read_lengths(fields: Mapping[str, Any], schema: Schema, num_rows: int) -> np.ndarray:
    """Returns the checked lengths of a batch, int64 `[rows, keys]`; the host waits for those on a device."""
    return checked_lengths(fields, schema, num_rows, read_together(jagged_parts(fields, schema)))


def jagged_parts(fields: Mapping[str, Any], schema: Schema) -> list[torch.Tensor]:
    """Returns for each jagged field its flat lengths, and where its first row starts, empty for 0; for
    `checked_lengths`, once they are on the host.

    Raises:
        ValueError: lengths are not flat int32 or int64.
    """
    parts = []
    for field in schema.jagged_fields:
        value = fields[field.name]
        lengths = lengths_of(value)
        if lengths.dim() != 1 or (len(lengths) and lengths.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"field {field.name!r} has {lengths.dtype} lengths of shape {tuple(lengths.shape)}; expected "
                "a flat tensor of int32 or int64"
            )
        # Offsets that it was made with, or has worked out; it is not asked to.
        offsets = value.offsets_or_none() if hasattr(value, "offsets_or_none") else None
        parts += [lengths, lengths[:0] if offsets is None else offsets[:1]]
    return parts


def checked_lengths(
    fields: Mapping[str, Any], schema: Schema, num_rows: int, parts: Sequence[np.ndarray], whose: str = ""
) -> np.ndarray:
    """Returns lengths, int64 `[rows, keys]`, once those of every jagged field account for all that it holds.

    Raises:
        ValueError: a field has values before, after or between its rows, which belong to no sample; or it has
            more or fewer weights than values.
    """
    for field, lengths, start in zip(schema.jagged_fields, parts[::2], parts[1::2], strict=True):
        value, total, first = fields[field.name], lengths.sum(), start.sum()
        values, weights = value.values().shape[0], value.weights_or_none()
        if values != total or first:
            raise ValueError(
                f"field '{field.name}{whose}' has {values} values, its lengths add up to {total} and its "
                f"first row starts at {first}; rows must follow each other without gaps from value 0 on"
            )
        if weights is not None and weights.shape[:1] != (values,):
            raise ValueError(
                f"field '{field.name}{whose}' has {values} values and weights of shape "
                f"{tuple(weights.shape)}; each value needs one weight"
            )
    by_key = np.concatenate([np.zeros(0, dtype=np.int64), *parts[::2]]).reshape(schema.num_keys, num_rows)
    return np.ascontiguousarray(by_key.T)


def read_together(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Returns integer tensors of any shapes on the host, as int64; the host waits once."""
    if not tensors:
        return []
    together = _together([tensor.reshape(-1) for tensor in tensors]).cpu().long().numpy()
    parts = np.split(together, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


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
    return list(_to_device(together, device).split([len(array) for array in arrays]))


def _to_device(indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and not indices.is_pinned():
        indices = indices.pin_memory()
    return indices.to(device, non_blocking=True)


def _together(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Returns the tensors one after another; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)
