"""Plans: gathers what ranks loaded, places it, and makes the same plan on every rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from ..named_ranges import named_range
from ..partition.balance import relative_to_mean
from ..perf_model.cost import Cost
from ..sequence_batch import containers
from ..sequence_batch.sample_rows import SampleRows
from .cutting import Cutting, PrefixCost
from .learning import Learning
from .loaded_samples import LoadedSamples
from .placement import divide, place_within, placed_by_hand, warm_up
from .plan_gather import BatchFormat, PlanGather
from .rank_group import RankGroup
from .sample_facts import Counter, SampleFacts
from .shuffle_plan import ShufflePlan
from .shuffler_settings import LEARNED, ShufflerSettings
from .verify import check_plans

logger = logging.getLogger(__name__)
RowCounts = Mapping[str, Counter]
# Ranks differ in speed if the fastest is this many times as fast as the slowest. Loads follow if the slowest
# takes at most this share longer than the mean. A warning comes after so many plans in which they do not.
_DIFFERENT_SPEEDS, _FOLLOWED, _PLANS_BEHIND = 1.25, 0.05, 20


class Planner:
    """Makes plans for the ranks of a group, whose samples stay within sub-groups of it.

    Collectives of a plan: one all-gather of host numbers, over a channel of its own. The first one, and one
    that meets more rows than any before, take a few.

    Args:
        over: the ranks that plan together.
        groups: ascending ranks (of `over`) that exchange samples, and their ranks per node; each rank is in
            one of them.
        settings: how to place samples.
        sample_rows: reads the rows of batches.
        counts_of_rows: returns the functions that count workload, tokens, and loss tokens of a batch's rows,
            by the names that messages call them.
        prefix_cost: as `BatchShuffler.prefix_cost`, to cut samples by; None to keep them whole.
        groups_of_rows: the name and the function of the rows' groups; None if samples have none.
        cost: of rows, in nanoseconds; "learned" for costs and speeds that follow the steps' times; None for
            the sum of the workloads' columns.

    Attributes:
        learning: of costs and speeds; None if they are not learned.
        posted: int64 `[ranks]`, what each rank posted with the last plan.
        seconds: that this rank counted and placed samples for the last plan, without the wait for others.
        cuts: returns cuts and the rank of each row, as `placed_by_hand` takes them, for tests; None to work
            them out.
    """

    def __init__(
        self,
        over: RankGroup,
        groups: Sequence[tuple[np.ndarray, int | None]],
        settings: ShufflerSettings,
        sample_rows: SampleRows,
        counts_of_rows: Callable[[Any], RowCounts],
        prefix_cost: PrefixCost | None = None,
        groups_of_rows: tuple[str, Counter] | None = None,
        cost: Cost | str | None = None,
    ) -> None:
        self._over, self._groups, self._settings = over, groups, settings
        self._sample_rows, self._counts_of_rows = sample_rows, counts_of_rows
        self._prefix_cost, self._groups_of_rows = prefix_cost, groups_of_rows
        self._cost = cost
        self._cutting: Cutting | None = None
        self._channel = over.channel()
        self.learning = (
            Learning(over.num_ranks, over.rank, settings.speed_limit, over.hosts, over.ranks)
            if cost == LEARNED
            else None
        )
        self._gather = PlanGather(self._channel, settings, sample_rows, cost)
        self._batch_type: type | None = None
        self._plans_behind = 0
        self._longest_named = settings.max_tokens_per_micro_batch or 0
        self.posted = np.zeros(over.num_ranks, dtype=np.int64)
        self.seconds = 0.0, 0.0
        self.cuts: Callable[[LoadedSamples, Cutting], tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    @property
    def rank(self) -> int:
        """This rank's place among those that plan together."""
        return self._over.rank

    @property
    def agreed(self) -> BatchFormat | None:
        """The fields that the ranks have agreed on; None before the first batch."""
        return self._gather.agreed

    def of_all_ranks(self) -> Planner:
        """Makes a planner for all ranks of the job, whose samples stay within the groups of their planners.

        Collective over all ranks of the job. For pipelines, which need the loss tokens of all ranks.

        Raises:
            ValueError: ranks are not each in one group; on all ranks.
        """
        if not dist.is_initialized() or self._over.num_ranks == dist.get_world_size():
            return self
        # Also on a rank that is alone in its group: it places the others', too.
        warm_up(self._settings, self._groups_of_rows is not None)
        everyone = RankGroup.of()
        mine = self._over.ranks, self._over.ranks_per_node
        gathered = everyone.all_gather_objects(mine)
        groups = list(dict.fromkeys(gathered))
        for ranks, _ in groups:
            if any(gathered[rank][0] != ranks for rank in ranks):
                raise ValueError(
                    f"a rank balances among ranks {list(ranks)}, and one of these among others; give the "
                    "shufflers of a group the same process_group"
                )
        of_arrays = [(np.array(ranks), ranks_per_node) for ranks, ranks_per_node in groups]
        return Planner(
            everyone,
            of_arrays,
            self._settings,
            self._sample_rows,
            self._counts_of_rows,
            self._prefix_cost,
            self._groups_of_rows,
            self._cost,
        )

    def plan(
        self,
        batch: Any,
        failure: Exception | None,
        post: Callable[[], int] | None = None,
    ) -> ShufflePlan:
        """Plans a step. Collective over the ranks.

        Args:
            batch: this rank's; None if its loader has ended.
            failure: the error that kept this rank from loading it; raised on every rank.
            post: returns a number for the other ranks, int64; its errors are raised on every rank.

        Returns:
            The plan; without a batch on any rank, one without samples.
        """
        facts, example, learning = None, None, self.learning
        start = time.perf_counter()
        posted = np.zeros(1 + (0 if learning is None else learning.num_posted), dtype=np.int64)
        try:
            posted[0] = 0 if post is None else post()
            if learning is not None:
                posted[1:] = learning.to_post()
        except Exception as error:  # raised on every rank below
            failure = failure or error
        if batch is not None and failure is None:
            try:
                with named_range("## plan: workloads ##"):
                    facts = self._facts(batch)
                if self.agreed is None:
                    example = batch
            except Exception as error:  # whatever a user's get_workloads raises must reach all ranks
                failure = error
        counted = time.perf_counter() - start
        with named_range("## plan: gather ##"):
            samples, table = self._gather.gather(facts, failure, example, posted)
        self.posted = table[:, 0]
        if not samples.batch_sizes.any():  # loaders ended: a run resumed here does not plan this
            learning = None
        if learning is not None:
            learning.take(table[:, 1:], samples.work.shape[1])
        start = time.perf_counter()
        if self._settings.verify:
            plan = check_plans(self._channel, lambda: self._placed(samples))
        else:
            plan = self._placed(samples)
        self.seconds = counted, time.perf_counter() - start
        if learning is not None:
            learning.planned(plan)
            self._warn_of_unfollowed_speeds(plan)
        self._name_sample_above_cap(plan)
        return plan

    def _placed(self, loaded: LoadedSamples) -> ShufflePlan:
        timed, learning, agreed = self._cost_in_time(), self.learning, self.agreed
        samples = loaded if timed is None else loaded.with_cost(timed)
        cap = self._settings.max_tokens_per_micro_batch
        pads = agreed is None or agreed.pads
        with named_range("## plan: placement ##"):
            cutting = self._how_to_cut(timed)
            if self.cuts is not None and cutting is not None:
                plan = placed_by_hand(samples, cutting, *self.cuts(samples, cutting))
            else:
                speeds = None if learning is None else learning.speeds()
                plan = place_within(samples, self._groups, self._settings, pads, cutting, speeds)
            plan = plan if cap is None else divide(plan, cap)
        if timed is None:
            return plan
        measured = np.ones(plan.num_ranks) if learning is None else learning.state.speeds
        return replace(plan, predicted_seconds=(timed.per_step + plan.loads) * 1e-9 / measured)

    def _cost_in_time(self) -> Cost | None:
        """Returns the cost in nanoseconds, if there is one.

        Raises:
            ValueError: it was fitted to another number of columns; on every rank.
        """
        if self.agreed is None:
            return None
        cost, columns = self._cost, self.agreed.columns.work
        if isinstance(cost, Cost) and cost.num_columns != columns:
            raise ValueError(
                f"cost={cost} is of {cost.num_columns} columns of get_workloads, which returns {columns}; "
                "calibrate this model"
            )
        if self.learning is not None:
            return self.learning.state.cost
        return cost if isinstance(cost, Cost) else None

    def _how_to_cut(self, timed: Cost | None) -> Cutting | None:
        """Returns how to cut samples by a cost, or by workloads; None if they stay whole."""
        agreed = self.agreed
        if self._prefix_cost is None or agreed is None or agreed.cut_rules is None:
            return None
        cost = timed or Cost.sum_of_columns(agreed.columns.work)
        if self._cutting is None or self._cutting.cost != cost:
            self._cutting = Cutting(
                agreed.cut_rules, agreed.schema, agreed.columns.count_names, self._prefix_cost, cost
            )
        return self._cutting

    def _facts(self, batch: Any) -> SampleFacts:
        on_host = self._sample_rows.to_host(batch)
        self._check_type(on_host)
        counts = self._counts_of_rows(on_host)
        return SampleFacts.of(on_host, self._sample_rows, counts, self._groups_of_rows)

    def _check_type(self, batch: Any) -> None:
        """Checks that this rank's batches are of one type, and whether the first can be exchanged."""
        if self._batch_type is None:
            self._sample_rows.check_shared(batch)
            containers.check_replaceable(batch)
            self._batch_type = type(batch)
        if type(batch) is not self._batch_type:
            raise TypeError(
                f"a batch is a {containers.type_name(batch)}, and the first was a "
                f"{self._batch_type.__qualname__}; all must be of one type"
            )

    def _warn_of_unfollowed_speeds(self, plan: ShufflePlan) -> None:
        """Warns once where ranks differ in speed, and loads have long not followed."""
        speeds, loads = plan.speeds, plan.loads
        if speeds is None or self._over.rank != 0 or self._plans_behind == _PLANS_BEHIND:
            return
        ratio = 1.0
        for ranks, _ in self._groups:
            fastest = float(speeds[ranks].max() / speeds[ranks].min())
            if fastest > _DIFFERENT_SPEEDS and relative_to_mean(loads[ranks], speeds[ranks]) > 1 + _FOLLOWED:
                ratio = max(ratio, fastest)
        self._plans_behind = 0 if ratio == 1.0 else self._plans_behind + 1
        if self._plans_behind == _PLANS_BEHIND:
            logger.warning(
                f"ranks differ in speed by {ratio:.2f} times, and loads do not follow: equal_rows=True, a "
                "high tolerance, tight max_rows or max_tokens, a partitioner that hardly heeds speeds, such "
                'as "karmarkar_karp", or samples too heavy for a slow rank keep them from it'
            )

    def _name_sample_above_cap(self, plan: ShufflePlan) -> None:
        """Warns of a sample that takes a micro-batch of its own, if it is longer than all named before."""
        cap = self._settings.max_tokens_per_micro_batch
        if cap is None or self._over.rank != 0 or plan.tokens.max(initial=0) <= self._longest_named:
            return
        longest = int(plan.tokens.argmax())
        rank, row = plan.where_loaded(longest)
        self._longest_named = int(plan.tokens[longest])
        logger.warning(
            f"row {row} of a batch of rank {self._over.ranks[rank]} has {self._longest_named} tokens, above "
            f"max_tokens_per_micro_batch={cap}: it gets a micro-batch of its own, which takes more memory "
            "than the cap allows; truncate histories or raise the cap. Shorter ones will not be named"
        )
