"""The planner: gathers the rows of all ranks, places them, and makes the same plan on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from ..named_ranges import named_range
from ..perf_model.cost import Cost
from ..sequence_batch.rows import Rows
from .batch_format import Format
from .channel import Channel
from .extension import Extension, chain
from .placement import arguments_of, place, place_at_home
from .plan_gather import Counted, PlanGather, View
from .rank_group import RankGroup
from .row_table import RowTable
from .shuffle_plan import JobStep, ShufflePlan, sum_loss_tokens
from .shuffler_settings import ShufflerSettings

# Columns of a rank's message to the whole job, before its posts: whether the rank failed, whether any rank of
# its group has a batch, and how many rows and micro-batches the rank computes. The bits of its loss tokens,
# of its load before and after the exchange, and of the group's mean load follow.
_FAILED, _HAS_BATCH, _PLACED, _PARTS, _LOSS_TOKENS, _BEFORE, _AFTER, _MEAN, _WIDTH = range(9)


class Planner:
    """Makes the plans of the ranks that exchange samples.

    A plan takes one all-gather of host numbers; see `PlanGather`. With a `job`, a second all-gather carries a
    few numbers per rank. Construction is collective, and comes before the extensions' `setup`.

    Args:
        group: ranks that exchange samples.
        job: all ranks, if they plan in step and share a `JobStep`; None if only the group plans in step.
        exchanges: whether samples may leave this rank.
        settings, extensions, cost, view: the shuffler's own.
        count: function that returns the counted rows of a batch, and their format.
        whose: name of the shuffler's class, for messages.

    Attributes:
        ranks: the ranks that plan in step, which are `job` or `group`.
        verifies: whether an extension verifies.

    Raises:
        ValueError: ranks have different settings or extensions. All ranks raise it.
    """

    def __init__(
        self,
        group: RankGroup,
        job: RankGroup | None,
        exchanges: bool,
        settings: ShufflerSettings,
        extensions: Sequence[Extension],
        cost: Cost | None,
        count: Callable[[Rows], tuple[RowTable, Format]],
        view: View,
        whose: str,
    ) -> None:
        self.ranks, self._group = job or group, group
        self._extensions, self._cost = extensions, cost
        self._count, self._whose = count, whose
        self.verifies = any(extension.verifies for extension in extensions)
        # Within a job, `enabled` may differ: some groups may have a single rank, or be disabled.
        enabled = {} if job is not None else {"enabled": repr(exchanges)}
        _check_same_settings(self.ranks, settings, extensions, cost, enabled)
        channel = group.channel()
        self._job = None if job is None else job.channel()
        self._gather = PlanGather(channel, self._job or channel, extensions, view, exchanges)
        self._place = chain(self._extensions, "place", self._place_rows)
        self._takers = [each for each in extensions if type(each).take is not Extension.take]
        self._exchanges, self._settings = exchanges, settings
        self._arguments = arguments_of(extensions)
        self._reserved_by: int | None = None

    @property
    def format(self) -> Format | None:
        """The batch format that the ranks have agreed on; None before the first batch."""
        return self._gather.format

    def reserve(self) -> None:
        """Lets only the calling thread plan until `release`, because threads' messages would interleave."""
        self._reserved_by = self._reserved_by or threading.get_ident()

    def release(self, ident: int | None) -> None:
        """Lets any thread plan again, if the thread with this identifier holds the reservation."""
        if self._reserved_by == ident:
            self._reserved_by = None

    def busy(self) -> RuntimeError | None:
        """Returns an error if another thread plans for a pipeline or a loop; None if this thread may plan."""
        if self._reserved_by in (None, threading.get_ident()):
            return None
        return RuntimeError(
            f"this {self._whose} plans for a pipeline, or a loop over plan_ahead, in a thread of its own: "
            "create another shuffler, or exhaust the loaders or reset the pipeline first"
        )

    def plan(self, batch: Rows | None, failure: Exception | None = None) -> ShufflePlan:
        """Plans a step. Collective over the ranks that plan in step.

        Args:
            batch: this rank's batch, or None after its loader's end. If all loaders ended, the plan is empty.
            failure: the error that kept this rank from loading its batch. Every rank raises it.
        """
        if (error := self.busy()) is not None:
            raise error
        posts = {of.name: np.zeros(of.num_posted, dtype=np.int64) for of in self._extensions}
        if self._job is None:
            return self._plan(batch, failure, posts)
        plan = None
        try:
            plan = self._plan(batch, failure, posts)
        except Exception as error:
            failure = error
        return self._share(self._job, plan, failure, {of.name: posts[of.name] for of in self._takers})

    def hand_out(self, plan: ShufflePlan) -> None:
        """Passes the posts of all ranks to the extensions, as the step of a plan is handed out."""
        posts = plan.rows.posts if plan.job is None else plan.job.posts
        for extension in self._takers:
            extension.take(posts[extension.name])

    def _plan(
        self, batch: Rows | None, failure: Exception | None, posts: dict[str, np.ndarray]
    ) -> ShufflePlan:
        """Plans among the ranks that exchange samples; fills `posts` with this rank's posts."""
        counted: Counted | None = None
        try:
            for extension in self._extensions:
                posts[extension.name][:] = extension.post()
            if batch is not None and failure is None:
                with named_range("## plan: workloads ##"):
                    counted = (*self._count(batch), batch)
        except Exception as error:  # whatever a user's get_workloads raises must reach all ranks
            failure = failure or error
        with named_range("## plan: gather ##"):
            rows, posted = self._gather.gather(counted, failure, _joined(posts))
        if rows.batch_sizes.any():
            rows = replace(
                rows,
                posts=_by_name(posted, posts),
                ranks=self._group.ranks,
                ranks_per_node=self._group.ranks_per_node,
                arguments=self._arguments,
            )
            with named_range("## plan: placement ##"):
                plan = self._place(self._with_cost(rows))
            if self._cost is not None:
                plan = plan.with_seconds(self._cost)
        else:  # all loaders ended; a resumed run makes no such plan, so extensions skip it
            plan = place_at_home(rows)
        return plan

    def _share(
        self,
        job: Channel,
        plan: ShufflePlan | None,
        failure: Exception | None,
        posts: Mapping[str, np.ndarray],
    ) -> ShufflePlan:
        """Returns the plan with a `JobStep`, by one all-gather over all ranks of the job.

        If there is no plan, `failure` is the reason, and all ranks raise it. Ranks post equally many numbers.
        """
        told = np.zeros(_WIDTH, dtype=np.int64)
        try:
            if plan is not None:
                self._tell(plan, told)
        except Exception as error:  # such as loss tokens that overflow
            failure = error
        told[_FAILED] = failure is not None
        table = job.all_gather(np.append(told, _joined(posts)))
        if table[:, _FAILED].any():
            job.all_gather_objects(None, failure)
        assert plan is not None  # otherwise, the failure has been raised
        columns = np.ascontiguousarray(table[:, :_WIDTH].T)
        step = JobStep(
            has_batch=bool(columns[_HAS_BATCH].any()),
            num_placed=columns[_PLACED],
            num_loss_tokens=sum_loss_tokens(columns[_LOSS_TOKENS].view(plan.rows.loss_tokens.dtype)),
            loads_before=columns[_BEFORE].view(np.float64),
            loads=columns[_AFTER].view(np.float64),
            posts=_by_name(table[:, _WIDTH:], posts),
            total_load=float(columns[_MEAN].view(np.float64).sum()),
        )
        return replace(plan, num_parts=int(columns[_PARTS].max()), job=step)

    def _tell(self, plan: ShufflePlan, told: np.ndarray) -> None:
        """Fills `told`, int64 `[_WIDTH]`, with this rank's numbers from a plan.

        Loads have the same unit on all ranks, even if groups have learned costs of their own.
        """
        rank, rows = self._group.rank, plan.rows
        cost = self._cost if plan.has_batch else None  # without rows, `work` may have other columns
        cost = cost or Cost.sum_of_columns(rows.work.shape[1])
        workloads = cost.of(rows.starts_sample, rows.tokens, rows.work)
        alike = replace(plan, rows=replace(rows, workloads=workloads))
        told[_HAS_BATCH:_LOSS_TOKENS] = plan.has_batch, plan.num_placed[rank], plan.num_parts
        told[_LOSS_TOKENS:_BEFORE].view(rows.loss_tokens.dtype)[:] = plan.loss_tokens_on(rank)
        loads = alike.loads_before[rank], alike.loads[rank], alike.total_load / alike.num_ranks
        told[_BEFORE:].view(np.float64)[:] = loads

    def _with_cost(self, rows: RowTable) -> RowTable:
        """Returns rows with the shuffler's cost, if any. All ranks raise an error if its columns differ."""
        cost, columns = self._cost, rows.work.shape[1]
        if cost is None:
            return rows
        if cost.num_columns != columns:
            raise ValueError(
                f"cost={cost} is for {cost.num_columns} columns of get_workloads, which returns {columns}; "
                "calibrate this model"
            )
        return rows.with_cost(cost)

    def _place_rows(self, rows: RowTable) -> ShufflePlan:
        if self._exchanges:
            return place(rows, self._settings, self.format is None or self.format.pads)
        return place_at_home(rows)


