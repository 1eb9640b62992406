"""Rules for cutting samples into pieces. Planning uses them, and works without torch.

A sample is a sequence of items. Cuts fall between items, so a piece is a run of items. All other data of a
batch follows the items, by one rule per field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ...sequence_batch.fields import Schema

__all__ = [
    *("ALONG_ITEMS", "FROM_END", "TO_EVERY", "WITH_FIRST", "WITH_LAST"),
    *("CutRules", "FieldRule", "ItemGroup"),
]
# The place of a row in its sample: half-open ranges of its items and tokens, and the totals of the whole
# sample. A whole sample is a single piece.
_PIECE_NAMES = ("first_item", "last_item", "num_items", "first_token", "last_token", "num_tokens")
PIECE = np.dtype([(name, np.int64) for name in _PIECE_NAMES])
# Places of fields that do not follow the items.
_OF_WHOLE = ("first", "last", "every")
_PLACES = ("items", "items_from_end", *_OF_WHOLE)


@dataclass(frozen=True)
class FieldRule:
    """The rule by which a field, or one key of it, follows the items of its sample.

    Provisional: may change in a minor version.

    Attributes:
        place: place of the elements. "items": along the items, from the first on. "items_from_end": along the
            last items, like labels. "first" or "last": all with the first or last piece. "every": a copy with
            each piece. A piece that does not get a dense value has zeros.
        unit: number of elements per item.
        before, after: numbers of extra items on either side. A piece from item a to item b, exclusive, gets
            the elements of items a − `before` to b + `after`. Extra items are a halo, which the model looks
            up but computes no tokens for. A negative number shifts the elements. The sum must be at least 0.

    Raises:
        ValueError: the place is unknown, the unit is below 1, or some elements would be in no piece.
    """

    place: str
    unit: int = 1
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        if self.place not in _PLACES:
            raise ValueError(f"place is {self.place!r}; expected one of {_PLACES}")
        if self.unit < 1:
            raise ValueError(f"unit is {self.unit}; expected the elements of an item, at least 1")
        if self.before + self.after < 0:
            raise ValueError(
                f"before = {self.before} and after = {self.after} add up to less than 0, so that elements "
                "between two pieces would be lost"
            )


def spans(
    rules: Sequence[FieldRule], lengths: np.ndarray, pieces: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range of a sample's elements that each piece gets in each field: inclusive begins and
    exclusive ends, int64 `[pieces, rules]` each.

    `lengths`, int64 `[pieces, rules]`, are those of the whole samples. `pieces` have the dtype `PIECE`.
    """
    place, unit, before, after = _by_attribute(rules)
    first, last, num_items = (pieces[name][:, None] for name in ("first_item", "last_item", "num_items"))
    is_first, is_last = first == 0, last == num_items
    elsewhere = ((place == "first") & ~is_first) | ((place == "last") & ~is_last)
    lengths, is_whole = np.where(elsewhere, 0, lengths), np.isin(place, _OF_WHOLE)
    begin = _first_elements(first - before, lengths, num_items, unit, place)
    end = _first_elements(last + after, lengths, num_items, unit, place)
    begin = np.where(is_first | is_whole, 0, begin)
    return begin, np.maximum(np.where(is_last | is_whole, lengths, end), begin)


