"""The shuffler: plans on the host which rank computes which sample, and moves the samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..checks import require_type
from ..perf_model.cost import Cost
from ..sequence_batch.container_types import type_name
from ..sequence_batch.packed_rows import PackedRows
from ..sequence_batch.row_schema import FieldValue
from ..sequence_batch.rows import Rows
from ..sequence_batch.tree import check_attributes
from .balance_report import WORKLOAD_UNITS
from .batch_format import Format
from .count_rows import Counter, count_rows
from .empty_rank import check_runs_copies
from .exchange import Route, route_of, transfer
from .extension import Extension, chain, order_extensions
from .left_loaders import leave, was_left
from .loaded_memory import LoadedBatch
from .loss_reduction import LossScale
from .placement import warm_up
from .plan_ahead import PlanAhead
from .planner import Planner
from .rank_group import RankGroup, job_device
from .row_table import RowTable
from .shuffle_plan import ShufflePlan
from .shuffler_settings import faster_placement, make_settings, warn_of_unread_method
from .step import MOST_ON_THEIR_WAY

Batch = TypeVar("Batch")


class BatchShuffler(ABC):
    """Places the samples of a global batch so that every rank has nearly the same load.

    Subclass it for a model, implement `get_workloads`, and register it with `register_batch_shuffler`.

    A batch is a `BaseBatch`, or any nesting of dataclasses (such as TorchRec's `Batch`), dicts, TensorDicts,
    lists and (named) tuples that hold KeyedJaggedTensors, JaggedTensors, KeyedTensors and tensors with one
    row per sample; `register_batch_type` adds other types. Only a `BaseBatch` can tell padding rows: every
    row of another batch is a sample. A rank without samples of such batches gets a copy of a real row, the
    same on all ranks; `plan.num_placed` tells that it has none.

    Collectives per step: `plan` takes one all-gather of host numbers (a few for the first, for one with more
    rows than any before, and while some ranks have no batch). `exchange` takes one all-to-all (or all-gather)
    on the batch's device, or none if no sample moves. No host-device synchronization if the batch given to
    `plan` is on the host.

    A shuffler serves one pipeline, or one loop over `plan_ahead`, at a time. Meanwhile `plan` is an error.

    Args:
        process_group: the ranks to balance among; None means all. Making a shuffler is collective over the
            job, also for a rank that is the only one of its group.
        enabled: whether samples move. If False, everything else is the same: plans, the end of loops, the
            loss, and the report, whose loads are those as loaded. Settings of placement then have no effect.
        cost: of samples, tokens, and each column of `get_workloads`, in nanoseconds, as a calibration of the
            model measured it; None for the sum of the columns.
        extensions: optional parts, in any order, such as `Pieces()`. Each serves this shuffler alone.
        settings: the fields of `ShufflerSettings`.

    Attributes:
        shared_fields: paths of what all samples of a batch share, or what belongs to the rank, as in
            "context.temperature" or "[2]"; it never moves. A subclass sets it. A field of a `BaseBatch` is
            marked in its metadata instead.
        unit: of the workloads, for logs, as in "FLOPs"; a subclass sets it.
        moves_samples: whether samples may leave their ranks: `enabled`, and no identity shuffler.
        extensions: as given, outermost first.
        group: ranks that plan together: those to balance among; in a pipeline all, if no sample moves.
        planner: makes the plans.
        expects_scale: whether a training loop has to call `scale`; pipelines scale the loss themselves.

    Raises:
        TypeError: a setting is unknown or has the wrong type, or `extensions` has something else.
        KeyError: unknown partitioner or exchange.
        ValueError: a rank is not in its `process_group`, or ranks name groups that do not agree, raised on
            all ranks; a setting is out of range, or has no effect; or `enabled` is False, and extensions need
            samples that move.
        RuntimeError: ranks have not made theirs within a minute.
    """

    shared_fields: Sequence[str] = ()
    unit: str = WORKLOAD_UNITS
    moves_samples: bool = True
    extensions: tuple[Extension, ...] = ()

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        enabled: bool = True,
        cost: Cost | None = None,
        extensions: Sequence[Extension] = (),
        **settings: Any,
    ) -> None:
        name = type(self).__name__
        self.settings = make_settings(name, settings)
        require_type(f"{name}.enabled", enabled, bool)
        self.moves_samples = self.moves_samples and enabled
        require_type(f"{name}.cost", cost, Cost | None)
        shared = self.shared_fields
        if isinstance(shared, str):
            raise TypeError(f"shared_fields is {shared!r}; expected a tuple of paths, as in ({shared!r},)")
        self.cost = cost
        self._process_group, self._world_size = process_group, _world_size()
        self._routes: tuple[tuple[ShufflePlan, Route], ...] = ()  # replaced whole: two threads read it
        self.expects_scale = True
        self._is_taken = False  # by what plans steps ahead
        self._take(extensions)
        warn_of_unread_method(self, {extension.reads for extension in self.extensions})

    def add_extension(self, extension: Extension) -> None:
        """Adds an extension to a shuffler that no loop has planned with, as the constructor does.

        Raises:
            RuntimeError: a step has been planned, or a pipeline or a loop was made; or as the constructor.
        """
        if self.format is not None or self._is_taken:
            raise RuntimeError(
                f"this {type(self).__name__} serves a pipeline or a loop; add {extension.name} before"
            )
        self._take([extension])

    def _take(self, extensions: Sequence[Extension]) -> None:
        """Makes what depends on extensions, for these and those that are here."""
        ordered, name = order_extensions(extensions, self.extensions), type(self).__name__
        for extension in ordered:
            extension.check(self.settings)
        moving = [type(extension).__name__ for extension in ordered if extension.moves]
        if moving and not self.moves_samples:
            off = f"{name}(enabled=False)" if type(self).moves_samples else f"an {name}"
            raise ValueError(
                f"{off} moves no sample, which {' and '.join(moving)} rely on: leave them out of a run to "
                "compare with"
            )
        # Connected here, so that no step waits for it.
        uses = ["exchange", *(use for extension in ordered for use in extension.uses(job_device()))]
        # One that is off plans among the same ranks.
        by_itself = not type(self).moves_samples
        self.group = RankGroup.alone() if by_itself else RankGroup.of(self._process_group, uses)
        self.extensions = ordered
        self._plan_within(self.group, None)
        self._move = chain(ordered, "around_exchange", self._move_rows)
        if self.moves_samples and dist.is_initialized() and dist.get_world_size() > 1:
            # A rank alone, too: it places the others' rows in a pipeline, and would wait for them there.
            warm_up(self.settings, ordered)
        for extension in ordered:
            extension.is_taken = True

    @property
    def enabled(self) -> bool:
        """Whether samples move. To change that, make another shuffler, and a pipeline of it."""
        return self.moves_samples

    @property
    def format(self) -> Format | None:
        """The format that the ranks agreed on at the first batch; None before it."""
        return self.planner.format

    def _agreed(self) -> Format:
        if self.format is None:
            raise RuntimeError("no rank of the group has had a batch yet, so that its fields are unknown")
        return self.format

    def view(self, batch: Any) -> Rows:
        """Returns the rows of a batch of any type, for those who count or move them."""
        return Rows(batch, self.shared_fields)

    @abstractmethod
    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns the cost of each row, non-negative integers; `batch` is on the host.

        `[batch_size]`, or `[batch_size, columns]` for parts of a row's work that may differ in speed, such as
        matrix products and attention. Costs that are fitted to times weigh each column by itself; otherwise
        they add up. Values of padding rows are ignored. Lengths in `batch`, and integers with one number per
        row, are int64, so that their squares do not wrap. Pipelines call this in a thread of their own,
        alongside the training.
        """

    def get_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the tokens of each row, `[batch_size]` integers; `batch` is on the host.

        Token caps, and costs that are fitted to times, count them. Defaults to `BaseBatch.num_tokens()`, or
        to the number of jagged elements of any other batch.
        """
        return self.view(batch).num_tokens()

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the loss tokens of each row, `[batch_size]` non-negative numbers; `batch` is on the host.

        The loss is a mean over them: integers, or floats for a mean weighted by them. Of several ranks, all
        return the one or the other, in every step. Defaults to `BaseBatch.num_loss_tokens()`, or to one per
        row of any other batch.
        """
        return self.view(batch).num_loss_tokens()

    def plan_over(self, job: RankGroup) -> None:
        """Has all ranks of the job plan in step from now on, as pipelines need it; collective over them.

        Where only some exchange, they still plan among themselves, and a second gather tells all ranks what
        the loss needs, as `plan.job`. Where none does, `group` becomes all ranks.

        Raises:
            ValueError: ranks are not each in one set of ranks that exchange; on all ranks.
            RuntimeError: another pipeline, or loop, plans with this shuffler on some rank; on all ranks.
        """
        self._check_world()
        mine, in_step = self.group.ranks if self.moves_samples else (), self.planner.ranks.ranks == job.ranks
        told = job.all_gather_objects((mine, in_step), self.planner.busy())
        sets, are_in_step = zip(*told, strict=True)
        if all(are_in_step):
            return
        for ranks in filter(None, sets):
            if any(sets[job.ranks.index(rank)] not in (ranks, ()) for rank in ranks):
                raise ValueError(
                    f"a rank balances among ranks {list(ranks)}, and one of these among others; give the "
                    "shufflers of a group the same process_group"
                )
        if any(sets):
            self._plan_within(self.group if self.moves_samples else RankGroup.alone(), job)
        else:
            self._plan_within(job, None)

    def _plan_within(self, group: RankGroup, job: RankGroup | None) -> None:
        """Makes the parts that plan within a group, and in step with a job.

        | group      | job  | when                                                   |
        |------------|------|--------------------------------------------------------|
        | exchanging | None | in a loop of one's own, or if all ranks exchange       |
        | exchanging | all  | in a pipeline, if only some do                         |
        | this rank  | all  | in a pipeline, if others do, and this rank does not    |
        | all        | None | in a pipeline, if none does                            |
        """
        self.group, self._loss_scale = group, LossScale(group)
        self.planner = Planner(
            group,
            job,
            self.exchanges,
            self.settings,
            self.extensions,
            self.cost,
            self._count_rows,
            self.view,
            type(self).__name__,
        )
        for extension in self.extensions:
            extension.setup(self)

    def _check_world(self) -> None:
        if self._world_size != _world_size():
            raise RuntimeError(
                f"this {type(self).__name__} was made in a job of {self._world_size} ranks, and there are "
                f"{_world_size()} now: make it after init_process_group"
            )

    @property
    def exchanges(self) -> bool:
        """Whether samples may leave this rank."""
        return self.moves_samples and self.group.num_ranks > 1

    def _count_rows(self, loaded: Rows) -> tuple[RowTable, Format]:
        view = loaded.on_host()
        self._check_type(view)
        columns = {
            extension.name: _of_batch(extension.columns)
            for extension in self.extensions
            if type(extension).columns is not Extension.columns
        }
        # Where steps are planned ahead, the next batch is compared with those that wait.
        first = LoadedBatch(view) if self.format is None and not self._is_taken else None
        counted = count_rows(view, self._counters(view), columns, self.exchanges)
        if first is not None:
            first.check_unchanged()
        return counted

    def _counters(self, rows: Rows) -> dict[str, Counter]:
        """Returns the functions for workloads, tokens and loss tokens, by the names in messages."""
        name = type(self).__name__
        counters: dict[str, Counter] = {f"{name}.get_workloads": _of_batch(self.get_workloads)}
        if type(self).get_tokens is BatchShuffler.get_tokens:
            counters[f"{type(rows.batch).__name__}.num_tokens"] = Rows.num_tokens
        else:
            counters[f"{name}.get_tokens"] = _of_batch(self.get_tokens)
        if type(self).get_loss_tokens is BatchShuffler.get_loss_tokens:
            counters[f"{type(rows.batch).__name__}.num_loss_tokens"] = Rows.num_loss_tokens
        else:
            counters[f"{name}.get_loss_tokens"] = _of_batch(self.get_loss_tokens)
        return counters

    def _check_type(self, batch: Rows) -> None:
        """Checks that this rank's batches are of one type, and whether the first can be exchanged."""
        expected = None if self.format is None else self.format.batch_type
        if expected is None:
            batch.check()
            return
        check_attributes(batch.tree)
        if type(batch.batch) is not expected:
            raise TypeError(
                f"a batch is a {type_name(batch.batch)}, and the first was a {expected.__qualname__}; all "
                "must be of one type"
            )

    def plan(self, batch: Any) -> ShufflePlan:
        """Places one global batch. Collective over the ranks that plan together, host only.

        Args:
            batch: this rank's batch, on the host (one on a device is copied to it); None if its loader has
                ended. A rank without a batch takes part in `exchange` with `padding_batch()`.

        Raises:
            ValueError: workloads of the wrong length, negative, NaN or infinite; batches of different ranks
                or steps that differ in their fields; or no placement under `max_tokens`. Raised on every
                rank, as is any error of `get_workloads`. An error of one rank alone after the gather, such as
                a lack of memory, is raised there only, unless an extension compares plans.
            RuntimeError: the shuffler was made before `init_process_group`.
        """
        self._check_world()
        plan = self.planner.plan(None if batch is None else self.view(batch))
        if plan.whole.has_batch:
            self.planner.hand_out(plan)
        return plan

    def exchange(self, batch: Batch, plan: ShufflePlan) -> Batch:
        """Moves the samples as planned. Collective over the group, on the batch's device.

        In a training loop call `scale` next; a warning says so once if it is forgotten.

        Args:
            batch: this rank's part of the batch that `plan` was made for, on any device.
            plan: the placement.

        Returns:
            A batch of the same kind with this rank's samples first, then padding rows where batches know
            padding; at least one row.

        Raises:
            ValueError: `plan` was made for another batch; on this rank alone, while the others wait for it.
        """
        if self.expects_scale:
            self._loss_scale.expect()
        rows = self.view(batch)
        if self.exchanges:
            prepared = self._prepare(rows, plan)
            rows = prepared if prepared.device == rows.device else prepared.to(rows.device)
        return self.exchange_rows(rows, plan).batch

    def exchange_rows(self, rows: Rows, plan: ShufflePlan) -> Rows:
        """Moves the rows of a planned step as `exchange` does; returns those of this rank, put together."""
        batch_format, rank = self._agreed(), self.group.rank
        if not self.exchanges:
            return batch_format.with_row_counts(rows, plan.rows.row_counts[plan.rows.loaded_by(rank)])
        loaded = rows.packed(plan.rows.lengths_as_loaded(rank))
        self._check_planned(batch_format, rows, loaded, plan)
        fields = self._move(loaded, plan)
        own_counts = plan.rows.row_counts[plan.computed_by(rank)]
        placed = batch_format.make_rows(rows, fields, int(plan.num_rows[rank]), own_counts)
        batch = placed.batch
        for extension in self.extensions:
            batch = extension.after_exchange(batch, plan)
        return placed if batch is placed.batch else self.view(batch)

    def _move_rows(self, loaded: PackedRows, plan: ShufflePlan) -> dict[str, FieldValue]:
        return transfer(loaded, self.route(plan), partial(self.group.group_for, "exchange"))

    def route(self, plan: ShufflePlan) -> Route:
        """Returns what this rank sends and gets for a plan; the planning thread works it out ahead."""
        for known, route in self._routes:
            if known is plan:
                return route
        route = route_of(plan, self.group.rank, self._agreed().schema, self.settings.exchange)
        if job_device().type == "cuda":
            route = route.pinned()
        self._routes = (*self._routes, (plan, route))[-MOST_ON_THEIR_WAY:]
        return route

    def shuffle(self, batch: Batch) -> Batch:
        """`plan` and `exchange` in one."""
        return self.exchange(batch, self.plan(batch))

    def scale(
        self,
        loss: torch.Tensor,
        plan: ShufflePlan,
        reduction: str | None,
        gradients: str = "mean",
        step_plans: Sequence[ShufflePlan] | None = None,
    ) -> torch.Tensor:
        """Returns the loss to call `backward` on, for the gradient of the mean over all loss tokens.

        For a loop of your own. One all-reduce on the loss's device if the shuffler balances among some of the
        ranks, else no collective. No host-device synchronization, except for a "mean" on a rank without loss
        tokens, to see whether it is finite.

        Args:
            loss: of the exchanged batch; of any shape for "sum", a scalar for "mean" and "global_mean".
            plan: the plan of that exchange.
            reduction: how the model reduced the losses: "sum" or "mean" over this rank's loss tokens, or
                "global_mean" over those of all ranks. None for a loop that scales the loss itself.
            gradients: how ranks reduce their gradients: "mean" (as DistributedDataParallel and TorchRec's
                sharded tables do) or "sum".
            step_plans: with gradient accumulation, the plans of all batches of the optimizer step.

        Raises:
            TypeError: `loss` is no tensor.
            MeanOfNoneError: a "mean" on this rank, without loss tokens, is not finite; here alone.
            ValueError: an unknown reduction; a vector under "mean"; "global_mean" of several batches, or with
                a rank without samples (raised on the ranks that balance together); or `plan` is not among
                `step_plans`.
        """
        for extension in self.extensions:
            extension.check_ran(plan)
        check_runs_copies(plan.num_placed, self.format is None or self.format.pads, reduction)
        return self._loss_scale.scaled(loss, plan, reduction, gradients, step_plans)

    def plan_ahead(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, ShufflePlan]]:
        """Plans each step in a thread of its own while the one before trains; for a loop of your own.

        Collective: all ranks of the group end together, or leave the loop in the same step.

        Args:
            batches: this rank's, on the host. The next is loaded before the loop copies one to the device, so
                each needs memory of its own. That it did not change is checked.

        Yields:
            This rank's batch of a step (`padding_batch` once its own have ended), to be copied to the device;
            and the plan to `exchange` it by.

        Raises:
            Exception: the error that planning, or loading, raised on any rank.
            RuntimeError: another loop with this shuffler goes on, on any rank; raised on all of them.
            ValueError: `batches` is an iterator that gave one batch more to an earlier loop, which was left;
                on all ranks.
        """
        self._check_world()
        self.planner.ranks.all_gather_objects(None, self.planner.busy())
        ahead, loader = self.ahead(), iter(list[Batch]())
        try:
            loader = iter(batches)
        except Exception as error:  # a DataLoader with workers asks for its first batches here
            ahead.failure = error
        if was_left(loader):
            ahead.failure = ValueError(
                "this iterator gave a batch to an earlier loop over plan_ahead, which was left before that "
                "batch: make one generator, planned = shuffler.plan_ahead(batches), and take the steps of "
                "each part from it, as in itertools.islice(planned, 100)"
            )
        try:
            while (step := ahead.next_step(loader)) is not None:
                yield step.rows.batch, step.plan
        finally:
            if ahead.has_batches:
                leave(loader)
            ahead.drop()

    def ahead(self, device: torch.device | None = None) -> PlanAhead:
        """Returns what plans steps ahead, for a pipeline of steps on a device."""
        self._is_taken = True
        return PlanAhead(self.planner, self.view, self._prepare, self.faster_planning(), device)

    def faster_planning(self) -> tuple[str, str]:
        """Returns what to do if planning takes too long: where counting rows does, and where placing does."""
        counting = f"make {type(self).__name__}.get_workloads faster"
        without = [extension.faster_without for extension in self.extensions if extension.faster_without]
        return counting, without[0] if without else faster_placement(self.settings)

    def _prepare(self, rows: Rows | None, plan: ShufflePlan) -> Rows:
        """Returns this rank's rows of a planned step, None once its loader has ended, to be exchanged."""
        if self.exchanges:
            self.route(plan)  # so that the training thread only launches copies
        if rows is None:
            return self._agreed().padding_rows()
        for extension in self.extensions:
            rows = extension.before_copy(rows, plan)
        return rows

    def traffic(self, plan: ShufflePlan) -> tuple[int, int]:
        """Returns the bytes that `exchange` sends and receives on this rank for a plan."""
        return self.route(plan).traffic if self.exchanges and plan.moves else (0, 0)

    def padding_batch(self) -> Any:
        """Returns a host batch of one row, for a rank whose loader has ended while others go on.

        It is padding, or a copy of a real row, the same on all ranks, where batches do not know padding.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        return self._agreed().padding_rows().batch

    def _check_planned(self, batch_format: Format, view: Rows, rows: PackedRows, plan: ShufflePlan) -> None:
        """Compares fields, rows, and numbers of elements with those of the plan."""
        values = [field.values() for field in view.fields.values() if not isinstance(field, torch.Tensor)]
        elements, planned = [len(of) for of in values], rows.schema.num_elements(rows.lengths)
        same_elements = elements == planned or not plan.rows.batch_sizes[self.group.rank]
        difference = batch_format.schema.difference(rows.schema)
        if difference or view.num_rows != len(rows.lengths) or not same_elements:
            raise ValueError(
                f"exchange got a batch of {view.num_rows} rows with {elements} elements in its jagged "
                f"fields; the plan is for {len(rows.lengths)} rows with {planned} elements"
                f"{'; ' if difference else ''}{difference}: give exchange the batch that plan was made for"
            )


def _of_batch(count: Callable[[Any], Any]) -> Counter:
    """Returns a function of rows that gives a user's function their batch."""
    return lambda rows: count(rows.batch)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