def _joined(posts: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *posts.values()])


def _by_name(posted: np.ndarray, posts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the posts of all ranks by name, `[ranks, numbers]` each, from each rank's `_joined` posts."""
    ends = np.cumsum([len(numbers) for numbers in posts.values()], dtype=np.int64)
    return dict(zip(posts, np.split(posted, ends, axis=1), strict=False))


def _check_same_settings(
    ranks: RankGroup,
    settings: ShufflerSettings,
    extensions: Sequence[Extension],
    cost: Cost | None,
    others: Mapping[str, str],
) -> None:
    """Checks that ranks agree on settings, before `setup` waits for ranks that lack an extension."""
    described = {
        **others,
        "extensions": repr([extension.name for extension in extensions]),
        "cost": repr(cost),
    }
    described |= {field.name: repr(getattr(settings, field.name)) for field in fields(settings)}
    described |= {extension.name: repr(dict(extension.settings())) for extension in extensions}
    gathered = ranks.all_gather_objects(described)
    for rank, others in zip(ranks.ranks, gathered, strict=True):
        for name, expected in gathered[0].items():
            if others.get(name) != expected:
                raise ValueError(
                    f"rank {rank}'s shuffler has {name}={others.get(name)}, but rank {ranks.ranks[0]}'s has "
                    f"{expected}; all ranks need the same settings"
                )
