"""Semantic IDs of items: the mapping from item ids to codes."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..argument_checks import require


@dataclass(frozen=True, eq=False)
class ItemSIDs:
    """Semantic IDs of a catalog's items. Several items may share a semantic ID.

    Attributes:
        items: `[num_items]` int64 item ids, strictly ascending, at least one.
        codes: `[num_items, num_hierarchies]` int64 codes.

    Raises:
        ValueError: `items` is empty or not strictly ascending, or the shape of `codes` does not match.
    """

    items: np.ndarray
    codes: np.ndarray

    def __post_init__(self) -> None:
        require(len(self.items) > 0, "number of items", 0, "at least one")
        is_table = self.codes.ndim == 2 and len(self.codes) == len(self.items)
        require(is_table, "shape of codes", self.codes.shape, f"[{len(self.items)}, num_hierarchies]")
        not_after = np.flatnonzero(np.diff(self.items) <= 0)
        if len(not_after):
            before, item = self.items[not_after[0] : not_after[0] + 2]
            raise ValueError(f"item {item} follows item {before}: expected strictly ascending ids")

    @staticmethod
    def load(path: Path, codebook_sizes: Sequence[int]) -> ItemSIDs:
        """Reads a mapping from a file.

        Args:
            path: `.pt` file with an integer tensor `[num_hierarchies, num_items]`, whose column indices are
                the item ids, or `.json` file, `{item: [codes]}`, with item ids from 0 as strings.
            codebook_sizes: sizes of the codebooks. Codes of hierarchy h are in [0, codebook_sizes[h]).

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is malformed, has no items, or does not fit the codebooks.
            Both messages name the file.
        """
        if path.suffix not in (".pt", ".json"):
            raise ValueError(f"{path}: expected a .pt or a .json file")
        read = _read_tensor if path.suffix == ".pt" else _read_json
        sids = read(path, len(codebook_sizes))
        try:
            sids.check_codebooks(codebook_sizes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return sids

    def check_codebooks(self, codebook_sizes: Sequence[int]) -> None:
        """Checks that the codes fit these codebooks.

        Raises:
            ValueError: items do not have one code per codebook, or a code is outside its codebook.
        """
        num_codes = self.codes.shape[1]
        expected = f"{num_codes}, as items have {num_codes} codes each"
        require(num_codes == len(codebook_sizes), "codebook_sizes", tuple(codebook_sizes), expected)
        is_outside = (self.codes < 0) | (self.codes >= np.array(codebook_sizes))
        if is_outside.any():
            row, hierarchy = np.argwhere(is_outside)[0]
            size = codebook_sizes[hierarchy]
            raise ValueError(
                f"item {self.items[row]} has code {self.codes[row, hierarchy]} in hierarchy {hierarchy}: "
                f"expected 0 to {size - 1}, as its codebook has {size}"
            )

    def rows_of(self, item_ids: np.ndarray) -> np.ndarray:
        """Returns the int64 positions of `item_ids` in `items`, in the shape of `item_ids`.

        Raises:
            ValueError: an id is not in `items`. The message names the first such id.
        """
        rows = np.minimum(np.searchsorted(self.items, item_ids), len(self.items) - 1)
        is_unknown = self.items[rows] != item_ids
        if is_unknown.any():
            item = item_ids[is_unknown][0]
            raise ValueError(f"item {item} has no semantic ID in the mapping ({len(self.items)} items)")
        return rows


def _read_tensor(path: Path, num_hierarchies: int) -> ItemSIDs:
    with path.open("rb") as file:
        try:
            tensor = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # malformed files raise many types of errors
            raise ValueError(f"{path}: expected a tensor that torch.save has written") from error
    expected = f"expected an integer tensor [{num_hierarchies}, num_items]"
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{path} has a {type(tensor).__name__}: {expected}")
    shape = list(tensor.shape)
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not is_integer or len(shape) != 2 or shape[0] != num_hierarchies:
        hint = "; transposed, it would fit" if is_integer and shape[1:] == [num_hierarchies] else ""
        raise ValueError(f"{path} has a tensor {shape} of {tensor.dtype}: {expected}{hint}")
    if not shape[1]:
        raise ValueError(f"{path} has no items")
    return ItemSIDs(np.arange(shape[1]), tensor.long().T.contiguous().numpy())


def _read_json(path: Path, num_hierarchies: int) -> ItemSIDs:
    try:
        # Pairs, because a dict would hide duplicate keys.
        pairs = json.loads(path.read_bytes(), object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}): expected an object, {{item: [codes]}}, as text in UTF-8"
        ) from error
    if not isinstance(pairs, tuple):
        raise ValueError(f"{path} has a {type(pairs).__name__}: expected an object, {{item: [codes]}}")
    if not pairs:
        raise ValueError(f"{path} has no items")
    codes_of: dict[int, list[int]] = {}
    for key, codes in pairs:
        digits = re.fullmatch("0*([0-9]{1,18})", key)  # fits int64
        if digits is None:
            raise ValueError(f"{path}: item {key!r}: expected an integer from 0, of at most 18 digits")
        item = int(digits[1])
        if item in codes_of:
            raise ValueError(f"{path}: key {key!r}: expected one key for item {item}, it has two")
        is_tuple = isinstance(codes, list) and len(codes) == num_hierarchies
        if not is_tuple or not all(type(code) is int and code.bit_length() < 64 for code in codes):
            raise ValueError(
                f"{path}: item {item} has {reprlib.repr(codes)}: expected {num_hierarchies} integers"
            )
        codes_of[item] = codes
    items = np.array(sorted(codes_of))
    return ItemSIDs(items, np.array([codes_of[item] for item in items.tolist()]))
