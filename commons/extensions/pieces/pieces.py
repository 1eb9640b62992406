"""Cuts samples that are too long for balance into pieces on several ranks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...checks import SettingError
from ...distributed.exchange import MOST_ON_THEIR_WAY
from ...distributed.extension import Extension, Place
from ...distributed.placement import make_plan
from ...distributed.plan import Format, RowTable, ShufflePlan
from ...distributed.settings import ShufflerSettings
from ...distributed.shuffler import BatchShuffler
from ...sequence_batch import BaseBatch
from ...sequence_batch.fields import type_name
from ...sequence_batch.rows import Rows
from .cut_batch import check_cut, cut_rows
from .cut_rules import CutRules
from .cut_search import compile_search, cut_and_place
from .cutting import COLUMN, Cutting, PrefixCost
from .key_fetch import PlacedPieces


class Pieces(Extension):
    """Cuts samples that are too long for balance, or for `max_tokens`, into pieces on several ranks.

    The shuffler and the model must support this. The shuffler's `cut_rules(batch)` returns the `CutRules` of
    a `BaseBatch`, and the model fetches keys and values through `batch.pieces`, a `PlacedPieces`.

    Args:
        prefix_cost: function that returns the cost of the queries of samples' first tokens. None means the
            shuffler's method of this name. Its first argument, `tokens`, is int64 `[samples]`, from 0 to the
            sample's tokens. The second, `counts`, maps names to int64 `[samples]`: "tokens", "loss_tokens",
            the batch's `row_counts`, "head_tokens" before a sample's first item, and "kept_tokens" of the
            last items that stay in one piece. The result is int64 `[samples]`, or `[samples, columns]` with
            the columns of `get_workloads`. No column may decrease from token to token, and each must equal
            `get_workloads` at a sample's end. Every rank calls the function and must get the same integers,
            so compute in int64: the last bits of floats may differ between processors.

    Raises:
        AttributeError: when a shuffler is made: it lacks a method.
        ValueError: when a shuffler is made: it has equal rows. At the first batch: the batch cannot be cut.
    """

    name = "pieces"
    moves = computes_alone = True
    order = 30
    excludes: Mapping[str, str] = {
        "micro_batches": "a sample's pieces must run at once, but micro-batches divide a step"
    }
    waits_on_device = "Pieces makes the device wait for keys and values of other ranks within a step"

    def __init__(self, prefix_cost: PrefixCost | None = None) -> None:
        self._given = prefix_cost
        self._exchanged: deque[tuple[ShufflePlan, PlacedPieces]] = deque(maxlen=MOST_ON_THEIR_WAY)
        self._ran: PlacedPieces | None = None  # in the last step that ran

    def check(self, settings: ShufflerSettings) -> None:
        """Checks that ranks may have different numbers of rows."""
        if settings.equal_rows:
            raise SettingError(
                "{equal_rows} with Pieces: a piece takes a row, and rows follow the load; set it False",
                equal_rows=True,
            )

    def uses(self, device: torch.device) -> Sequence[str]:
        """Returns the name of the process group for the fetch."""
        return ("fetch",)

    def setup(self, shuffler: Any) -> None:
        """Looks up `prefix_cost` and `cut_rules`."""
        self._prefix_cost = self._given or shuffler.prefix_cost
        self._cut_rules, self._settings = shuffler.cut_rules, shuffler.settings
        self._group = shuffler.group
        self._counters = {name: getattr(shuffler, name) for name in ("get_tokens", "get_loss_tokens")}
        self._own_loss_tokens = type(shuffler).get_loss_tokens is not BatchShuffler.get_loss_tokens
        self._checks_cuts = any(extension.verifies for extension in shuffler.extensions)

    def warm_up(self) -> None:
        """Compiles the search for cuts."""
        compile_search()

    def agree(self, batch: Any, row_format: Format) -> CutRules:
        """Returns the rules for cutting batches."""
        if not isinstance(batch, BaseBatch):
            raise ValueError(f"Pieces: a {type_name(batch)} cannot be cut; make it a BaseBatch")
        rules: CutRules = self._cut_rules(batch)
        jagged = {field.name for field in row_format.schema.jagged_fields}
        counts_rows = type(batch).num_loss_tokens is BaseBatch.num_loss_tokens and "labels" not in jagged
        if counts_rows and not self._own_loss_tokens:
            raise ValueError(
                "Pieces: without jagged labels, each row counts as a loss token, and so would every piece of "
                "a sample: give labels as a KeyedJaggedTensor, with one element per sample, say, which the "
                "rule WITH_LAST gives to its last piece; or override get_loss_tokens"
            )
        if row_format.loss_dtype != "int64":
            raise ValueError(
                "Pieces: loss tokens are weights, and pieces are counted in whole loss tokens; return "
                "integers from get_loss_tokens, or leave samples whole"
            )
        rules.check(row_format.schema, row_format.count_names)
        return rules

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Cuts samples where needed, and places whole samples and pieces."""
        if rows.num_ranks == 1:
            return place(rows)
        return make_plan(*cut_and_place(rows, self._settings, self._cutting_of(rows)))

    def before_copy(self, rows: Rows, plan: ShufflePlan) -> Rows:
        """Returns the rows on the host, cut as planned, or `rows` itself if there is nothing left to cut.

        Rows on the device are first copied to the host, which waits for the device.
        """
        own = plan.rows.loaded_by(self._group.rank)
        # An already cut batch has one sample per piece. The comparison leaves out padding rows.
        if plan.rows.starts_sample.all() or rows.num_samples == len(own):
            return rows
        on_host, pieces = rows.on_host(), plan.rows.columns[COLUMN][own]
        rules = self._cutting_of(plan.rows).rules
        cut = cut_rows(on_host, pieces, rules)
        if not rules.has_halo:  # with a halo, the batch would count the halo, too
            self._check_counts(cut, plan, own)
        if self._checks_cuts:
            check_cut(on_host, cut, pieces, rules)
        return cut.pin_memory() if rows.is_pinned or rows.device.type == "cuda" else cut

    def after_exchange(self, batch: Any, plan: ShufflePlan) -> Any:
        """Gives the batch its `pieces`, the places of its rows in their samples."""
        if plan.rows.starts_sample.all() or not isinstance(batch, BaseBatch):
            return batch
        pieces = PlacedPieces(plan, self._group)
        self._exchanged.append((plan, pieces))
        placed = copy.copy(batch)
        placed.pieces = pieces
        return placed

    def check_ran(self, plan: ShufflePlan) -> None:
        """Checks that the model has fetched keys and values for its pieces."""
        self._ran = next((pieces for known, pieces in reversed(self._exchanged) if known is plan), None)
        if self._ran is not None:
            self._ran.check_read()

    def report(self, plan: ShufflePlan) -> Mapping[str, Any]:
        """Returns the numbers of cut samples and pieces, and this rank's fetched bytes and waiting time."""
        rows_of_each = np.bincount(plan.rows.sample_of)
        pieces_of_cut, ran = rows_of_each[rows_of_each > 1], self._ran
        return {
            "samples_cut": len(pieces_of_cut),
            "pieces": int(pieces_of_cut.sum()),
            "bytes_fetched": 0.0 if ran is None else float(ran.bytes_fetched),
            "fetch_seconds": 0.0 if ran is None else ran.seconds,
        }

    def _cutting_of(self, rows: RowTable) -> Cutting:
        """Returns the rules that the ranks agreed on at the first batch, and the costs."""
        known = rows.format
        assert known is not None  # the rows were gathered
        return Cutting(known.agreed[self.name], known.schema, known.count_names, self._prefix_cost, rows.cost)

    def _check_counts(self, cut: Rows, plan: ShufflePlan, own: np.ndarray) -> None:
        """Raises a ValueError unless a cut batch has the token counts that planning got from the rules."""
        shown = cut.to_count().batch
        for (name, count), planned in zip(
            self._counters.items(), (plan.rows.tokens, plan.rows.loss_tokens), strict=True
        ):
            counted = torch.as_tensor(count(shown), device="cpu")[: len(own)].numpy()
            for row in np.flatnonzero(counted != planned[own])[:1]:
                raise ValueError(
                    f"{name} counts {counted[row]} in a piece, and cut_rules {planned[own][row]}; expected "
                    f"the same: check the rules of the fields that {name} counts"
                )