def own_spans(
    rules: Sequence[FieldRule], lengths: np.ndarray, pieces: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ranges of `spans`, without elements that earlier pieces of the sample already have. One
    after another, these ranges make up all elements of the sample."""
    begin, end = spans(rules, lengths, pieces)
    place, unit, _, after = _by_attribute(rules)
    first, num_items = pieces["first_item"][:, None], pieces["num_items"][:, None]
    earlier_end = _first_elements(first + after, lengths, num_items, unit, place)
    is_later = (first > 0) & ~np.isin(place, _OF_WHOLE)
    begin = np.where(is_later, np.maximum(begin, earlier_end), begin)
    return begin, np.where((place == "every") & (first > 0), 0, end)


def _by_attribute(rules: Sequence[FieldRule]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns `place`, `unit`, `before`, and `after` of the rules, `[rules]` each."""
    numbers = np.array([(rule.unit, rule.before, rule.after) for rule in rules], dtype=np.int64)
    return np.array([rule.place for rule in rules], dtype=np.str_), *numbers.reshape(-1, 3).T


def _first_elements(
    items: np.ndarray, lengths: np.ndarray, num_items: np.ndarray, unit: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """Returns the index of the first element of each item, clipped to the existing elements."""
    with_elements = lengths // unit
    skipped = np.where(place == "items_from_end", num_items - with_elements, 0)
    return np.minimum(np.maximum(items - skipped, 0), with_elements) * unit


ALONG_ITEMS = FieldRule("items")
"""Elements follow the items, from the first on. Provisional: may change in a minor version."""
FROM_END = FieldRule("items_from_end")
"""Elements follow the last items, like labels. Provisional: may change in a minor version."""
WITH_FIRST = FieldRule("first")
"""All elements go with the first piece. Provisional: may change in a minor version."""
WITH_LAST = FieldRule("last")
"""All elements go with the last piece. Provisional: may change in a minor version."""
TO_EVERY = FieldRule("every")
"""Every piece gets a copy of the elements. Provisional: may change in a minor version."""


@dataclass(frozen=True)
class ItemGroup:
    """The items of a sample that one field holds.

    Provisional: may change in a minor version.

    Attributes:
        name: name of the field, or of the count in `row_counts`.
        elements: number of elements per item in this field.
        tokens: number of tokens per item, including tokens from other fields.
    """

    name: str
    elements: int = 1
    tokens: int = 1


@dataclass(frozen=True)
class CutRules:
    """The rules for cutting the samples of a batch type. Plain data, equal on all ranks.

    Names are paths of fields, as in `BaseBatch.per_sample_fields`. If a KeyedJaggedTensor has several keys, a
    dot and the key follow.

    Provisional: may change in a minor version.

    Attributes:
        items: items of a sample, one group after another.
        fields: rule of each field, of each entry in `row_counts`, and of "loss_tokens".
        head: names of counts whose elements are tokens before the first item. They stay with the first piece.
        kept_together: name of the count of last items kept in one piece, like candidates. Empty means 1 item.
        left_out: number of tokens at a sample's end that the model leaves out.
    """

    items: tuple[ItemGroup, ...]
    fields: Mapping[str, FieldRule]
    head: tuple[str, ...] = ()
    kept_together: str = ""
    left_out: int = 0

    @property
    def has_halo(self) -> bool:
        """Whether pieces get elements of items outside their own."""
        return any(rule.before + rule.after > 0 for rule in self.fields.values())

    def all_tokens(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the number of tokens of each sample as the rules count them, int64 `[samples]`."""
        item_tokens = (group.tokens * (counts[group.name] // group.elements) for group in self.items)
        return sum(item_tokens, self.head_tokens(counts)) - self.left_out

    def head_tokens(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the number of tokens before the first item of each sample, int64 `[samples]`."""
        return sum((counts[name] for name in self.head), np.zeros_like(counts["tokens"]))

    def num_items(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the number of items of each sample, int64 `[samples]`."""
        return np.sum([counts[group.name] // group.elements for group in self.items], axis=0)

    def last_cut(self, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the largest number of items that may precede a cut, int64 `[samples]`, or 0 for a sample
        that cannot be cut."""
        together = counts[self.kept_together] if self.kept_together else 1
        return np.maximum(self.num_items(counts) - np.maximum(together, 1), 0)

    def tokens_before(self, items: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns how many tokens precede a cut after this many items, int64 `[samples]`: none after 0 items,
        and all tokens of the sample after its last item."""
        tokens, left = self.head_tokens(counts), items
        for group in self.items:
            group_items = np.minimum(left, counts[group.name] // group.elements)
            tokens = tokens + group.tokens * group_items
            left = left - group_items
        return np.where(items == 0, 0, np.minimum(tokens, counts["tokens"]))

    def fixed_tokens(self, counts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns "head_tokens", the tokens before each sample's first item, and "kept_tokens", the tokens of
        the items that are kept together, int64 `[samples]` each."""
        head = self.head_tokens(counts)
        if not self.kept_together:
            return {"head_tokens": head, "kept_tokens": np.zeros_like(head)}
        kept = counts[self.kept_together]
        before = np.maximum(self.tokens_before(self.num_items(counts) - kept, counts), head)
        return {"head_tokens": head, "kept_tokens": np.where(kept > 0, counts["tokens"] - before, 0)}

    def rule(self, name: str) -> FieldRule:
        """Returns the rule of a field, a count, or "<field>.<key>". Raises a ValueError if there is none."""
        for known in (name, name.rpartition(".")[0]):
            if known in self.fields:
                return self.fields[known]
        raise ValueError(f"cut_rules has no rule for {name!r}; it has {sorted(self.fields)}")

    def check(self, schema: Schema, count_names: Sequence[str]) -> None:
        """Raises a ValueError if a field or count has no rule, or one that does not fit, or if planning does
        not know a counted name."""
        for field in schema.fields:
            for key in field.keys:
                rule = self.rule(f"{field.name}.{key}")
                if field.is_dense and rule.place not in _OF_WHOLE:
                    raise ValueError(
                        f"{field.name!r} is dense and has rule {rule.place!r}; expected first, last or every"
                    )
        for name in (*count_names, "loss_tokens"):
            self.rule(name)
        known = {*count_names, *(field.name for field in schema.jagged_fields)}
        known.update(f"{field.name}.{key}" for field in schema.jagged_fields for key in field.keys)
        for name in (*(group.name for group in self.items), *self.head, self.kept_together):
            if name and name not in known:
                raise ValueError(f"cut_rules counts {name!r}; planning knows {sorted(known)}")
