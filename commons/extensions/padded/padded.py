"""Padded models: gives each rank samples of like lengths, so that little of its work is padding."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...checks import SettingError, require_type
from ...distributed.extension import Extension, Place
from ...distributed.plan import RowTable, ShufflePlan
from ...distributed.settings import ShufflerSettings
from ...warn_once import warn_once
from .padded_plan import PaddedLoads, plan_padded
from .runs import Limits, cut_into_runs, padded_costs, ranks_of_runs

if TYPE_CHECKING:
    from ...distributed.shuffler import BatchShuffler

logger = logging.getLogger(__name__)


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
    computes_alone = True
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
        """Refuses a cost, and warns of settings without effect."""
        if shuffler.cost is not None:
            raise ValueError(
                f"Padded excludes cost={shuffler.cost}, which adds up the times of samples: a padded rank "
                "costs rows × longest, in the unit of get_workloads"
            )
        self._rank, self._exchanges, settings = shuffler.group.rank, shuffler.exchanges, shuffler.settings
        self._max_tokens, usual = settings.max_tokens, ShufflerSettings(equal_rows=False)
        names = ("partitioner", "tolerance", "token_tolerance")
        changed = [name for name in names if getattr(settings, name) != getattr(usual, name)]
        if changed and self._rank == 0:
            warn_once(
                logger,
                f"{', '.join(changed)}: no effect with Padded, which places samples by itself and limits "
                "padded tokens, rows × longest, to those of the fullest rank as loaded, or to max_tokens",
            )

    def warm_up(self) -> None:
        """Compiles the search for runs."""
        numbers = np.arange(2)
        cut_into_runs(numbers[:, None], numbers, np.array([0, 2]), 1, Limits())
        padded_costs(numbers[:, None], numbers, numbers)
        ranks_of_runs(numbers, numbers, numbers, 2, 1)

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Places samples by runs, or leaves them where they are if that is no slower; see `plan_padded`."""
        tokens = rows.tokens
        alike = tokens.size and 0 < tokens.min() == tokens.max()
        if self._rank == 0 and alike and np.ptp(rows.workloads):
            warn_once(
                logger,
                "all rows of a step have equally many tokens, and their workloads differ, so that few may "
                "move: if the loader pads, return real lengths from get_tokens, such as (ids != 0).sum(1)",
            )
        return plan_padded(rows, self._max_tokens, self.max_rows, self.max_real_tokens, self._exchanges)

    def report(self, plan: ShufflePlan) -> Mapping[str, Any]:
        """Returns padded tokens ÷ real tokens of all ranks, as loaded and as placed, if there are any."""
        loads = plan.rank_loads
        if not (isinstance(loads, PaddedLoads) and loads.padding_before):
            return {}
        return {"padding_before": loads.padding_before, "padding_after": loads.padding_after}
