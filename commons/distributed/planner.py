"""Plans: gathers what ranks loaded, places it, and makes the same plan on every rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from ..named_ranges import named_range
from ..perf_model.cost import Cost
from ..sequence_batch.rows import Rows
from .feature import Feature, chain
from .placement import Partitioning, place, place_sets
from .plan_gather import BatchFormat, Counted, PlanGather, View
from .rank_group import RankGroup
from .row_table import RowTable
from .shuffle_plan import ShufflePlan
from .shuffler_settings import ShufflerSettings


class Planner:
    """Makes plans for ranks, whose rows stay within the ranks that they exchange with.

    A plan takes one all-gather of host numbers, over a channel of its own. The first one, and one that meets
    more rows than any before, take a few. Construction is collective, before the features' `setup`.

    Args:
        ranks: that plan together: those that exchange, or all ranks of the job.
        group: those that exchange with this one.
        partitioning: places the rows of a set.
        features: in their order.
        cost: of rows by their counts; None for the sum of the columns of `get_workloads`.
        count: counts the rows of a batch on the host.
        view: of batches.
        whose: name of the shuffler's class, for messages.

    Attributes:
        sets: int64, the ascending ranks of each set that exchanges, each rank in one of them.
        posts: int64 `[ranks, numbers]` each, what features posted with the last plan, by their names.
        seconds: that this rank counted and placed rows for the last plan, without the wait for others.

    Raises:
        ValueError: ranks are not each in one set of ranks that exchange, or have different features; on all
            ranks.
    """

    def __init__(
        self,
        ranks: RankGroup,
        group: RankGroup,
        partitioning: Partitioning,
        features: Sequence[Feature],
        cost: Cost | None,
        count: Callable[[Rows], Counted],
        view: View,
        whose: str,
    ) -> None:
        self.ranks, self._group = ranks, group
        self._partitioning, self._features, self._cost = partitioning, features, cost
        self._count, self._whose = count, whose
        self._sets = _sets_that_exchange(group, ranks)
        self.sets = [ranks for ranks, _ in self._sets]
        _check_same_features(ranks, [feature.name for feature in features])
        settings = _describe_settings(partitioning.settings, features, cost)
        self._gather = PlanGather(ranks, settings, features, view, moves=group.num_ranks > 1)
        set_features = [feature for feature in self._features if feature.places_each_set]
        job_features = [feature for feature in self._features if not feature.places_each_set]
        self._place_set = chain(set_features, "place", self._place_whole)
        self._place = chain(job_features, "place", self._place_sets)
        self._reserved_by: int | None = None
        self.seconds = 0.0, 0.0

    @property
    def format(self) -> BatchFormat | None:
        """The batch format that the ranks have agreed on; None before the first batch."""
        return self._gather.format

    def reserve(self) -> None:
        """Lets only the calling thread plan, until `release`: messages of several would interleave."""
        if self._reserved_by is None:
            self._reserved_by = threading.get_ident()

    def release(self, ident: int | None) -> None:
        """Lets any thread plan again, if the thread of this identity had reserved it."""
        if self._reserved_by == ident:
            self._reserved_by = None

    def check_free(self) -> None:
        """Checks before a loop that no thread of any rank plans. Collective.

        Raises:
            RuntimeError: one does; on all ranks, of which others may have left their loops.
        """
        if any(self.ranks.all_gather_objects(self._reserved_by is not None)):
            raise RuntimeError(self._busy())

    def _busy(self) -> str:
        return (
            f"this {self._whose} plans for a pipeline, or a loop over plan_ahead, in a thread of its own: "
            "create another shuffler, or exhaust the loaders or reset the pipeline first"
        )

    def plan(self, batch: Rows | None, failure: Exception | None = None) -> ShufflePlan:
        """Plans a step of all ranks. Collective over them.

        Args:
            batch: this rank's; None if its loader has ended. If all have, the plan has no rows.
            failure: the error that kept this rank from loading it; raised on every rank.
        """
        if self._reserved_by not in (None, threading.get_ident()):
            raise RuntimeError(self._busy())
        counted, start = None, time.perf_counter()
        ends = np.cumsum([feature.num_posted for feature in self._features], dtype=np.int64)
        posted = np.zeros(ends.max(initial=0), dtype=np.int64)
        try:
            for feature, numbers in zip(self._features, np.split(posted, ends), strict=False):
                numbers[:] = feature.post()
        except Exception as error:  # raised on every rank below
            failure = failure or error
        if batch is not None and failure is None:
            try:
                with named_range("## plan: workloads ##"):
                    counted = self._count(batch)
            except Exception as error:  # whatever a user's get_workloads raises must reach all ranks
                failure = error
        counting = time.perf_counter() - start
        with named_range("## plan: gather ##"):
            rows, table = self._gather.gather(counted, failure, batch, posted)
        names = [feature.name for feature in self._features]
        self.posts = dict(zip(names, np.split(table, ends, axis=1), strict=False))
        start = time.perf_counter()
        if rows.batch_sizes.any():
            with named_range("## plan: placement ##"):
                plan = self._place(self._with_cost(replace(rows, posts=self.posts)))
        else:  # loaders ended: a run resumed here does not plan this
            plan = ShufflePlan(rows, rows.home, np.ones_like(rows.batch_sizes))
        self.seconds = counting, time.perf_counter() - start
        return plan

    def hand_out(self, posts: Mapping[str, np.ndarray]) -> None:
        """Gives features what ranks posted with the plan of a step, which is handed out."""
        for feature in self._features:
            feature.take(posts[feature.name])

    def within_set(self, plan: ShufflePlan) -> ShufflePlan:
        """Returns the part of a plan among the ranks that exchange with this one."""
        return plan.within(np.searchsorted(self.ranks.ranks, self._group.ranks))

    def _with_cost(self, rows: RowTable) -> RowTable:
        """Returns rows with the shuffler's cost, if it has one; raises on all ranks if that does not fit."""
        cost, columns = self._cost, rows.work.shape[1]
        if cost is None:
            return rows
        if cost.num_columns != columns:
            raise ValueError(
                f"cost={cost} is of {cost.num_columns} columns of get_workloads, which returns {columns}; "
                "calibrate this model"
            )
        return rows.with_cost(cost)

    def _place_sets(self, rows: RowTable) -> ShufflePlan:
        plan = place_sets(rows, self._sets, self._place_set)
        if self._cost is None:
            return plan
        return replace(plan, predicted_seconds=predict_seconds(plan, self._cost))

    def _place_whole(self, rows: RowTable) -> ShufflePlan:
        pads = self.format is None or self.format.pads
        return place(rows, self._partitioning, pads)


