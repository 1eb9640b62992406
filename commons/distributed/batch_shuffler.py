"""The shuffler: plans on the host who computes which sample, and moves the samples."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.agreement import check_placed_samples, check_plans, check_same_plan
from commons.distributed.exchange import EXCHANGES, Traffic
from commons.distributed.loss_reduction import LossScale, check_global_mean
from commons.distributed.placement import DEFAULT_PARTITIONER, Placement
from commons.distributed.plan_ahead import PlanAhead
from commons.distributed.plan_gather import GatheredFacts, PlanGather
from commons.distributed.rank_group import RankGroup
from commons.distributed.sample_facts import SampleFacts
from commons.distributed.shuffle_plan import ShufflePlan, WindowPlan, empty_plan, one_step
from commons.distributed.way_back import return_step, return_window
from commons.distributed.window_placement import divided, placed_window
from commons.named_ranges import named_range
from commons.perf_model import MeasuredCost
from commons.sequence_batch import BaseBatch, containers
from commons.sequence_batch.packed_rows import PackedRows, gather_rows
from commons.sequence_batch.sample_rows import SampleRows, knows_padding

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class BatchShuffler(ABC):
    """Places the samples of a global batch so that every rank has nearly the same load.

    A model's shuffler subclasses this, gives `get_workloads`, and is registered with
    `register_batch_shuffler`.

    A batch is a `BaseBatch`, or any nesting of dataclasses (as TorchRec's `Batch`), dicts, TensorDicts, lists
    and (named) tuples of KeyedJaggedTensors, JaggedTensors, KeyedTensors and tensors with one row per sample;
    `register_batch_type` adds other types. Only a `BaseBatch` can tell padding rows, so only it has any: of
    any other batch every row is a sample. A rank that gets no sample of such batches gets a copy of a real
    row, the same on all ranks; `plan.num_placed` tells that it has none.

    Collectives of a step: `plan` takes one all-gather of host numbers (the first, and one that meets more
    rows than any before, a few), `exchange` one all-to-all (or all-gather) on the batch's device, or none if
    no sample moves. Host-device synchronisations: none if the batch given to `plan` is on the host, as it
    should be. `verify` adds an all-gather of host numbers to `plan` and two to `exchange`, and synchronises.

    Args:
        process_group: the ranks to balance among; None means all. Making a shuffler is collective over them.
        partitioner: "refined" comes as near the lower bound as it can, and moves nearly every sample;
            "rebalance" moves few, across nodes last; "longest_processing_time" and "karmarkar_karp" are the
            usual heuristics.
        tolerance: the largest load may be (1 + tolerance) × the lower bound; None for 0 with "refined" and
            0.01 with "rebalance".
        equal_rows: every rank computes the same number of rows (±1 real ones); else rows follow the load.
        max_rows: samples of a rank at most, where rows follow the load.
        max_tokens: tokens of a rank at most, as the batch counts them. A batch that cannot be placed so is an
            error on every rank.
        window: consecutive global batches that are planned together. More than 1 changes what a step
            contains: a sample may be placed in another step of the window.
        window_max_step_ratio: a step's total workload is at most this times the window's mean, where whole
            samples can keep to that; None for no limit.
        exchange: "all_to_all" sends each sample straight to where it goes; "all_gather" sends all samples to
            all ranks.
        planning_backend: where the gather for planning runs: "gloo", from host to host, or "device", where a
            gloo ring over all ranks takes longer than a step.
        verify: ranks compare a hash of every plan and the samples of every exchanged batch.
        max_tokens_per_micro_batch: makes plans divide each rank's samples into micro-batches of at most so
            many tokens, the same number on every rank, balanced together with the ranks; pipelines then run
            them one after the other. A sample above the cap gets a micro-batch of its own, and a warning
            names it. None for batches that run whole.
        small_micro_batches_at_ends: the lightest micro-batches come first and last, not only first.
        cost: what samples cost by their tokens, as measured; None for `get_workloads`.

    Attributes:
        shared_fields: paths of what all samples of a batch share, as in "context.temperature" or "[2]"; a
            subclass sets it. A field of a `BaseBatch` is marked in its metadata instead.
        group: the ranks to balance among.
        sample_rows: reads the rows of batches.
        equal_rows, window: as given.
        expects_scale: whether a training loop has to call `scale`; pipelines, which scale the loss, set it to
            False.

    A shuffler serves one pipeline, or one loop over `plan_ahead`, at a time: a thread plans with it from the
    first step until the loaders have ended or the pipeline is reset, and `plan` beside it is an error.

    Raises:
        KeyError: an unknown partitioner, exchange or planning backend.
        ValueError: this rank is not in `process_group`; or a setting is out of range, or has no effect.
    """

    shared_fields: Sequence[str] = ()

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        partitioner: str = DEFAULT_PARTITIONER,
        tolerance: float | None = None,
        equal_rows: bool = True,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        window: int = 1,
        window_max_step_ratio: float | None = None,
        exchange: str = "all_to_all",
        planning_backend: str = "gloo",
        verify: bool = False,
        max_tokens_per_micro_batch: int | None = None,
        small_micro_batches_at_ends: bool = False,
        cost: MeasuredCost | None = None,
    ) -> None:
        self._measured_cost = cost
        self._placement = Placement(
            partitioner,
            tolerance,
            equal_rows,
            max_rows,
            max_tokens,
            window,
            window_max_step_ratio,
            max_tokens_per_micro_batch,
            small_micro_batches_at_ends,
        )
        if exchange not in EXCHANGES:
            raise KeyError(f"unknown exchange {exchange!r}; there are {sorted(EXCHANGES)}")
        self._exchange = EXCHANGES[exchange]
        self.equal_rows = equal_rows
        self.group = self._make_group(process_group, planning_backend, verify)
        self.window = window
        self.sample_rows = SampleRows(self.shared_fields)
        self._gather = PlanGather(self.group, window, self.sample_rows)
        self._batch_type: type | None = None
        self._loss_scale = LossScale(self.group)
        self.expects_scale = True
        self._reserved_by: int | None = None
        self._longest_named = max_tokens_per_micro_batch or 0
        if self.group.num_ranks > 1 or max_tokens_per_micro_batch is not None:
            self._placement.warm_up()

    def _make_group(
        self, process_group: dist.ProcessGroup | None, planning_backend: str, verify: bool
    ) -> RankGroup:
        return RankGroup.of(process_group, planning_backend, verify)

    @abstractmethod
    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns the cost of each row, `[batch_size]` non-negative int64; `batch` is on the host.

        The unit is up to the shuffler, but the same everywhere. Values of padding rows are ignored.
        Lengths in `batch` are int64, so that their squares do not wrap. Pipelines call this in a thread of
        their own, alongside the training.
        """

    def get_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the tokens of each row, `[batch_size]` integers; `batch` is on the host.

        Caps of tokens and measured costs count them. By default what a `BaseBatch` says, and the jagged
        elements of any other batch.
        """
        return self.sample_rows.num_tokens(batch)

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the loss tokens of each row, `[batch_size]` integers; `batch` is on the host.

        So many losses of the row enter the mean. By default what a `BaseBatch` says, and one for each row of
        any other batch.
        """
        return self.sample_rows.num_loss_tokens(batch)

    def _counts_of_rows(self, batch: Any) -> dict[str, Callable[[Any], torch.Tensor]]:
        """Returns the functions for workload, tokens and loss tokens, by the names in messages."""

        def named(method: str, of_batch: str) -> str:
            mine = getattr(type(self), method) is not getattr(BatchShuffler, method)
            return f"{type(self).__name__}.{method}" if mine else f"{type(batch).__name__}.{of_batch}"

        cost = self._measured_cost
        return {
            f"{type(self).__name__}.get_workloads": self.get_workloads
            if cost is None
            else lambda batch: cost.per_sample_ns(self.get_tokens(batch)),
            named("get_tokens", "num_tokens"): self.get_tokens,
            named("get_loss_tokens", "num_loss_tokens"): self.get_loss_tokens,
        }

    def plan(self, batch: Any) -> ShufflePlan:
        """Works out the placement of one global batch. Collective over the group, host only.

        Args:
            batch: this rank's batch, on the host (one on a device is copied to it); None if its loader has
                ended. A rank without a batch takes part in `exchange` with `padding_batch()`.

        Raises:
            ValueError: workloads of the wrong length, negative, NaN or infinite; or batches of different
                ranks or steps differ in their fields; or they cannot be placed under `max_rows` and
                `max_tokens`. Raised on every rank, as is any error of `get_workloads`. What fails on one rank
                behind the gather, as for want of memory, is raised there alone, unless ranks `verify`.
        """
        window = self.plan_window([] if batch is None else [batch])
        return window.steps[0] if window.steps else self.empty_plan()

    def plan_window(self, batches: Sequence[Any], failure: Exception | None = None) -> WindowPlan:
        """Works out the placement of several steps. Collective over the group, host only.

        Args:
            batches: this rank's, up to `window` of them; fewer or none if its loader has ended.
            failure: what kept this rank from loading them; raised on every rank.

        Raises:
            ValueError: as `plan` does.
        """
        if self._reserved_by not in (None, threading.get_ident()):
            raise RuntimeError(
                f"this {type(self).__name__} plans for a pipeline, or a loop over plan_ahead, in a thread "
                "of its own: make another shuffler, or end the loaders or reset the pipeline before"
            )
        facts: SampleFacts | None = None
        padding: Any = None
        notes: list[str] = []
        if batches and failure is None:
            try:
                if len(batches) > self.window:
                    raise ValueError(
                        f"plan_window got {len(batches)} batches, expected at most window={self.window}"
                    )
                with named_range("## plan: workloads ##"):
                    on_host = [self.sample_rows.to_host(batch) for batch in batches]
                    self._check_types(on_host)
                    facts = SampleFacts.of(on_host, self.sample_rows, self._counts_of_rows(on_host[0]))
                if not self.knows_fields:
                    padding = self.sample_rows.row_or_padding(on_host[0])
                    padding = self.sample_rows.pinned_like(padding, batches[0])
                    notes = self.sample_rows.stale_numbers(on_host[0])
            except StopIteration as error:  # would look like the end of the data further up
                failure = RuntimeError(f"{type(self).__name__}.get_workloads raised {error!r}")
            except Exception as error:  # whatever a user's get_workloads raises must reach all ranks
                failure = error
        with named_range("## plan: gather ##"):
            gathered = self._gather.gather(facts, failure, padding, notes)
        if gathered is None or not gathered.batch_sizes.any():
            return one_step(self.empty_plan())
        if self.group.checks is None:
            return self._placed(gathered)
        return check_plans(self.group, lambda: self._placed(gathered))

    def exchange(self, batch: Batch, plan: ShufflePlan) -> Batch:
        """Moves the samples as planned. Collective over the group, on the batch's device.

        In a training loop `scale` follows; a warning says so once if it does not.

        Args:
            batch: this rank's part of the batch that `plan` was made for, on any device.
            plan: the placement.

        Returns:
            A batch of the same kind with this rank's samples first, padding rows after them where the batch
            knows padding, and at least one row.

        Raises:
            ValueError: `plan` was made for another batch; on this rank alone, while the others wait for it.
        """
        if self.expects_scale:
            self._loss_scale.expect()
        if self.group.num_ranks == 1 or not self.knows_fields:
            return batch
        rank = self.group.rank
        loaded = self.sample_rows.packed(batch)
        self._check_planned(loaded, plan)
        num_rows = int(plan.rows[rank])
        if self.group.checks is not None:
            check_same_plan(self.group, plan)
        if plan.moves:
            mine = self._exchange.move(loaded, plan, self.group)
        else:
            own = plan.num_elements[plan.loaded_by(rank)].sum(0).tolist()
            mine = gather_rows([loaded], np.arange(plan.num_loaded[rank]), own)
        if self.group.checks is not None:
            check_placed_samples(self.group, plan, mine)
        return self._batch_of(batch, mine, num_rows)

    def shuffle(self, batch: Batch) -> Batch:
        """`plan` and `exchange` in one."""
        return self.exchange(batch, self.plan(batch))

    def micro_batches(self, batch: Batch, plan: ShufflePlan) -> list[Batch]:
        """The micro-batches of an exchanged batch, in order; itself alone where the plan has none.

        Each has its samples in the order of the batch, and no padding. Without samples it has one row:
        padding, or the first of the batch. No host-device synchronization.

        Args:
            batch: what `exchange` returned, on any device.
            plan: what it was exchanged by.
        """
        samples = int(plan.num_placed[self.group.rank])
        if not plan.micro_batches or not self.knows_fields or not (samples or knows_padding(batch)):
            # A rank without samples runs the row that it has once for each micro-batch.
            return [batch] * max(plan.num_micro_batches, 1)
        packed = self.sample_rows.packed(batch)
        elements = plan.num_elements[plan.partition[self.group.rank]]
        micro_batches = []
        for rows in self.micro_batch_rows(batch, plan):
            selected = gather_rows([packed], rows, elements[rows].sum(0).tolist())
            micro_batches.append(self._batch_of(batch, selected, max(len(rows), 1)))
        return micro_batches

    def micro_batch_rows(self, batch: Any, plan: ShufflePlan) -> list[np.ndarray]:
        """Returns the rows of the exchanged batch in each micro-batch, int64; the first for one without
        samples, but none where the batch knows padding."""
        first = np.zeros(0 if knows_padding(batch) else 1, dtype=np.int64)
        return [rows if len(rows) else first for rows in plan.micro_batches[self.group.rank]]

    def scale(
        self,
        loss: torch.Tensor,
        plan: ShufflePlan,
        reduction: str | None,
        gradients: str = "mean",
        step_plans: Sequence[ShufflePlan] | None = None,
    ) -> torch.Tensor:
        """The loss to call `backward` on, so that a step's gradient is that of the mean over all loss tokens.

        For a loop of one's own; pipelines do it themselves. One all-reduce on the loss's device where the
        shuffler balances among some of the ranks, else no collective. No host-device synchronization, but
        for a "mean" on a rank without loss tokens.

        Args:
            loss: of the exchanged batch; of any shape for "sum", a scalar for "mean" and "global_mean".
            plan: what the batch was exchanged by.
            reduction: how the model reduced the loss tokens of this rank: "sum", "mean", or "global_mean" if
                it reduced those of all ranks. None returns the loss as it is, for a loop that scales it.
            gradients: what the ranks do with their gradients: "mean" (as DistributedDataParallel and
                TorchRec's sharded tables do) or "sum".
            step_plans: with gradient accumulation the plans of all batches of the optimizer step, among them
                `plan`.

        Raises:
            TypeError: `loss` is no tensor.
            ValueError: an unknown reduction; a vector under "mean"; "global_mean" of several batches, or with
                a rank without samples (raised on the ranks to balance among); `plan` is not among
                `step_plans`; or the shuffler plans windows, which are normalized together.
        """
        if self.window > 1 and reduction is not None:
            raise ValueError(
                f"scale is for steps that are planned one by one, and window={self.window}: use a pipeline, "
                "or reduction=None"
            )
        if reduction == "global_mean":
            check_global_mean(plan.num_placed, self._gather.pads)
        return self._loss_scale.scaled(loss, plan, reduction, gradients, step_plans)

    @property
    def in_micro_batches(self) -> bool:
        """Whether plans divide ranks' samples into micro-batches."""
        return self._placement.max_tokens_per_micro_batch is not None

    def reserve(self) -> None:
        """Lets only the calling thread plan, until `release`: two at a time would mix up their messages."""
        if self._reserved_by is None:
            self._reserved_by = threading.get_ident()

    def release(self) -> None:
        """Lets any thread plan again."""
        self._reserved_by = None

    def plan_ahead(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, ShufflePlan]]:
        """Plans each step in a thread of its own while the one before trains; for a loop of one's own.

        Collective: every rank of the group takes one step after the other, and all end together, or leave the
        loop in the same step. Pipelines do this by themselves.

        Args:
            batches: this rank's, on the host.

        Yields:
            What this rank brings to a step (`padding_batch`, once its own batches have ended), to be copied
            to the device; and the plan to `exchange` it by.

        Raises:
            ValueError: the shuffler plans windows, whose steps are normalised together: pipelines do that.
            Exception: what planning, or loading, raised on any rank.
        """
        if self.window > 1:
            raise ValueError(
                f"plan_ahead plans step by step, and window={self.window}: use a pipeline, or plan_window"
            )

        def steps(loaded: Sequence[Batch], failure: Exception | None) -> list[tuple[Batch, ShufflePlan]]:
            self.reserve()
            window = self.plan_window(loaded, failure)
            return [(self.rows_for_step(loaded, window, 0), plan) for plan in window.steps]

        ahead: PlanAhead[tuple[Batch, ShufflePlan]] = PlanAhead(steps, 1, lambda batch: batch)
        loader = iter(batches)
        try:
            while (planned := ahead.next_step(loader)) is not None:
                yield planned[0]
        finally:
            ahead.drop()
            self.release()

    def unshuffle(self, values: Any, plan: ShufflePlan | WindowPlan) -> Any:
        """Returns what was computed of each sample to the rank and row that it came from. Collective.

        One all-to-all; jagged values take one more, and a host-device synchronisation, for their lengths.

        Args:
            values: a tensor, KeyedJaggedTensor or JaggedTensor, or a batch of such, with a row for each row
                that the exchange gave this rank, or only for the `plan.num_placed[rank]` real ones. Where the
                step ran in micro-batches, a list of these: of each. With a `WindowPlan`, a list of each of
                its steps.
            plan: what they were placed by. Of a window, its `WindowPlan`: the plan of one of its steps leads
                back to what each rank brought to that step, which is no batch that was loaded.

        Returns:
            The same kind of values in the order of the loaded batch, whose padding rows are zero, or empty.
            With a `WindowPlan`, a list: of each batch that this rank loaded.

        Raises:
            ValueError: `values` have another number of rows, or are not of all steps of the window.
        """
        if isinstance(plan, WindowPlan):
            return return_window(values, plan, self.group, self.sample_rows)
        return return_step(values, plan, self.group, self.sample_rows)

    def rows_for_step(self, batches: Sequence[Batch], window: WindowPlan, step: int) -> Batch:
        """What this rank brings to one step of a window: a host batch to copy and to exchange.

        Args:
            batches: what it loaded, on the host, as given to `plan_window`.
            window: the placement.
            step: of the window's.
        """
        if not batches:
            return self.padding_batch()
        if len(window.steps) == 1 or self.group.num_ranks == 1:
            return batches[step]
        rank, plan = self.group.rank, window.steps[step]
        elements = plan.num_elements[plan.loaded_by(rank)].sum(0).tolist()
        rows = window.rows_for_step(rank, step)
        selected = gather_rows([self.sample_rows.packed(batch) for batch in batches], rows, elements)
        brought = self._batch_of(batches[0], selected, max(len(rows), 1))
        return self.sample_rows.pinned_like(brought, batches[0])

    def traffic(self, plan: ShufflePlan) -> Traffic:
        """Bytes that `exchange` sends and receives on this rank."""
        if self.group.num_ranks == 1 or not plan.moves:
            return Traffic(0, 0)
        return self._exchange.traffic(plan, self.group.rank)

    def empty_plan(self) -> ShufflePlan:
        """The plan of a step to which this group brings nothing: each of its ranks has a `padding_batch`."""
        schema = self._gather.schema
        plan = empty_plan(self.group.num_ranks, 0 if schema is None else len(schema.jagged_fields))
        return divided(plan, self._placement)

    @property
    def knows_fields(self) -> bool:
        """Whether any rank of the group has had a batch, so that there is a `padding_batch`."""
        return self._gather.schema is not None

    def padding_batch(self) -> Any:
        """A host batch of one row, for a rank whose loader has ended while others go on.

        A padding row, or a copy of a real one, the same on all ranks, where batches do not know padding.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        return self._gather.padding_batch()

    def _batch_of(self, like: Batch, rows: PackedRows, num_rows: int) -> Batch:
        """A batch of packed rows, padded to `num_rows`, or a copy of a real row if there are none."""
        if rows.num_rows or knows_padding(like):
            return self.sample_rows.unpacked(like, rows, num_rows)
        copied = containers.moved_to(
            self.padding_batch(), self.sample_rows.device_of(like), non_blocking=True
        )
        return self.sample_rows.with_rows(like, self.sample_rows.per_sample_fields(copied), 1, 0)

    def _check_types(self, batches: Sequence[Any]) -> None:
        """Checks that this rank's batches are of one type, and whether the first can be moved."""
        if self._batch_type is None and batches:
            first = batches[0]
            self.sample_rows.check_shared(first)
            if not isinstance(first, BaseBatch):
                containers.check_replaceable(first)
            self._batch_type = type(first)
        for batch in batches:
            if type(batch) is not self._batch_type:
                raise TypeError(
                    f"a batch is a {containers.type_name(batch)}, and the first was a "
                    f"{self._batch_type.__qualname__ if self._batch_type else None}; all must be of one type"
                )

    def _placed(self, gathered: GatheredFacts) -> WindowPlan:
        with named_range("## plan: placement ##"):
            window = placed_window(gathered, self._placement, self.group)
        self._name_sample_above_cap(window)
        return window

    def _name_sample_above_cap(self, window: WindowPlan) -> None:
        """Warns of a sample that takes a micro-batch of its own, if it is longer than all named before."""
        cap = self._placement.max_tokens_per_micro_batch
        if cap is None or self.group.rank != 0 or window.tokens.max(initial=0) <= self._longest_named:
            return
        longest = int(window.tokens.argmax())
        rank, _, row = window.where_loaded(longest)
        self._longest_named = int(window.tokens[longest])
        if self.group.num_ranks == 1 and dist.is_initialized():
            rank = dist.get_rank()
        logger.warning(
            f"row {row} of a batch of rank {rank} has {self._longest_named} tokens, above "
            f"max_tokens_per_micro_batch={cap}: it gets a micro-batch of its own, which takes more memory "
            "than the cap allows; truncate histories or raise the cap. Shorter ones will not be named"
        )

    def _check_planned(self, rows: PackedRows, plan: ShufflePlan) -> None:
        """Compares what the host knows of a batch with the plan; anything else would cut samples in two."""
        rank = self.group.rank
        num_rows, num_real = max(int(plan.batch_sizes[rank]), 1), int(plan.num_loaded[rank])
        planned = plan.num_elements[plan.loaded_by(rank)].sum(0).tolist()
        same_elements = rows.num_elements == planned or num_real < num_rows
        agreed = self._gather.schema
        difference = "" if agreed is None else agreed.difference(rows.schema)
        if difference or rows.num_rows != num_rows or not same_elements:
            raise ValueError(
                f"exchange got a batch of {rows.num_rows} rows with {rows.num_elements} elements in its "
                f"jagged fields; the plan is for {num_rows} rows with {planned} elements"
                f"{'; ' if difference else ''}{difference}: give exchange the batch that plan was made for"
            )


