"""Padded models: gives each rank samples of like lengths, so that little of its work is padding."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...checks import SettingError, require_type
from ...distributed.extension import Extension, Place
from ...distributed.placement import check_tokens, make_plan, place_at_home
from ...distributed.row_table import RowTable
from ...distributed.shuffle_plan import MICRO_BATCH, RankLoads, ShufflePlan
from ...distributed.shuffler_settings import ShufflerSettings
from .division import Division, divide_by_runs, divide_where_loaded
from .runs import NO_LIMIT, Limits, cut_into_runs, ranks_of_runs

if TYPE_CHECKING:
    from ...distributed.batch_shuffler import BatchShuffler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PaddedLoads(RankLoads):
    """Loads of ranks in a padded model.

    Attributes:
        padding_before, padding_after: padded tokens ÷ real tokens of all ranks, as loaded and as placed.
    """

    padding_before: float
    padding_after: float


class Padded(Extension):
    """Gives each rank samples of like lengths, for models that pad a rank's rows to the longest of them.

    Such a rank costs *rows × longest*, so a single long sample makes all of its rows long. This extension
    sorts the samples of a step by cost and cuts them into one run per rank, so that the largest *rows ×
    longest* is smallest. Ranks with long samples get few rows. No rank gets more padded tokens than the
    fullest rank as loaded. Samples stay where they are if that is no slower.

    `get_workloads` returns what a row costs by itself, without padding. If it returns several columns, such
    as a history and candidates that are padded separately, a rank costs its rows × the sum of each column's
    largest, and samples are sorted by their sums. Such runs may cost up to about 1.6 times the optimum.

    With `MicroBatches`, every micro-batch is a run, and its `max_tokens` limits padded tokens.

    Args:
        max_rows: largest number of rows of a rank, or of a micro-batch, for models that need memory or time
            per row. None means no limit.
        max_real_tokens: largest number of real tokens of a rank ÷ the mean over ranks, for jobs in which
            embedding lookups weigh. It gives way if no placement meets it. None means no limit.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is below 1. When a shuffler is made: rows are equal, or a cost is given. When
            a step is planned, on all ranks: no placement meets `max_rows` and the shuffler's `max_tokens`.
    """

    name = "padded"
    order = 40
    excludes: Mapping[str, str] = {
        "pieces": "pieces of samples are for models that do not pad",
        "sample_groups": "it places samples by their lengths alone",
        "learned_costs": "the time of a padded rank is no sum over its samples",
    }

    def __init__(self, *, max_rows: int | None = None, max_real_tokens: float | None = None) -> None:
        require_type("Padded.max_rows", max_rows, int | None)
        require_type("Padded.max_real_tokens", max_real_tokens, float | None)
        for name, value in (("max_rows", max_rows), ("max_real_tokens", max_real_tokens)):
            if value is not None and not 1 <= value < np.inf:
                raise SettingError(f"{{{name}}}: expected a number of at least 1, or None", **{name: value})
        self.max_rows, self.max_real_tokens = max_rows, max_real_tokens

    def settings(self) -> Mapping[str, Any]:
        """Returns the limits."""
        return {"max_rows": self.max_rows, "max_real_tokens": self.max_real_tokens}

    def check(self, settings: ShufflerSettings) -> None:
        """Checks that ranks may have different numbers of rows."""
        if settings.equal_rows:
            raise SettingError(
                "{equal_rows}: Padded needs equal_rows=False, because ranks with long samples get few rows",
                equal_rows=True,
            )

    def setup(self, shuffler: BatchShuffler) -> None:
        """Refuses a fitted cost, and warns of settings without effect."""
        if shuffler.cost is not None:
            raise ValueError(
                f"Padded excludes cost={shuffler.cost}, which adds up the times of samples: a padded rank "
                "costs rows × longest, in the unit of get_workloads"
            )
        self._exchanges, self._max_tokens = shuffler.exchanges, shuffler.settings.max_tokens
        if shuffler.group.rank == 0:
            _warn_of_settings(shuffler.settings)

    def warm_up(self) -> None:
        """Compiles the search for runs."""
        numbers = np.arange(2)
        cut_into_runs(numbers[:, None], numbers, np.array([0, 2]), 1, Limits())
        ranks_of_runs(numbers, numbers, numbers, 2, 1)

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Places samples by runs, or leaves them where they are if that is no slower.

        Raises:
            ValueError: no placement meets the limits.
        """
        check_tokens(rows, self._max_tokens)
        micro_tokens = rows.arguments.get("micro_batch_tokens")
        in_parts = micro_tokens is not None
        given = [most for most in (micro_tokens, self._max_tokens) if most is not None]
        required = Limits(padded_tokens=min(given, default=NO_LIMIT), samples=self.max_rows or NO_LIMIT)
        loaded = divide_where_loaded(rows, required, in_parts)
        may_stay = loaded.meets(required)
        # 1. Look for runs that are no fuller than the fullest rank, and faster, if rows may also stay.
        limits = required
        if not in_parts:
            fullest = min(required.padded_tokens, int(loaded.padded_tokens.max()))
            limits = limits._replace(padded_tokens=fullest)
            if may_stay:
                limits = limits._replace(cost=min(int(loaded.largest_load) - 1, NO_LIMIT))
        most_cost = loaded.largest_load
        placed = divide_by_runs(rows, limits, in_parts, self.max_real_tokens, most_cost)
        # 2. If rows may not stay, any runs within the required limits will do.
        if placed is None and not may_stay:
            placed = divide_by_runs(rows, required, in_parts, self.max_real_tokens, most_cost)
            if placed is None:
                raise self._cannot_place(rows)
        is_faster = placed is not None and placed.largest_load < loaded.largest_load
        chosen = placed if placed is not None and self._exchanges and (is_faster or not may_stay) else loaded
        least = min(of.least for of in (loaded, placed) if of is not None)
        return _planned(rows, loaded, chosen, least)

    def _cannot_place(self, rows: RowTable) -> ValueError:
        longest = int(rows.tokens.max())
        return ValueError(
            f"no placement of {len(rows.tokens)} samples, the longest of {longest} tokens, on "
            f"{rows.num_ranks} ranks meets max_tokens={self._max_tokens}, which limits rows × longest, and "
            f"Padded(max_rows={self.max_rows}): raise the limits, or load fewer samples"
        )

    def report(self, plan: ShufflePlan) -> Mapping[str, Any]:
        """Returns padded tokens ÷ real tokens of all ranks, as loaded and as placed."""
        loads = plan.rank_loads
        if not isinstance(loads, PaddedLoads):
            return {}
        return {"padding_before": loads.padding_before, "padding_after": loads.padding_after}


def _planned(rows: RowTable, loaded: Division, chosen: Division, least: float) -> ShufflePlan:
    """Makes the plan of the chosen division, with the loads before and after."""
    before, after = (float(of.padded_tokens.sum() / max(rows.tokens.sum(), 1)) for of in (loaded, chosen))
    if chosen.num_parts:
        rows = replace(rows, columns={**rows.columns, MICRO_BATCH: chosen.micro_batch})
    plan = place_at_home(rows) if chosen is loaded else make_plan(rows, chosen.rank_of)
    return replace(
        plan,
        num_parts=chosen.num_parts,
        rank_loads=PaddedLoads(loaded.loads, chosen.loads, least, before, after),
    )


@functools.cache
def _warn_of_settings(settings: ShufflerSettings) -> None:
    """Warns once of settings without effect."""
    usual = ShufflerSettings(equal_rows=False)
    names = [
        name
        for name in ("partitioner", "tolerance", "token_tolerance")
        if getattr(settings, name) != getattr(usual, name)
    ]
    if names:
        logger.warning(
            f"{', '.join(names)}: no effect with Padded, which places samples by itself and limits padded "
            "tokens, rows × longest, to those of the fullest rank as loaded, or to max_tokens"
        )