def _describe_settings(
    settings: ShufflerSettings, features: Sequence[Feature], cost: Cost | None
) -> dict[str, str]:
    """Returns all settings by name, which the ranks have to have alike."""
    described = {field.name: repr(getattr(settings, field.name)) for field in fields(settings)}
    described |= {feature.name: repr(dict(feature.settings())) for feature in features}
    return described | {"cost": repr(cost)}


def _check_same_features(ranks: RankGroup, names: list[str]) -> None:
    """Compares features before their `setup`, whose collectives would wait for ranks without them."""
    gathered = ranks.all_gather_objects(names)
    for rank, others in enumerate(gathered):
        if others != gathered[0]:
            raise ValueError(
                f"rank {rank}'s shuffler has the features {others}, that of rank 0 {gathered[0]}; all ranks "
                "need the same"
            )


def predict_seconds(plan: ShufflePlan, cost: Cost, speeds: np.ndarray | float = 1.0) -> np.ndarray:
    """Returns the compute time of each rank, float64 `[ranks]`, given their speeds."""
    return (cost.per_step + plan.loads) * 1e-9 / speeds


def _sets_that_exchange(mine: RankGroup, over: RankGroup) -> list[tuple[np.ndarray, int | None]]:
    """Returns the sets of ranks that exchange, as places in `over`, and their ranks per node."""
    if mine.ranks == over.ranks:
        return [(np.arange(mine.num_ranks), mine.ranks_per_node)]
    gathered = over.all_gather_objects((mine.ranks, mine.ranks_per_node))
    sets = list(dict.fromkeys(gathered))
    for ranks, _ in sets:
        if any(gathered[over.ranks.index(rank)][0] != ranks for rank in ranks):
            raise ValueError(
                f"a rank balances among ranks {list(ranks)}, and one of these among others; give the "
                "shufflers of a group the same process_group"
            )
    return [(np.searchsorted(over.ranks, ranks), ranks_per_node) for ranks, ranks_per_node in sets]
