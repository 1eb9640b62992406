"""Cuts samples into pieces: finds the possible cuts, and computes the counts and costs of pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...distributed.plan import RowTable
from ...perf_model.cost import Cost
from .cut_rules import PIECE, CutRules, FieldRule, spans

if TYPE_CHECKING:
    from ...sequence_batch.fields import Schema

# Name of the column with the place of each row in its sample, of dtype `PIECE`.
COLUMN = "pieces"
# A piece with fewer tokens than this, one tile of attention, is not worth a row of its own.
MIN_TOKENS = 32
# The costs before these shares of a sample's items are computed, and those in between are interpolated.
GRID = 128
SHARES = np.linspace(0, 1, GRID + 1)
_WORKLOADS = Cost.sum_of_columns(1)

Counts = Mapping[str, np.ndarray]
PrefixCost = Callable[[np.ndarray, Counts], np.ndarray]


@dataclass(frozen=True)
class Cutting:
    """The rules and costs by which ranks cut samples, equal on all ranks.

    Attributes:
        rules: rules for the batches.
        schema: fields of the batches. None means that only tokens are known, as in the advisor.
        count_names: names of the batches' `row_counts`.
        prefix_cost: function that returns the cost of samples' first tokens; see `Pieces`.
        cost: cost of rows, from their counts.
    """

    rules: CutRules
    schema: Schema | None
    count_names: tuple[str, ...]
    prefix_cost: PrefixCost
    cost: Cost = _WORKLOADS

    def counts(self, samples: RowTable) -> dict[str, np.ndarray]:
        """Returns the counts that planning knows of each sample, by name, int64 `[samples]` each."""
        named = {} if self.schema is None else self.schema.by_name(samples.key_lengths)
        named |= {name: samples.columns[name] for name in self.count_names}
        return named | {"tokens": samples.tokens, "loss_tokens": samples.loss_tokens}

    def most_pieces(self, samples: RowTable) -> np.ndarray:
        """Returns how many pieces each sample may be cut into, int64 `[samples]`, at least 1.

        Items that are kept together form one piece. The other pieces have at least `MIN_TOKENS` each.
        """
        counts = self.counts(samples)
        last_cut = self.rules.last_cut(counts)
        most = 1 + self.rules.tokens_before(last_cut, counts) // MIN_TOKENS
        # `even_cuts` divides all items, and each piece gets whole ones.
        even = np.maximum((counts["tokens"] - self.rules.head_tokens(counts)) // MIN_TOKENS, 1)
        return np.minimum(np.minimum(most, even), last_cut + 1)

    def least_costs(self, samples: RowTable, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the least costs at which pieces of the samples `numbers` have `MIN_TOKENS`: that of a
        sample's first piece, and that of any other, int64 `[numbers]` each. The second is the cost of the
        whole sample if the sample cannot be cut.

        Later tokens cost more, so a piece that costs as much as the last `MIN_TOKENS` has at least as many.
        """
        counts = _select(self.counts(samples), numbers)
        thrice = {name: np.concatenate([counts_of_all] * 3) for name, counts_of_all in counts.items()}
        thrice |= self.rules.fixed_tokens(thrice)
        items = np.concatenate([*self._useful_cuts(counts), self.rules.num_items(counts)])
        tokens = self.rules.tokens_before(items, thrice)
        tokens[2 * len(numbers) :] = counts["tokens"]
        work, costs = self._prefixes(tokens, thrice)
        at_end, expected = work[2 * len(numbers) :], samples.work[numbers]
        for number in np.flatnonzero((at_end != expected).any(1))[:1]:
            raise ValueError(
                f"prefix_cost is {_text(at_end[number])}, and get_workloads {_text(expected[number])}, for a "
                f"whole sample of {counts['tokens'][number]} tokens; expected the same"
            )
        through_first, before_last, _ = np.split(costs, 3)
        return through_first, samples.workloads[numbers] - before_last

    def _useful_cuts(self, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many items precede the first and the last cut that leave `MIN_TOKENS` on either side.
        The second number is 0 if the sample cannot be cut."""
        num_items, last_cut = self.rules.num_items(counts), self.rules.last_cut(counts)
        after_head = np.maximum(counts["tokens"] - self.rules.head_tokens(counts), 1)
        few = np.minimum(-(-MIN_TOKENS * num_items // after_head), num_items)
        return few, np.minimum(num_items - few, last_cut)

    def even_cuts(self, samples: RowTable, num_pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the `numbers` and `items` for `cut` that divide samples into at most `num_pieces` pieces,
        int64 `[samples]`, with numbers of items as equal as the rules allow."""
        numbers = np.arange(len(num_pieces)).repeat(num_pieces - 1)
        before = np.cumsum(num_pieces - 1) - (num_pieces - 1)
        place = np.arange(1, len(numbers) + 1) - before[numbers]
        counts = _select(self.counts(samples), numbers)
        items = place * self.rules.num_items(counts) // num_pieces[numbers]
        items = np.clip(items, 1, np.maximum(self.rules.last_cut(counts), 1))
        is_new = np.append(True, (numbers[1:] != numbers[:-1]) | (items[1:] > items[:-1]))[: len(items)]
        return numbers[is_new], items[is_new]

    def items_before(self, samples: RowTable, numbers: np.ndarray, costs: np.ndarray) -> np.ndarray:
        """Returns the number of items before each cut, int64 `[cuts]`, for which `costs` come before it, as
        closely as whole items allow. At least `MIN_TOKENS` are on either side.

        `numbers` are those of `cut`, at least one. `costs`, int64 `[cuts]`, ascend within a sample.
        """
        chosen, owner = np.unique(numbers, return_inverse=True)
        counts = _select(self.counts(samples), chosen)
        first, last = self._useful_cuts(counts)
        points = np.rint(SHARES * self.rules.num_items(counts)[:, None]).ravel()
        to_points = np.arange(len(chosen)).repeat(GRID + 1)
        counts = _select({**counts, **self.rules.fixed_tokens(counts)}, to_points)
        tokens = self.rules.tokens_before(points.astype(np.int64), counts)
        work, known = self._prefixes(tokens, counts)
        decreases = (work[1:] < work[:-1]).any(1) & (to_points[1:] == to_points[:-1])
        for point in np.flatnonzero(decreases)[:1]:
            raise ValueError(
                f"prefix_cost decreases from {_text(work[point])} at {tokens[point]} tokens to "
                f"{_text(work[point + 1])} at {tokens[point + 1]}; expected the cost of all queries so far"
            )
        # All samples share one ascending array: the costs of sample k lie between k and k + 1.
        whole = np.maximum(samples.workloads[chosen], 1)
        ascending = to_points + known / whole[to_points]
        wanted = owner + costs / whole[owner]
        after = np.searchsorted(ascending, wanted)
        after = np.minimum(np.maximum(after, owner * (GRID + 1) + 1), owner * (GRID + 1) + GRID)
        step = ascending[after] - ascending[after - 1]
        part = np.minimum((wanted - ascending[after - 1]) / np.where(step > 0, step, 1), 1)
        items = np.rint(points[after - 1] + part * (points[after] - points[after - 1])).astype(np.int64)
        return np.minimum(np.maximum(items, first[owner]), last[owner])

    def cut(self, samples: RowTable, numbers: np.ndarray, items: np.ndarray) -> RowTable:
        """Returns the samples, with pieces in place of each cut sample. `numbers`, int64 `[cuts]`, has the
        sample of each cut, ascending, and `items` how many items come before it, ascending within a sample.

        Raises:
            ValueError: the rules forbid a cut or miscount tokens, or `prefix_cost` returns invalid costs.
        """
        num_pieces = 1 + np.bincount(numbers, minlength=len(samples.workloads))
        sample_of = np.arange(len(num_pieces)).repeat(num_pieces)
        pieces = self._pieces(samples, sample_of, numbers, items)
        whole = samples.take(sample_of)  # each row still has the counts of its sample
        chosen = np.flatnonzero(num_pieces.take(sample_of) > 1)
        cut_pieces = pieces[chosen]
        row_counts = [whole.columns[name] for name in self.count_names]
        columns = np.stack([*whole.key_lengths.T, *row_counts, whole.loss_tokens], 1)
        counts = columns.take(chosen, axis=0)
        begin, end = spans(self._rules_of_columns, counts, cut_pieces)
        lengths = end - begin
        work, workloads = self._work(whole, chosen, cut_pieces)
        changed: dict[str, Any] = {
            "work": work,
            "workloads": workloads,
            "tokens": cut_pieces["last_token"] - cut_pieces["first_token"],
            "key_lengths": lengths[:, : whole.key_lengths.shape[1]],
            "loss_tokens": lengths[:, -1],
        }
        if self.schema is not None:
            changed["sample_bytes"] = self.schema.row_bytes(changed["key_lengths"])
        for name, rows in changed.items():
            changed[name] = getattr(whole, name).copy()
            changed[name][chosen] = rows
        changed["starts_sample"] = pieces["first_item"] == 0
        of_pieces = {**whole.columns, COLUMN: pieces}
        for column, name in enumerate(self.count_names, whole.key_lengths.shape[1]):
            of_pieces[name] = whole.columns[name].copy()
            of_pieces[name][chosen] = lengths[:, column]
        made = replace(whole, **changed, columns=of_pieces)
        self._check_sums(samples, made)
        return made

    def _check_sums(self, samples: RowTable, made: RowTable) -> None:
        """Checks that the rules account for all tokens and loss tokens of the samples that are cut."""
        counted = self.rules.all_tokens(self.counts(samples))
        is_cut = np.bincount(made.sample_of) > 1
        for sample in np.flatnonzero(is_cut & (counted != samples.tokens))[:1]:
            raise ValueError(
                f"cut_rules count {counted[sample]} tokens of a sample, and get_tokens "
                f"{samples.tokens[sample]}; expected the same: check head, and the tokens of each ItemGroup"
            )
        summed = np.bincount(made.sample_of, made.loss_tokens).astype(np.int64)
        for sample in np.flatnonzero(summed != samples.loss_tokens)[:1]:
            raise ValueError(
                f"the pieces of a sample have {summed[sample]} loss tokens, and the sample "
                f"{samples.loss_tokens[sample]}; expected the same: check the rule of 'loss_tokens'"
            )

    def _pieces(
        self, samples: RowTable, sample_of: np.ndarray, numbers: np.ndarray, items: np.ndarray
    ) -> np.ndarray:
        """Returns the place of each piece in its sample, `[pieces]` of dtype `PIECE`."""
        counts = self.counts(samples)
        num_items, last_cut = self.rules.num_items(counts), self.rules.last_cut(counts)[numbers]
        for cut in np.flatnonzero((items < 1) | (items > last_cut))[:1]:
            raise ValueError(
                f"cut {cut} of sample {numbers[cut]} is after {items[cut]} items; expected 1 to "
                f"{last_cut[cut]}"
            )
        follows = np.flatnonzero(sample_of[1:] == sample_of[:-1]) + 1  # the piece after each cut
        tokens = self.rules.tokens_before(items, _select(counts, numbers))
        pieces = np.zeros(len(sample_of), dtype=PIECE)
        for unit, totals, at_cut in (("item", num_items, items), ("token", samples.tokens, tokens)):
            pieces[f"num_{unit}s"] = pieces[f"last_{unit}"] = totals[sample_of]
            pieces[f"first_{unit}"][follows] = at_cut
            pieces[f"last_{unit}"][follows - 1] = at_cut
        return pieces

    def _work(self, whole: RowTable, chosen: np.ndarray, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the `get_workloads` columns of each chosen row, int64 `[rows, columns]`, and its cost.
        Both are differences of prefixes, so pieces add up to their sample, whose counts `whole` has."""
        later = np.flatnonzero(pieces["first_item"])
        counts = _select(self.counts(whole), chosen[later])
        tokens = pieces["first_token"][later]
        work_before, costs_before = self._prefixes(tokens, {**counts, **self.rules.fixed_tokens(counts)})
        work = _differences(whole.work[chosen], work_before, later)
        for piece in np.flatnonzero((work < 0).any(1))[:1]:
            raise ValueError(
                f"prefix_cost decreases by {_text(-work[piece])} from {pieces['first_token'][piece]} to "
                f"{pieces['last_token'][piece]} of {pieces['num_tokens'][piece]} tokens; expected the cost "
                "of the first tokens' queries, and that of get_workloads at a sample's end"
            )
        return work, _differences(whole.workloads[chosen], costs_before, later)

    def _prefixes(self, tokens: np.ndarray, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
        """Returns the `get_workloads` columns of samples' first tokens, int64 `[cuts, columns]`, and their
        costs. `counts` has the counts of the whole samples, and their fixed tokens."""
        work = np.asarray(self.prefix_cost(tokens, counts))
        columns = work[:, None] if work.ndim == 1 else work
        expected = (len(tokens), self.cost.num_columns)
        if columns.shape != expected or not np.issubdtype(work.dtype, np.integer):
            raise ValueError(
                f"prefix_cost returned {work.dtype} of shape {work.shape}, expected integers of shape "
                f"{expected}, with as many columns as get_workloads"
            )
        for place in np.flatnonzero((columns < 0).any(1))[:1]:
            raise ValueError(
                f"prefix_cost returned {_text(columns[place])} for {tokens[place]} tokens; expected 0 or more"
            )
        columns = np.where(tokens[:, None] == 0, 0, columns.astype(np.int64))
        return columns, self.cost.of(tokens > 0, tokens, columns)

    @cached_property
    def _rules_of_columns(self) -> list[FieldRule]:
        """The rules of all keys of jagged fields, all row counts, and loss tokens, in this order."""
        fields = () if self.schema is None else self.schema.jagged_fields
        keys = [f"{field.name}.{key}" for field in fields for key in field.keys]
        return [self.rules.rule(name) for name in (*keys, *self.count_names, "loss_tokens")]


def _select(counts: Counts, numbers: np.ndarray) -> dict[str, np.ndarray]:
    return {name: counts_of_all[numbers] for name, counts_of_all in counts.items()}


def _differences(through: np.ndarray, before: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Returns the values of pieces, given those of their whole samples, `through`, `[rows, ...]`, and those
    before each cut, `before`, `[cuts, ...]`. `later` lists the rows after the cuts."""
    start, end = np.zeros_like(through), through.copy()
    start[later] = end[later - 1] = before
    return end - start


def _text(work: np.ndarray) -> str:
    """Returns the text of one row of columns, without brackets for a single column."""
    return str(work[0] if len(work) == 1 else work.tolist())
