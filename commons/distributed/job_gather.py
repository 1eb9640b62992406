"""Tells all ranks of a job what concerns them of a step in which only some of them exchange samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..perf_model.cost import Cost
from .failures import portable, raise_first
from .rank_group import RankGroup
from .shuffle_plan import JobStep, ShufflePlan, sum_loss_tokens

# What a rank tells, before its posts: whether it failed, whether a rank that exchanges with it has a batch,
# rows that it computes, parts that each rank runs; and bits of its loss tokens, its load before and after.
_FAILED, _HAS_BATCH, _PLACED, _PARTS, _LOSS_TOKENS, _BEFORE, _AFTER, _WIDTH = range(8)


class JobGather:
    """Shares a step with all ranks of the job, by one all-gather of a few numbers per rank.

    Args:
        job: all ranks. Construction is collective over them.
        rank: this process's place among the ranks of its plans.
        cost: the shuffler's, which all ranks have alike; None for the sum of the columns of `get_workloads`.

    Attributes:
        channel: of all ranks, for the thread that plans.
    """

    def __init__(self, job: RankGroup, rank: int, cost: Cost | None) -> None:
        self.channel, self._rank, self._cost = job.channel(), rank, cost

    def share(
        self, plan: ShufflePlan | None, failure: Exception | None, posts: Mapping[str, np.ndarray]
    ) -> ShufflePlan:
        """Returns the plan with what all ranks of the job know of its step. Collective over them.

        Args:
            plan: among the ranks that exchange with this one; None for a failure.
            failure: why this rank has no plan.
            posts: int64 `[numbers]` each, for all ranks, by name; as many numbers on all of them.

        Raises:
            Exception: the failure of the first rank that has one, on every rank.
        """
        told = np.zeros(_WIDTH, dtype=np.int64)
        try:
            if plan is not None:
                told[_HAS_BATCH:] = self._numbers(plan)
        except Exception as error:  # loss tokens that overflow
            failure = error
        told[_FAILED] = failure is not None
        table = self.channel.all_gather(np.concatenate([told, *posts.values()]))
        if table[:, _FAILED].any() or plan is None:
            raise_first(self.channel.all_gather_objects(portable(failure)), failure, self.channel.rank)
            raise RuntimeError("planning failed on a rank that gave no cause")
        columns = np.ascontiguousarray(table[:, :_WIDTH].T)
        posted = np.split(table[:, _WIDTH:], np.cumsum([len(of) for of in posts.values()], dtype=int), axis=1)
        job = JobStep(
            has_batch=bool(columns[_HAS_BATCH].any()),
            num_placed=columns[_PLACED],
            num_loss_tokens=sum_loss_tokens(columns[_LOSS_TOKENS].view(plan.rows.loss_tokens.dtype)),
            loads_before=columns[_BEFORE].view(np.float64),
            loads=columns[_AFTER].view(np.float64),
            posts=dict(zip(posts, posted, strict=False)),
        )
        return replace(plan, num_parts=int(columns[_PARTS].max()), job=job)

    def _numbers(self, plan: ShufflePlan) -> list[int]:
        """Returns what this rank tells of a plan; floats as the integers that have their bits.

        Loads are in one unit on all ranks, whatever costs those that exchange have learned.
        """
        rank, rows = self._rank, plan.rows
        loss_tokens = np.array([plan.loss_tokens_on(rank)], dtype=rows.loss_tokens.dtype)
        cost = self._cost if plan.has_batch else None  # without rows there may be other columns
        cost = cost or Cost.sum_of_columns(rows.work.shape[1])
        workloads = cost.of(rows.starts_sample, rows.tokens, rows.work)
        alike = replace(plan, rows=replace(rows, workloads=workloads))
        loads = np.array([alike.loads_before[rank], alike.loads[rank]])
        bits = [*loss_tokens.view(np.int64).tolist(), *loads.view(np.int64).tolist()]
        return [plan.has_batch, int(plan.num_placed[rank]), plan.num_parts, *bits]
