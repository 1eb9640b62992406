"""The planner: gathers the rows of all ranks, places them, and makes the same plan on every rank."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..named_ranges import named_range
from ..perf_model.cost import Cost
from ..sequence_batch.fields import type_name
from ..sequence_batch.rows import Rows
from .counting import Counted, Counter, LoadedBatch, count_rows
from .exchange import route_of
from .extension import Extension, chain
from .placement import arguments_of, place, place_at_home
from .plan import Format, JobStep, RowTable, ShufflePlan, sum_loss_tokens
from .plan_gather import PlanGather
from .ranks import Channel, RankGroup, is_lost, job_device
from .settings import ShufflerSettings


def _job_message(loss_dtype: str, posts: np.dtype) -> np.dtype:
    """The numbers that a rank sends to the whole job after it has planned within its set of ranks."""
    return np.dtype(
        [
            *((name, np.int64) for name in ("failed", "has_batch", "num_placed", "num_parts")),
            ("loss_tokens", loss_dtype),
            # The loads are its own, and the mean is that of its set.
            *((name, np.float64) for name in ("load_before", "load", "mean_load")),
            ("posts", posts),
        ]
    )


class Planner:
    """Makes the plans of the ranks that exchange samples.

    A plan takes one all-gather of host numbers; see `PlanGather`. With a `job`, a second all-gather carries a
    few numbers per rank. Construction is collective, and comes before the extensions' `setup`.

    Args:
        group: ranks that exchange samples.
        job: all ranks, if they plan in step and share a `JobStep`; None if only the group plans in step.
        together: ranks that compute the same samples as this one.
        exchanges: whether samples may leave this rank.
        settings, extensions, cost, shared_fields: the shuffler's own.
        counters: functions that count workloads, tokens, and loss tokens; see `count_rows`.

    Attributes:
        ranks: the ranks that plan in step, which are `job` or `group`.
        gather, verifies: the `PlanGather`, and whether an extension verifies.

    Raises:
        ValueError: ranks have different settings or extensions. All ranks raise it.
    """

    def __init__(
        self,
        group: RankGroup,
        job: RankGroup | None,
        together: RankGroup,
        exchanges: bool,
        settings: ShufflerSettings,
        extensions: Sequence[Extension],
        cost: Cost | None,
        shared_fields: Collection[str],
        counters: Mapping[str, Counter],
    ) -> None:
        self.ranks, self._group = job or group, group
        self._extensions, self._cost, self._counters = extensions, cost, counters
        self.shared_fields = shared_fields
        self.verifies = any(extension.verifies for extension in extensions)
        # Within a job, `enabled` may differ: some groups may have a single rank, or be disabled.
        own: dict[str, Any] = {} if job is not None else {"enabled": exchanges}
        own |= {"computes_with": together.num_ranks, "cost": cost} | vars(settings)
        own["extensions"] = [each.name for each in extensions]
        own |= {each.name: dict(each.settings()) for each in extensions}
        for ranks in (self.ranks, together):
            _check_same(ranks, own)
        channel = group.channel()
        self._job = None if job is None else job.channel()
        self.gather = PlanGather(channel, self._job or channel, together.channel(), extensions, exchanges)
        self._place = chain(self._extensions, "place", self._place_rows)
        self._takers = [each for each in extensions if type(each).take is not Extension.take]
        self._exchanges, self._settings = exchanges, settings
        self._arguments = arguments_of(extensions)
        self._batch_type: type | None = None
        self._reserved_by: int | None = None
        self._lost: Exception | None = None  # the error of a lost connection, after which nothing is sent

    @property
    def format(self) -> Format | None:
        """The batch format that the ranks have agreed on; None before the first batch."""
        return self.gather.format

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
            "this shuffler plans for a pipeline, or a loop over plan_ahead, in a thread of its own: create "
            "another shuffler, or exhaust the loaders or reset the pipeline first"
        )

    def plan(self, batch: Rows | None, failure: Exception | None = None) -> ShufflePlan:
        """Plans a step. Collective over the ranks that plan in step.

        Args:
            batch: this rank's batch, or None after its loader's end. If all loaders ended, the plan is empty.
            failure: the error that kept this rank from loading its batch. Every rank raises it.
        """
        if (refusal := self.busy() or self._lost) is not None:
            raise refusal
        try:
            return self._plan_step(batch, failure)
        except Exception as error:
            if is_lost(error):
                self._lost = error
            raise

    def _plan_step(self, batch: Rows | None, failure: Exception | None) -> ShufflePlan:
        posts = np.zeros(1, dtype=[(of.name, np.int64, (of.num_posted,)) for of in self._extensions])
        if self._job is None:
            return self._plan(batch, failure, posts)
        plan = None
        try:
            plan = self._plan(batch, failure, posts)
        except Exception as error:
            if is_lost(error):  # others wait for this rank in the set, so all they can notice is its end
                raise
            failure = error
        own = np.zeros(1, dtype=[(of.name, posts.dtype[of.name]) for of in self._takers])
        for extension in self._takers:
            own[extension.name] = posts[extension.name]
        return self._share(self._job, plan, failure, own)

    def prepare(self, rows: Rows | None, plan: ShufflePlan) -> Rows:
        """Returns this rank's rows to copy and exchange in a step. `rows` is None if its loader has ended."""
        if rows is None:
            return self.gather.spare_row()
        for extension in self._extensions:
            rows = extension.before_copy(rows, plan)
        return rows

    def hand_out(self, plan: ShufflePlan) -> None:
        """Passes the posts of all ranks to the extensions, as the step of a plan is handed out."""
        posts = plan.rows.posts if plan.job is None else plan.job.posts
        for extension in self._takers:
            extension.take(posts[extension.name])

    def _plan(self, batch: Rows | None, failure: Exception | None, posts: np.ndarray) -> ShufflePlan:
        """Plans among the ranks that exchange samples; fills `posts` with this rank's posts."""
        counted: Counted | None = None
        try:
            for extension in self._extensions:
                posts[extension.name] = extension.post()
            if batch is not None and failure is None:
                with named_range("## plan: workloads ##"):
                    counted = self._count(batch)
        except Exception as error:  # whatever a user's get_workloads raises must reach all ranks
            failure = failure or error
        with named_range("## plan: gather ##"):
            rows, posted = self.gather.gather(counted, failure, posts)
        if not rows.batch_sizes.any():
            # All loaders ended. A resumed run has no such plan, so extensions skip it.
            return self._with_route(place_at_home(rows))
        rows = replace(
            rows,
            posts={extension.name: posted[extension.name] for extension in self._extensions},
            ranks=self._group.ranks,
            ranks_per_node=self._group.ranks_per_node,
            bins=self.gather.bins,
            arguments=self._arguments,
        )
        with named_range("## plan: placement ##"):
            plan = self._place(self._with_cost(rows))
        if self._cost is not None:
            plan = plan.with_seconds(self._cost)
        return self._with_route(plan)

    def _count(self, loaded: Rows) -> Counted:
        batch = loaded.on_host()
        self._check_type(batch)
        if self.format is not None or self._reserved_by is not None:  # planned ahead, `PlanAhead` checks all
            return count_rows(batch, self._counters, self._extensions)
        first = LoadedBatch(batch)
        counted = count_rows(batch, self._counters, self._extensions)
        first.check_unchanged()
        return counted

    def _check_type(self, batch: Rows) -> None:
        """Checks that this rank's first batch can be exchanged, and that later ones have the same type."""
        if self.format is None or self._batch_type is None:
            batch.check()
            self._batch_type = type(batch.batch)
            return
        batch.tree.check_attributes()
        if type(batch.batch) is not self._batch_type:
            first = self._batch_type.__qualname__
            raise TypeError(f"a batch is a {type_name(batch.batch)}, and the first was a {first}")

    def _with_route(self, plan: ShufflePlan) -> ShufflePlan:
        """Returns the plan with this rank's route, so that the training thread only launches copies."""
        if self.format is None or not self._exchanges:
            return plan
        route = route_of(plan, self._group.rank, self.format.schema, self._settings.exchange)
        return replace(plan, route=route.pinned() if job_device().type == "cuda" else route)

    def _share(
        self, job: Channel, plan: ShufflePlan | None, failure: Exception | None, posts: np.ndarray
    ) -> ShufflePlan:
        """Returns the plan with a `JobStep`, by one all-gather over all ranks of the job.

        If there is no plan, `failure` is the reason, and all ranks raise it.
        """
        loss_dtype = "int64" if self.format is None else self.format.loss_dtype
        sent = np.zeros(1, _job_message(loss_dtype, posts.dtype))
        try:
            if plan is not None:
                self._tell(plan, sent)
        except Exception as error:  # such as loss tokens that overflow
            failure = error
        sent["failed"], sent["posts"] = failure is not None, posts
        of_ranks = job.all_gather(sent)[:, 0]
        if of_ranks["failed"].any():
            job.all_gather_objects(None, failure)
        assert plan is not None  # otherwise, the failure has been raised
        step = JobStep(
            has_batch=bool(of_ranks["has_batch"].any()),
            num_placed=of_ranks["num_placed"].copy(),
            num_loss_tokens=sum_loss_tokens(of_ranks["loss_tokens"]),
            loads_before=of_ranks["load_before"].copy(),
            loads=of_ranks["load"].copy(),
            posts=of_ranks["posts"],
            total_load=float(of_ranks["mean_load"].sum()),
        )
        return replace(plan, num_parts=int(of_ranks["num_parts"].max()), job=step)

    def _tell(self, plan: ShufflePlan, sent: np.ndarray) -> None:
        """Fills a message to the job with this rank's numbers from a plan.

        Loads have the same unit on all ranks, even if groups have learned costs of their own.
        """
        rank, rows = self._group.rank, plan.rows
        cost = self._cost if plan.has_batch else None  # without rows, `work` may have other columns
        cost = cost or Cost.sum_of_columns(rows.work.shape[1])
        workloads = cost.of(rows.starts_sample, rows.tokens, rows.work)
        alike = replace(plan, rows=replace(rows, workloads=workloads))
        sent["has_batch"], sent["num_placed"] = plan.has_batch, plan.num_placed[rank]
        sent["num_parts"], sent["loss_tokens"] = plan.num_parts, plan.loss_tokens_on(rank)
        sent["load_before"], sent["load"] = alike.loads_before[rank], alike.loads[rank]
        sent["mean_load"] = alike.total_load / alike.num_ranks

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


def _check_same(ranks: RankGroup, settings: Mapping[str, Any]) -> None:
    """Checks that ranks agree on settings, before `setup` waits for ranks that lack an extension."""
    gathered = ranks.all_gather_objects({name: repr(value) for name, value in settings.items()})
    for rank, others in zip(ranks.ranks, gathered, strict=True):
        for name, expected in gathered[0].items():
            if others.get(name) != expected:
                raise ValueError(
                    f"rank {rank}'s shuffler has {name}={others.get(name)}, but rank {ranks.ranks[0]}'s has "
                    f"{expected}; all ranks need the same settings"
                )
