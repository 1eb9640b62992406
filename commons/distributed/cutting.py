"""Cuts samples into pieces that balance: which samples, into how many pieces, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from commons.distributed.loaded_samples import LoadedSamples
from commons.sequence_batch.cut_rules import PIECE, CutRules
from commons.sequence_batch.row_schema import RowSchema

# A piece is worth its row from this many tokens on: a tile of attention.
MIN_TOKENS = 32
# Points of a sample at which the costs of its prefixes are known; between them they are interpolated.
GRID = 64

Counts = Mapping[str, np.ndarray]
PrefixCost = Callable[[np.ndarray, Counts], np.ndarray]


@dataclass(frozen=True)
class Cutting:
    """How the ranks of a planner cut samples; the same on all of them.

    Attributes:
        rules: rules of the batches.
        schema: fields of the batches.
        count_names: names of the batches' `row_counts`.
        prefix_cost: as `BatchShuffler.prefix_cost`.
    """

    rules: CutRules
    schema: RowSchema
    count_names: tuple[str, ...]
    prefix_cost: PrefixCost

    def counts(self, samples: LoadedSamples) -> dict[str, np.ndarray]:
        """Returns what planning knows of each sample by name, int64 `[samples]` each."""
        elements = zip(self.schema.jagged_fields, samples.num_elements.T, strict=True)
        named = {field.name: of_field for field, of_field in elements}
        named |= dict(zip(self.count_names, samples.row_counts.T, strict=True))
        return named | {"tokens": samples.tokens, "loss_tokens": samples.loss_tokens}

    def most_pieces(self, samples: LoadedSamples) -> np.ndarray:
        """Returns how many pieces each sample may be cut into, int64 `[samples]`; at least 1."""
        by_items = self.rules.last_cut(self.counts(samples)) + 1
        return np.maximum(np.minimum(by_items, samples.tokens // MIN_TOKENS), 1)

    def equal_cuts(self, samples: LoadedSamples, num_pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds the cuts that divide samples into pieces of equal cost, as far as whole items allow.

        Args:
            samples: as loaded.
            num_pieces: int64 `[samples]`.

        Returns:
            Two int64 `[cuts]`, as `cut` takes them.
        """
        chosen = np.flatnonzero(num_pieces > 1)
        counts = {name: of_all[chosen] for name, of_all in self.counts(samples).items()}
        num_items, last_cut = self.rules.num_items(counts), self.rules.last_cut(counts)
        items = np.rint(np.linspace(0, 1, GRID + 1) * num_items[:, None])
        repeated = {name: of_all.repeat(GRID + 1) for name, of_all in counts.items()}
        tokens = self.rules.tokens_before(items.ravel().astype(np.int64), repeated)
        costs = self._prefix_costs(tokens, repeated).reshape(items.shape)
        shares = costs / np.maximum(costs[:, -1:], 1)
        # One ascending row of numbers for all samples: sample k has those from k to k + 1.
        ascending = (shares + np.arange(len(chosen))[:, None]).ravel()
        pieces = num_pieces[chosen]
        owner = np.arange(len(chosen)).repeat(pieces - 1)
        number = np.arange(1, len(owner) + 1) - (np.cumsum(pieces - 1) - (pieces - 1)).repeat(pieces - 1)
        wanted = owner + number / pieces[owner]
        after = np.clip(np.searchsorted(ascending, wanted), owner * (GRID + 1) + 1, owner * (GRID + 1) + GRID)
        step = ascending[after] - ascending[after - 1]
        part = np.clip((wanted - ascending[after - 1]) / np.where(step > 0, step, 1), 0, 1)
        flat = items.ravel()
        cut = np.rint(flat[after - 1] + part * (flat[after] - flat[after - 1])).astype(np.int64)
        cut = np.clip(cut, 1, np.maximum(last_cut[owner], 1))
        is_new = np.append(True, (owner[1:] != owner[:-1]) | (cut[1:] > cut[:-1]))[: len(cut)]
        return chosen[owner[is_new]], cut[is_new]

    def cut(self, samples: LoadedSamples, numbers: np.ndarray, items: np.ndarray) -> LoadedSamples:
        """Returns the samples with the pieces of cut ones in their places.

        Args:
            samples: as loaded.
            numbers: int64 `[cuts]`, ascending: the sample of each cut.
            items: int64 `[cuts]`, ascending within a sample: items before each cut.

        Raises:
            ValueError: a cut is not within the items of its sample, or `prefix_cost` decreases.
        """
        num_pieces = 1 + np.bincount(numbers, minlength=len(samples.workloads))
        sample_of = np.arange(len(num_pieces)).repeat(num_pieces)
        pieces = self._pieces(samples, sample_of, numbers, items)
        made = samples._of_samples(sample_of)
        chosen = num_pieces[sample_of] > 1
        of_cut, whole = pieces[chosen], {name: of_all[chosen] for name, of_all in self.counts(made).items()}
        made.tokens[chosen] = of_cut["last_token"] - of_cut["first_token"]
        made.workloads[chosen] = self._workloads(of_cut, whole, made.workloads[chosen])
        made.loss_tokens[chosen] = self._in_pieces("loss_tokens", whole["loss_tokens"], of_cut)
        for column, name in enumerate(self.count_names):
            made.row_counts[chosen, column] = self._in_pieces(name, whole[name], of_cut)
        for column, field in enumerate(self.schema.jagged_fields):
            made.num_elements[chosen, column] = sum(
                self._in_pieces(f"{field.name}.{key}", whole[self._count_name(field.name, key)], of_cut)
                for key in field.keys
            )
        made.sample_bytes[chosen] = self.schema.row_bytes(made.num_elements[chosen])
        more = np.zeros_like(samples.num_loaded)
        np.add.at(more, (samples.home[numbers], samples.batch_of[numbers]), 1)
        return replace(
            made, batch_sizes=samples.batch_sizes + more, num_loaded=samples.num_loaded + more, pieces=pieces
        )

    def _pieces(
        self, samples: LoadedSamples, sample_of: np.ndarray, numbers: np.ndarray, items: np.ndarray
    ) -> np.ndarray:
        """Returns the place of each piece in its sample, `[pieces]` of dtype `PIECE`."""
        counts = self.counts(samples)
        num_items = self.rules.num_items(counts)
        for cut in np.flatnonzero((items < 1) | (items > self.rules.last_cut(counts)[numbers]))[:1]:
            raise ValueError(
                f"cut {cut} of sample {numbers[cut]} is after {items[cut]} items; expected 1 to "
                f"{self.rules.last_cut(counts)[numbers[cut]]}"
            )
        follows = np.flatnonzero(sample_of[1:] == sample_of[:-1]) + 1  # the piece after each cut
        tokens = self.rules.tokens_before(items, {name: of_all[numbers] for name, of_all in counts.items()})
        pieces = np.zeros(len(sample_of), dtype=PIECE)
        for unit, of_sample, of_cut in (("item", num_items, items), ("token", samples.tokens, tokens)):
            pieces[f"num_{unit}s"] = pieces[f"last_{unit}"] = of_sample[sample_of]
            pieces[f"first_{unit}"][follows] = of_cut
            pieces[f"last_{unit}"][follows - 1] = of_cut
        return pieces

    def _workloads(self, pieces: np.ndarray, counts: Counts, of_sample: np.ndarray) -> np.ndarray:
        before = self._prefix_costs(pieces["first_token"], counts)
        through = self._prefix_costs(pieces["last_token"], counts)
        through = np.where(pieces["last_item"] == pieces["num_items"], of_sample, through)
        for piece in np.flatnonzero(through < before)[:1]:
            raise ValueError(
                f"prefix_cost decreases: {before[piece]} at {pieces['first_token'][piece]} tokens and "
                f"{through[piece]} at {pieces['last_token'][piece]} of {pieces['num_tokens'][piece]}; "
                "expected the cost of the first tokens' queries, and that of get_workloads at a sample's end"
            )
        return through - before

    def _prefix_costs(self, tokens: np.ndarray, counts: Counts) -> np.ndarray:
        counts = {**counts, **self.rules.fixed_tokens(counts)}
        costs = np.asarray(self.prefix_cost(tokens, counts)).astype(np.int64)
        if costs.shape != tokens.shape:
            raise ValueError(f"prefix_cost returned shape {costs.shape}, expected {tokens.shape}")
        return np.where(tokens == 0, 0, costs)

    def _count_name(self, field: str, key: str) -> str:
        return f"{field}.{key}" if f"{field}.{key}" in self.count_names else field

    def _in_pieces(self, name: str, lengths: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        """Returns how many of a sample's elements each piece gets."""
        begin, end = self.rules.rule(name).span(lengths, pieces)
        return end - begin
