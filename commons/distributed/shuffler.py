"""The shuffler: plans on the host which rank computes which sample, and moves the samples accordingly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..checks import require_type
from ..perf_model.cost import Cost
from ..registry import NamedFactory
from ..sequence_batch.fields import FieldValue
from ..sequence_batch.packed_rows import PackedRows
from ..sequence_batch.rows import Rows
from .counting import Counter, of_batch
from .exchange import transfer, view_of
from .extension import Extension, chain, order_extensions
from .loss import LossScale, check_runs_copies
from .placement import warm_up
from .plan import Format, ShufflePlan
from .plan_ahead import PlanAhead
from .planner import Planner
from .ranks import RankGroup, job_device
from .report import WORKLOAD_UNITS
from .settings import ShufflerSettings

Batch = TypeVar("Batch")
# Arguments that `IdentityShuffler` took in 0.1.0.
_GONE = frozenset({"get_workloads", "unit", "get_tokens", "get_loss_tokens", "shared_fields"})


class BatchShuffler(ABC):
    """Places the samples of a global batch so that every rank has nearly the same load.

    Subclass it for a model, implement `get_workloads`, and register it with `register_batch_shuffler`.

    A batch is a `BaseBatch`, or any nesting of dataclasses (such as TorchRec's `Batch`), dicts, lists, and
    (named) tuples that hold KeyedJaggedTensors, JaggedTensors, and tensors with one row per sample.
    `extensions.more_kinds` and `register_batch_type` add other types. Only a `BaseBatch` knows its padding
    rows. In any other batch, every row is a sample, so a rank left without samples gets a copy of a real row.

    Each `plan` takes one all-gather of host numbers, or a few collectives in the first step, in a step with
    more rows than any before, and while some ranks have no batch. `exchange` takes one all-to-all (or
    all-gather) on the batch's device, or no collective if no sample moves. The host does not wait for the
    device, as long as `plan` gets batches on the host.

    A shuffler serves one pipeline or `plan_ahead` loop at a time. Meanwhile, `plan` raises a RuntimeError.

    Args:
        process_group: ranks to balance among. None means all ranks. Construction is collective over the job,
            even for a rank that forms a group by itself.
        computes_with: ranks that compute the same samples together, such as a tensor-parallel group. Their
            loss counts once. Either they load the same batches, and `process_group` is the data-parallel
            group, or they load different ones that the model gathers, and `process_group` has them all.
        enabled: whether samples move. If False, samples stay on their ranks, and placement settings have no
            effect. Plans, the end of loops, the loss, and the report still work in the same way.
        cost: nanoseconds per sample, per token, and per unit of each column of `get_workloads`, measured by
            a calibration of the model. None means the sum of the columns.
        extensions: optional parts, such as `Pieces()`, in any order. An extension serves only one shuffler.
        settings: fields of `ShufflerSettings`.

    Attributes:
        shared_fields: paths of data that never moves, because all samples of a batch share it or it belongs
            to the rank, such as "context.temperature" or "[2]". A subclass sets them. A `BaseBatch` marks
            such fields in their metadata instead.
        unit: unit of the workloads, for logs, such as "FLOPs". A subclass sets it.
        excludes: names of extensions that the model does not work with, each with the reason.
        moves_samples: whether samples may leave their ranks. False if disabled, or for the identity shuffler.
        extensions: the given extensions, outermost first.
        group: ranks that plan together: those to balance among, or all in a pipeline that moves no samples.

    Raises:
        TypeError: a setting is unknown or has the wrong type, or `extensions` holds something else.
        KeyError: the partitioner or the exchange is unknown.
        ValueError: a rank is not in its `process_group`, or ranks differ in their groups or settings (raised
            on all ranks); a setting is out of range or has no effect; or `enabled` is False, but an extension
            needs samples to move, or the model does not work with it.
        RuntimeError: some ranks did not construct their shuffler within a minute.
    """

    shared_fields: Sequence[str] = ()
    unit: str = WORKLOAD_UNITS
    excludes: Mapping[str, str] = {}
    moves_samples: bool = True
    extensions: tuple[Extension, ...] = ()

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        computes_with: dist.ProcessGroup | None = None,
        enabled: bool = True,
        cost: Cost | None = None,
        extensions: Sequence[Extension] = (),
        **settings: Any,
    ) -> None:
        name = type(self).__name__
        self.settings = ShufflerSettings(**settings)
        require_type(f"{name}.enabled", enabled, bool)
        self.moves_samples = self.moves_samples and enabled
        require_type(f"{name}.cost", cost, Cost | None)
        self.cost = cost
        self._process_group, self._world_size = process_group, _world_size()
        self.expects_scale = True  # pipelines scale the loss themselves
        self.together = RankGroup.alone() if computes_with is None else RankGroup.of(computes_with)
        self._is_taken = False  # by a pipeline or a loop over plan_ahead
        self._take(extensions)

    def add_extension(self, extension: Extension) -> None:
        """Adds an extension, as the constructor does.

        Raises:
            RuntimeError: a step was planned, or a pipeline or loop exists. See also the constructor.
        """
        if self.planner.format is not None or self._is_taken:
            raise RuntimeError(f"this shuffler is, or was, in use: add {extension.name} before it plans")
        before = dict(vars(self))
        try:
            self._take([extension])
        except Exception:
            vars(self).update(before)
            raise

    def _take(self, extensions: Sequence[Extension]) -> None:
        """Installs extensions, and rebuilds everything that depends on the full set."""
        ordered, name = order_extensions(extensions, self.extensions), type(self).__name__
        for extension in ordered:
            if extension.name in self.excludes:
                raise ValueError(f"{name} excludes {extension.name}: {self.excludes[extension.name]}")
            extension.check(self.settings)
        moving = [type(extension).__name__ for extension in ordered if extension.moves]
        if moving and not self.moves_samples:
            off = f"{name}(enabled=False)" if type(self).moves_samples else f"an {name}"
            raise ValueError(f"{off} moves no samples, as {' and '.join(moving)} would need: leave them out")
        # Connect the groups now, so that no step waits for a connection.
        uses = ["exchange", *(use for extension in ordered for use in extension.uses(job_device()))]
        # Unlike an identity shuffler, a disabled one still plans among its process group.
        by_itself = not type(self).moves_samples
        self.group = RankGroup.alone() if by_itself else RankGroup.of(self._process_group, uses)
        self.extensions = ordered
        self._plan_within(self.group, None)
        self._move = chain(ordered, "around_exchange", self._move_rows)
        if self.moves_samples and dist.is_initialized() and dist.get_world_size() > 1:
            # Even a rank in a group by itself compiles now. In a pipeline, all ranks would wait for it later.
            warm_up(self.settings, ordered)
        for extension in ordered:
            extension.is_taken = True

    def view(self, batch: Any) -> Rows:
        """Returns the rows of a batch of any supported type; see `view_of`."""
        return view_of(batch, self.shared_fields)

    @abstractmethod
    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns the cost of each row, as non-negative integers. `batch` is on the host.

        The shape is `[batch_size]`. It may be `[batch_size, columns]` if parts of a row's work differ in
        speed, such as matrix products and attention. A cost fitted to measured times weighs each column
        separately. Otherwise, the columns are added up. Values of padding rows are ignored. In `batch`,
        lengths are int64, and so are integers in tensors of one or two dimensions, so that their squares do
        not overflow. Do not change its tensors in place: other counts use them. Pipelines call this method in
        the planning thread, while the model trains.
        """

    def get_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the number of tokens of each row, `[batch_size]` integers. `batch` is on the host.

        Token limits apply to this number, and costs fitted to measured times depend on it. Defaults to
        `BaseBatch.num_tokens()`, or else to the number of jagged elements.
        """
        return self.view(batch).num_tokens()

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the loss tokens of each row, `[batch_size]` non-negative numbers. `batch` is on the host.

        The loss is a mean over these tokens. Return integers, or floats for a weighted mean, the same kind on
        all ranks and in every step. Defaults to `BaseBatch.num_loss_tokens()`, or else to one per row.
        """
        return self.view(batch).num_loss_tokens()

    def plan_over(self, job: RankGroup) -> None:
        """Makes all ranks of the job plan in step from now on, as pipelines require. Collective over the job.

        Raises:
            ValueError: ranks disagree on which of them exchange with each other. Raised on all ranks.
            RuntimeError: some rank is in a pipeline or loop with this shuffler. Raised on all ranks.
        """
        self._check_world()
        mine = self.group.ranks if self.moves_samples else ()
        in_step = self.planner.ranks.ranks == job.ranks
        told = job.all_gather_objects((mine, in_step), self.planner.busy())
        sets, are_in_step = zip(*told, strict=True)
        if all(are_in_step):
            return
        for ranks in filter(None, sets):
            if any(sets[job.ranks.index(rank)] not in (ranks, ()) for rank in ranks):
                raise ValueError(
                    f"a rank balances among ranks {list(ranks)}, but one of these ranks among others; give "
                    "the shufflers of a group the same process_group"
                )
        if any(sets):
            self._plan_within(self.group if self.moves_samples else RankGroup.alone(), job)
        else:
            self._plan_within(job, None)

    def _plan_within(self, group: RankGroup, job: RankGroup | None) -> None:
        """Builds the planner and the loss scale, for plans within a group and in step with a job.

        | group                  | job       | when                                                    |
        |------------------------|-----------|---------------------------------------------------------|
        | ranks to balance among | None      | outside a pipeline, or if all ranks exchange as one set |
        | ranks to balance among | all ranks | in a pipeline, if ranks exchange in smaller sets        |
        | only this rank         | all ranks | in a pipeline, if only other shufflers move samples     |
        | all ranks              | None      | in a pipeline, if no shuffler moves samples             |
        """
        self.group, self._loss_scale = group, LossScale(group, self.together.num_ranks)
        own = self.settings, self.extensions, self.cost, self.shared_fields
        self.planner = Planner(group, job, self.together, self.exchanges, *own, self._counters())
        for extension in self.extensions:
            extension.setup(self)

    def _check_world(self) -> None:
        if self._world_size != _world_size():
            raise RuntimeError(
                f"this {type(self).__name__} was made for {self._world_size} rank(s), and the job has "
                f"{_world_size()} now: make it after init_process_group, and a new one for each job"
            )

    @property
    def exchanges(self) -> bool:
        """Whether samples may leave this rank."""
        return self.moves_samples and self.group.num_ranks > 1

    def _counters(self) -> dict[str, Counter]:
        """Returns the functions that count workloads, tokens, and loss tokens, by their names in messages."""
        of, counters = type(self), {f"{type(self).__name__}.get_workloads": of_batch(self.get_workloads)}
        for name, default in (("get_tokens", Rows.num_tokens), ("get_loss_tokens", Rows.num_loss_tokens)):
            is_default = getattr(of, name) is getattr(BatchShuffler, name)
            counters[f"{of.__name__}.{name}"] = default if is_default else of_batch(getattr(self, name))
        return counters

    def plan(self, batch: Any) -> ShufflePlan:
        """Places the samples of one global batch, on the host. Collective over the ranks that plan together.

        Args:
            batch: this rank's batch, on the host. A device batch is copied to the host first. None means that
                this rank's loader has ended. The rank still calls `exchange`, with `padding_batch()`.

        Raises:
            ValueError: workloads have the wrong length, or are negative, NaN, or infinite; batches of
                different ranks or steps differ in their fields; or no placement fits `max_tokens`. Every rank
                raises these errors, and any error of `get_workloads`. If only one rank fails after the
                gather, such as for lack of memory, only that rank raises, unless an extension compares plans.
            RuntimeError: the shuffler was constructed before `init_process_group`.
        """
        self._check_world()
        plan = self.planner.plan(None if batch is None else self.view(batch))
        if plan.whole.has_batch:
            self.planner.hand_out(plan)
        return plan

    def exchange(self, batch: Batch, plan: ShufflePlan) -> Batch:
        """Moves the samples as planned. Collective over the group, on the batch's device.

        In a training loop, call `scale` next. If the loop forgets to, it logs one warning.

        Args:
            batch: this rank's part of the global batch that was planned, on any device.
            plan: the placement.

        Returns:
            A batch of the same kind, with at least one row. The samples that this rank computes come first,
            followed by padding rows if batches know their padding.

        Raises:
            ValueError: samples may move, and `plan` was made for another batch. Only this rank raises it,
                while the others wait.
        """
        if self.expects_scale:
            self._loss_scale.expect(plan)
        rows = self.view(batch)
        if self.exchanges:
            prepared = self.planner.prepare(rows, plan)
            rows = prepared if prepared.device == rows.device else prepared.to(rows.device)
        return self.exchange_rows(rows, plan).batch

    def exchange_rows(self, rows: Rows, plan: ShufflePlan) -> Rows:
        """Moves the rows of a planned step as `exchange` does, and returns this rank's new rows."""
        rank, known = self.group.rank, plan.rows.format
        if known is None or (self.exchanges and plan.route is None):
            raise ValueError("exchange got a plan without a format and a route; give it one of this shuffler")
        lengths = plan.rows.lengths_as_loaded(rank)
        if not self.exchanges:
            counts = known.row_counts(plan.rows, plan.rows.loaded_by(rank))
            return rows.with_totals(lengths).with_counts(counts) if rows.pads else rows
        loaded = rows.packed(lengths)
        self._check_planned(rows, loaded, plan, known)
        fields, own, num_rows = self._move(loaded, plan), plan.computed_by(rank), int(plan.num_rows[rank])
        if not (len(own) or rows.pads):  # a copy of a real row
            fields, num_rows = self.planner.gather.spare_row().to(rows.device, non_blocking=True).fields, 1
        placed = rows.replaced(fields, num_rows, len(own)).with_counts(known.row_counts(plan.rows, own))
        batch = placed.batch
        for extension in self.extensions:
            batch = extension.after_exchange(batch, plan)
        return placed if batch is placed.batch else self.view(batch)

    def _move_rows(self, loaded: PackedRows, plan: ShufflePlan) -> dict[str, FieldValue]:
        assert plan.route is not None  # `exchange_rows` has checked
        return transfer(loaded, plan.route, partial(self.group.group_for, "exchange"))

    def shuffle(self, batch: Batch) -> Batch:
        """Calls `plan`, then `exchange`."""
        return self.exchange(batch, self.plan(batch))

    def scale(
        self,
        loss: torch.Tensor,
        plan: ShufflePlan,
        reduction: str | None,
        gradients: str = "mean",
        step_plans: Sequence[ShufflePlan] | None = None,
    ) -> torch.Tensor:
        """Returns the loss, scaled so that `backward` yields the gradient of the mean over all loss tokens.

        Use it in your own training loop. It takes one all-reduce on the loss's device if only some of the
        ranks balance together, else no collective. The host waits for the device only on a rank without loss
        tokens, to check that a "mean" is finite.

        Args:
            loss: loss of the exchanged batch, of any shape for "sum", a scalar for "mean" and "global_mean".
            plan: the plan of that exchange.
            reduction: the model's reduction of the losses: "sum" or "mean" over this rank's loss tokens, or
                "global_mean" over the loss tokens of all ranks. None means that the loop scales the loss.
            gradients: the ranks' reduction of gradients: "mean" (as in DistributedDataParallel and TorchRec's
                sharded tables) or "sum".
            step_plans: plans of all batches of the optimizer step, if gradients are accumulated.

        Raises:
            TypeError: `loss` is not a tensor.
            MeanOfNoneError: a "mean" over no loss tokens is not finite. Only this rank raises it.
            ValueError: a reduction is unknown; a mean is not a scalar; a "global_mean" covers several
                batches, or a copied row on a rank without samples (raised on all ranks that balance
                together); `plan` is not among `step_plans`; or it moves samples, and was not exchanged.
        """
        for extension in self.extensions:
            extension.check_ran(plan)
        if self.expects_scale:
            self._loss_scale.check_exchanged(plan)
        check_runs_copies(plan, plan.rows.format is None or plan.rows.format.pads, reduction)
        return self._loss_scale.scaled(loss, plan, reduction, gradients, step_plans)

    def plan_ahead(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, ShufflePlan]]:
        """Plans each step in a background thread while the previous step trains, for your own training loop.

        Collective: all ranks of the group get equally many steps, and must leave the loop in the same step.

        Args:
            batches: batches of this rank, on the host. The next batch is loaded before this one is copied to
                the device, so each needs its own memory. A spot check raises an error if a batch changed.

        Yields:
            This rank's batch of a step, to copy to the device, and the plan to `exchange` it with. After this
            rank's batches end, its batch is `padding_batch()`, until the batches of all ranks have ended.

        Raises:
            Exception: loading or planning failed on any rank. See `plan` for the ranks that raise it.
            RuntimeError: another loop with this shuffler is running on any rank. Raised on all ranks.
        """
        self._check_world()
        self.planner.ranks.all_gather_objects(None, self.planner.busy())
        ahead, loader = self.ahead(), iter(list[Batch]())
        try:
            loader = iter(batches)
        except Exception as error:  # a DataLoader with workers asks for its first batches here
            ahead.failure = error
        try:
            while (step := ahead.next_step(loader)) is not None:
                yield step.rows.batch, step.plan
        finally:
            ahead.drop()

    def ahead(self, device: torch.device | None = None) -> PlanAhead:
        """Returns a new `PlanAhead` for steps on a device. None means the caller's current device."""
        self._is_taken = True
        return PlanAhead(self.planner, device)

    def padding_batch(self) -> Any:
        """Returns a host batch of one row, for a rank whose loader has ended before those of other ranks.

        The row is padding, or a copy of a row of this rank's first batch if batches do not know padding.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        return self.planner.gather.spare_row().batch

    def _check_planned(self, view: Rows, rows: PackedRows, plan: ShufflePlan, known: Format) -> None:
        """Raises a ValueError unless the fields and the numbers of rows and elements fit the plan."""
        elements = [len(of.values()) for of in view.fields.values() if not isinstance(of, torch.Tensor)]
        planned = [sum(of_keys) for of_keys in rows.schema.totals(rows.lengths).values()]
        same_elements = elements == planned or not plan.rows.batch_sizes[self.group.rank]
        difference = known.schema.difference(rows.schema)
        if difference or view.num_rows != len(rows.lengths) or not same_elements:
            raise ValueError(
                f"exchange got a batch of {view.num_rows} rows with {elements} elements in its jagged "
                f"fields; the plan is for {len(rows.lengths)} rows with {planned} elements"
                f"{'; ' if difference else ''}{difference}: give exchange the batch that plan was made for"
            )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


Shuffler = TypeVar("Shuffler", bound=type[BatchShuffler])


class BatchShufflerFactory(NamedFactory[BatchShuffler]):
    """Registers shufflers and creates them by name. "identity" is built in."""

    kind = "batch shuffler"
    base = BatchShuffler


def register_batch_shuffler(name: str) -> Callable[[Shuffler], Shuffler]:
    """Returns a class decorator that registers a `BatchShuffler` under a name.

    Raises:
        TypeError: the class is not a `BatchShuffler`.
        ValueError: the name is already registered.
    """
    return partial(BatchShufflerFactory.register, name)  # type: ignore[return-value]


@register_batch_shuffler("identity")
class IdentityShuffler(BatchShuffler):
    """Leaves every sample where it was loaded, and reports the imbalance of tokens.

    Outside a pipeline, `plan` and `exchange` communicate nothing. In a pipeline, all ranks gather the counts
    of their samples. With loads of your own, use your own shuffler with `enabled=False`.
    Provisional: may change in a minor version.
    """

    moves_samples = False
    unit = "tokens"

    def __init__(self, process_group: dist.ProcessGroup | None = None, **settings: Any) -> None:
        if gone := sorted(_GONE & settings.keys()):
            raise TypeError(f"IdentityShuffler no longer takes {gone}: use your own, with enabled=False")
        super().__init__(process_group, **settings)

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns the tokens of each row."""
        return self.get_tokens(batch)