class IdentityShuffler(BatchShuffler):
    """Leaves every sample where it was loaded, and communicates nothing.

    Args:
        process_group, settings: as `BatchShuffler` takes them, so that it can stand in for any other.
        get_workloads: what each row costs, as `BatchShuffler.get_workloads`, for the reported imbalance; by
            default the row's tokens.
        get_loss_tokens: loss tokens of each row, as `BatchShuffler.get_loss_tokens`.
        shared_fields: as `BatchShuffler.shared_fields`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        get_workloads: Callable[[Any], torch.Tensor] | None = None,
        get_loss_tokens: Callable[[Any], torch.Tensor] | None = None,
        shared_fields: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.shared_fields = shared_fields
        super().__init__(process_group, **settings)
        self._get_workloads = get_workloads
        self._get_loss_tokens = get_loss_tokens

    def _make_group(
        self, process_group: dist.ProcessGroup | None, planning_backend: str, verify: bool
    ) -> RankGroup:
        return RankGroup.alone()

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """What the given function says, or the tokens of each row."""
        return self.get_tokens(batch) if self._get_workloads is None else self._get_workloads(batch)

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns what the given function says, else what `BatchShuffler` does."""
        given = self._get_loss_tokens
        return super().get_loss_tokens(batch) if given is None else given(batch)
