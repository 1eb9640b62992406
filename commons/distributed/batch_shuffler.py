"""The shuffler: plans on the host which rank computes which sample, and moves the samples."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ..checks import require_type
from ..perf_model.cost import Cost
from ..sequence_batch import BaseBatch, containers
from ..sequence_batch.jagged_indices import first_values
from ..sequence_batch.packed_rows import PackedRows, gather_rows, select_from
from ..sequence_batch.sample_rows import SampleRows, knows_padding
from .balance_report import WORKLOAD_UNITS
from .cutting import PrefixCost
from .exchange import EXCHANGES, Traffic
from .key_fetch import PlacedPieces
from .learning import Learning
from .loaded_memory import LoadedMemory
from .loss_reduction import LossScale, check_global_mean
from .placement import warm_up
from .plan_ahead import PlanAhead
from .plan_gather import BatchFormat
from .planner import Planner, RowCounts
from .rank_group import RankGroup, job_device
from .sample_facts import Counter
from .shuffle_plan import ShufflePlan
from .shuffler_settings import LEARNED, ShufflerSettings
from .slow_plans import SlowPlans
from .unshuffle import KindsOfValues, return_values
from .verify import check_cut, check_placed_samples, check_same_plan

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class BatchShuffler(ABC):
    """Places the samples of a global batch so that every rank has nearly the same load.

    Subclass it for a model, implement `get_workloads`, and register it with `register_batch_shuffler`.

    A batch is a `BaseBatch`, or any nesting of dataclasses (such as TorchRec's `Batch`), dicts, TensorDicts,
    lists and (named) tuples that hold KeyedJaggedTensors, JaggedTensors, KeyedTensors and tensors with one
    row per sample; `register_batch_type` adds other types. Only a `BaseBatch` can tell padding rows, so only
    it has any: every row of another batch is a sample. A rank without samples of such batches gets a copy of
    a real row, the same on all ranks; `plan.num_placed` tells that it has none.

    Collectives per step: `plan` takes one all-gather of host numbers (a few for the first, and for one with
    more rows than any before). `exchange` takes one all-to-all (or all-gather) on the batch's device, or none
    if no sample moves. Host-device synchronizations: none if the batch given to `plan` is on the host, as it
    should be.

    Args:
        process_group: the ranks to balance among; None means all. Making a shuffler is collective over them.
        cost: of samples, tokens, and each column of `get_workloads`, in nanoseconds, as a calibration of the
            model measured it; or "learned", for costs and speeds of ranks that follow the times of the
            training's steps. Pipelines measure these; a loop of your own calls `record`. None for the sum of
            the columns.
        settings: the fields of `ShufflerSettings`.

    Attributes:
        shared_fields: paths of what all samples of a batch share, as in "context.temperature" or "[2]"; a
            subclass sets it. A field of a `BaseBatch` is marked in its metadata instead.
        unit: of the workloads, for logs, as in "FLOPs"; a subclass sets it.
        cost, settings: as given.
        group: the ranks to balance among.
        sample_rows: reads the rows of batches.
        planner: plans among the group.
        expects_scale: whether a training loop has to call `scale`. Pipelines scale the loss themselves, and
            set it to False.

    A shuffler serves one pipeline, or one loop over `plan_ahead`, at a time: a thread plans with it from the
    first step until the loaders have ended or the pipeline is reset. Meanwhile `plan` is an error.

    Raises:
        TypeError: a setting has the wrong type.
        KeyError: unknown partitioner, exchange, or cost.
        ValueError: this rank is not in `process_group`; or a setting is out of range, or has no effect.
    """

    shared_fields: Sequence[str] = ()
    unit: str = WORKLOAD_UNITS

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        cost: Cost | str | None = None,
        **settings: Any,
    ) -> None:
        self.settings = ShufflerSettings(**settings)
        require_type(f"{type(self).__name__}.cost", cost, Cost | str | None)
        if isinstance(cost, str) and cost != LEARNED:
            raise KeyError(f"unknown cost {cost!r}; expected a Cost, {LEARNED!r}, or None for workloads")
        if cost != LEARNED and self.settings.speed_limit != ShufflerSettings.speed_limit:
            raise ValueError(
                f'speed_limit={self.settings.speed_limit} has no effect without cost="{LEARNED}": leave it '
                "out"
            )
        self.cost = cost
        self._exchange = EXCHANGES[self.settings.exchange]
        self.group = self._make_group(process_group)
        self.sample_rows = SampleRows(self.shared_fields)
        here = np.arange(self.group.num_ranks), self.group.ranks_per_node
        cuts_by = self._checked_prefix_cost() if self.settings.split else None
        self.planner = Planner(
            self.group,
            [here],
            self.settings,
            self.sample_rows,
            self._counts_of_rows,
            cuts_by,
            self._groups_of_rows(),
            cost,
        )
        self._in_use = self.planner
        self._agreed: BatchFormat | None = None
        self._checks = self.group.channel()
        self._returned = KindsOfValues(self._checks, self.settings.verify)
        self._loss_scale = LossScale(self.group)
        self.expects_scale = True
        self._unread: tuple[ShufflePlan, PlacedPieces] | None = None  # of the last exchange
        self._reserved_by: int | None = None
        if self.group.num_ranks > 1:
            self.group.exchange_group(job_device())  # connected here, so that no step waits for it
            if self.settings.split:
                self.group.fetch_group(job_device())
        if self.group.num_ranks > 1 or self.settings.max_tokens_per_micro_batch is not None:
            warm_up(self.settings, self.has_groups and self.settings.takes("groups"))

    def _make_group(self, process_group: dist.ProcessGroup | None) -> RankGroup:
        return RankGroup.of(process_group)

    @abstractmethod
    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns the cost of each row, non-negative integers; `batch` is on the host.

        `[batch_size]`, or `[batch_size, columns]` for parts of a row's work that may differ in speed, such as
        matrix products and attention. Costs that are fitted to times weigh each column by itself; otherwise
        they add up. The unit is up to the shuffler, but the same everywhere. Values of padding rows are
        ignored. Lengths in `batch` are int64, so that their squares do not wrap. Pipelines call this in a
        thread of their own, alongside the training.
        """

    def get_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the tokens of each row, `[batch_size]` integers; `batch` is on the host.

        Token caps, and costs that are fitted to times, count them. Defaults to `BaseBatch.num_tokens()`, or
        to the number of jagged elements of any other batch.
        """
        return self.sample_rows.num_tokens(batch)

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the loss tokens of each row, `[batch_size]` integers; `batch` is on the host.

        The loss is a mean over them. Defaults to `BaseBatch.num_loss_tokens()`, or to one per row
        of any other batch.
        """
        return self.sample_rows.num_loss_tokens(batch)

    def get_groups(self, batch: Any) -> torch.Tensor:
        """Returns the group of each row, an int64 or int32 tensor `[batch_size]`; `batch` is on the host.

        Samples with the same number belong together, on one rank if balance and limits allow it. A sample
        with a negative number belongs to none. Override it if the groups are not the values of a
        `BaseBatch`'s feature; `group_feature` names those.
        """
        name = self.settings.group_feature
        if not isinstance(batch, BaseBatch):
            raise TypeError(
                f"group_feature={name!r} is read from a BaseBatch, and this is a "
                f"{containers.type_name(batch)}: override get_groups"
            )
        names = batch.features.keys()
        if name not in names:
            raise ValueError(
                f"group_feature={name!r} is not among the batch's features: {sorted(names)}. For groups from "
                "elsewhere, override get_groups"
            )
        feature = batch.features[name]
        groups = first_values(feature.values(), feature.lengths())
        if groups.is_floating_point():
            raise ValueError(f"group_feature={name!r} has {groups.dtype} values, expected integers")
        # Hashes may be negative; a row without a value belongs to no group.
        return torch.where(feature.lengths() > 0, groups.long() & torch.iinfo(torch.int64).max, -1)

    @property
    def has_groups(self) -> bool:
        """Whether samples have groups: `get_groups` is overridden, or `group_feature` is set."""
        return self._overrides_groups or self.settings.group_feature is not None

    @property
    def _overrides_groups(self) -> bool:
        return type(self).get_groups is not BatchShuffler.get_groups

    def prefix_cost(self, tokens: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the cost of the first tokens of samples, given the whole samples; for `split=True`.

        It is that of these tokens' queries: no column decreases from token to token, and all equal
        `get_workloads` at a sample's end. Every rank calls it, and must get the same integers: compute in
        int64, because the last bits of floats may differ between processors.

        Args:
            tokens: int64 `[samples]`, from 0 to the sample's tokens.
            counts: what planning knows of the samples by name, int64 `[samples]` each: "tokens",
                "loss_tokens", the batch's `row_counts`, "head_tokens" before a sample's first item, and
                "kept_tokens" of its last items that are not cut apart.

        Returns:
            int64 `[samples]`, or `[samples, columns]` with the columns of `get_workloads`.
        """
        raise NotImplementedError

    def _checked_prefix_cost(self) -> PrefixCost:
        if type(self).prefix_cost is BatchShuffler.prefix_cost:
            raise ValueError(
                f"split=True: {type(self).__name__} has no prefix_cost, which tells where to cut a sample"
            )
        return self.prefix_cost

    def _counts_of_rows(self, batch: Any) -> RowCounts:
        """Returns the functions for workloads, tokens and loss tokens, by the names in messages."""

        def named(method: str, of_batch: str) -> str:
            mine = getattr(type(self), method) is not getattr(BatchShuffler, method)
            return f"{type(self).__name__}.{method}" if mine else f"{type(batch).__name__}.{of_batch}"

        return {
            f"{type(self).__name__}.get_workloads": self.get_workloads,
            named("get_tokens", "num_tokens"): self.get_tokens,
            named("get_loss_tokens", "num_loss_tokens"): self.get_loss_tokens,
        }

    def _groups_of_rows(self) -> tuple[str, Counter] | None:
        """Returns the name in messages and the function of the rows' groups; None if samples have none."""
        if not self.has_groups:
            return None
        name = f"{type(self).__name__}.get_groups"
        if self._overrides_groups and self.settings.group_feature is not None:
            raise ValueError(
                f"group_feature={self.settings.group_feature!r} has no effect, because {name} returns the "
                "groups; leave it out"
            )
        if not self.settings.takes("groups"):
            if self.group.rank == 0:
                logger.warning(
                    f"plans with partitioner={self.settings.partitioner!r} place samples one by one: {name} "
                    "has no effect on them"
                )
            return None
        return name, self.get_groups

    def planner_of_all_ranks(self) -> Planner:
        """Returns the planner of pipelines, whose times this shuffler then learns from.

        The first call is collective over all ranks of the job.
        """
        self._in_use = self._in_use.of_all_ranks()
        return self._in_use

    @property
    def learning(self) -> Learning | None:
        """The learning of costs and speeds that is in use: a pipeline's, if one was made; None without
        `cost="learned"`."""
        return self._in_use.learning

    def plan(self, batch: Any) -> ShufflePlan:
        """Places one global batch. Collective over the group, host only.

        Args:
            batch: this rank's batch, on the host (one on a device is copied to it); None if its loader has
                ended. A rank without a batch takes part in `exchange` with `padding_batch()`.

        Raises:
            ValueError: workloads of the wrong length, negative, NaN or infinite; batches of different ranks
                or steps that differ in their fields; or no placement under `max_rows` and `max_tokens`.
                Raised on every rank, as is any error of `get_workloads`. An error of one rank alone after the
                gather, such as a lack of memory, is raised there only, unless ranks `verify`.
        """
        return self.plan_with(self.planner, batch)

    def plan_with(
        self,
        planner: Planner,
        batch: Any,
        failure: Exception | None = None,
        post: Callable[[], int] | None = None,
    ) -> ShufflePlan:
        """`plan` over the ranks of a planner, with its further arguments."""
        if self._reserved_by not in (None, threading.get_ident()):
            raise RuntimeError(
                f"this {type(self).__name__} plans for a pipeline, or a loop over plan_ahead, in a thread "
                "of its own: create another shuffler, or exhaust the loaders or reset the pipeline first"
            )
        plan = planner.plan(batch, failure, post)
        self._agreed = planner.agreed or self._agreed
        return plan

    def exchange(self, batch: Batch, plan: ShufflePlan) -> Batch:
        """Moves the samples as planned. Collective over the group, on the batch's device.

        In a training loop call `scale` next; a warning says so once if it is forgotten.

        Args:
            batch: this rank's part of the batch that `plan` was made for, on any device.
            plan: the placement.

        Returns:
            A batch of the same kind with this rank's samples first, then padding rows where the batch knows
            padding; at least one row.

        Raises:
            ValueError: `plan` was made for another batch; on this rank alone, while the others wait for it.
        """
        if self.expects_scale:
            self._loss_scale.expect()
        if self._agreed is None:
            return batch
        rank = self.group.rank
        if self.group.num_ranks == 1:
            return self._with_row_counts(batch, plan.row_counts)
        batch = self._in_pieces(batch, plan)
        loaded = self.sample_rows.packed(batch)
        self._check_planned(loaded, plan)
        if self.settings.verify:
            check_same_plan(self._checks, plan)
        if plan.moves:
            mine = self._exchange.move(loaded, plan, self.group)
        else:
            own = plan.loaded_by(rank)
            mine = gather_rows([loaded], np.arange(len(own)), plan.num_elements[own].sum(0).tolist())
        num_rows = int(plan.rows[rank])
        if self.settings.verify:  # more rows than planned are its error on all ranks, not `unpack`'s on this
            num_rows = max(num_rows, mine.num_rows)
        placed = self._batch_of(batch, mine, num_rows)
        if self.settings.verify:
            num_real = min(self.sample_rows.batch_rows(placed)[1], mine.num_rows)  # a copied row is no sample
            rows = select_from([self.sample_rows.packed(placed)], np.arange(num_real))
            check_placed_samples(self._checks, plan, loaded, rows)
        placed = self._with_row_counts(placed, plan.row_counts[plan.computed_by(rank)])
        self._unread = None
        if plan.pieces is None or not isinstance(placed, BaseBatch):
            return placed
        pieces = PlacedPieces(plan, self.group, self._agreed.columns.count_names)
        self._unread = plan, pieces
        return placed.with_pieces(pieces)

    def shuffle(self, batch: Batch) -> Batch:
        """`plan` and `exchange` in one."""
        return self.exchange(batch, self.plan(batch))

    def micro_batches(self, batch: Batch, plan: ShufflePlan) -> list[Batch]:
        """Returns the micro-batches of an exchanged batch, in order; the batch alone if the plan has none.

        Each has its samples in the order of the batch, and no padding. One without samples has one row:
        padding, or the first of the batch. No host-device synchronization.

        Args:
            batch: as `exchange` returned it, on any device.
            plan: the plan of that exchange.
        """
        rank = self.group.rank
        divides = plan.in_micro_batches and self._agreed is not None
        if not divides or not (plan.num_placed[rank] or knows_padding(batch)):
            # A rank without samples runs its only row once for each micro-batch.
            return [batch] * max(plan.num_micro_batches, 1)
        packed = self.sample_rows.packed(batch)
        own = plan.computed_by(rank)
        elements, row_counts = plan.num_elements[own], plan.row_counts[own]
        micro_batches = []
        for rows in self.micro_batch_rows(batch, plan):
            selected = gather_rows([packed], rows, elements[rows].sum(0).tolist())
            micro_batch = self._batch_of(batch, selected, max(len(rows), 1))
            micro_batches.append(self._with_row_counts(micro_batch, row_counts[rows]))
        return micro_batches

    def micro_batch_rows(self, batch: Any, plan: ShufflePlan) -> list[np.ndarray]:
        """Returns the rows of the exchanged batch in each micro-batch, int64; the first for one without
        samples, but none where the batch knows padding."""
        first = np.zeros(0 if knows_padding(batch) else 1, dtype=np.int64)
        return [rows if len(rows) else first for rows in plan.micro_batches_on(self.group.rank)]

    def scale(
        self,
        loss: torch.Tensor,
        plan: ShufflePlan,
        reduction: str | None,
        gradients: str = "mean",
        step_plans: Sequence[ShufflePlan] | None = None,
    ) -> torch.Tensor:
        """Returns the loss to call `backward` on, for the gradient of the mean over all loss tokens.

        For a loop of your own; pipelines do it themselves. One all-reduce on the loss's device if the
        shuffler balances among some of the ranks, else no collective. No host-device synchronization, except
        for a "mean" on a rank without loss tokens.

        Args:
            loss: of the exchanged batch; of any shape for "sum", a scalar for "mean" and "global_mean".
            plan: the plan of that exchange.
            reduction: how the model reduced the losses: "sum" or "mean" over this rank's loss tokens, or
                "global_mean" over those of all ranks. None returns the loss unscaled, for a loop that scales
                it.
            gradients: how ranks reduce their gradients: "mean" (as DistributedDataParallel and TorchRec's
                sharded tables do) or "sum".
            step_plans: with gradient accumulation, the plans of all batches of the optimizer step, among them
                `plan`.

        Raises:
            TypeError: `loss` is no tensor.
            ValueError: an unknown reduction; a vector under "mean"; "global_mean" of several batches, or with
                a rank without samples (raised on the ranks that balance together); or `plan` is not among
                `step_plans`.
        """
        if self._unread is not None and self._unread[0] is plan:
            self._unread[1].check_read()
        if reduction == "global_mean":
            check_global_mean(plan.num_placed, self._agreed is None or self._agreed.pads)
        return self._loss_scale.scaled(loss, plan, reduction, gradients, step_plans)

    def record(self, plan: ShufflePlan, seconds: float) -> None:
        """Takes the time that this rank computed a step, for `cost="learned"`; in a loop of your own.

        The planning gather of a later step, the same on all ranks, carries it: no collective, and no
        host-device synchronization. A step that some rank does not record does not count. Record no step
        whose time says nothing of its samples, for example the first, which compiles.

        Args:
            plan: of the step, among the last that were planned.
            seconds: of forward and backward, or of the forward alone, without waits for other ranks; on CUDA,
                by events.

        Raises:
            ValueError: the plan is not among the last; the step was recorded before; the time is not a finite
                number above 0; or costs are not learned.
        """
        if self.learning is None:
            raise ValueError(
                f'record is for cost="{LEARNED}", and this {type(self).__name__} has another cost'
            )
        if not 0 < seconds < float("inf"):
            raise ValueError(f"record got {seconds} seconds; expected a finite number above 0")
        self.learning.record(plan, float(seconds))

    def learned_cost(self) -> Cost | None:
        """Returns what `cost="learned"` has learned, to save and to balance by; None before it has."""
        return None if self.learning is None else self.learning.learned_cost()

    def learning_state(self, last: ShufflePlan) -> dict[str, bytes]:
        """Returns what `cost="learned"` has learned, for this rank's part of a checkpoint; empty otherwise.

        For a loop of your own; pipelines have a method of this name.

        Args:
            last: plan of the last step before the checkpoint.
        """
        learning = self.learning
        return {} if learning is None else learning.saved(learning.number_of(last) + 1)

    def load_learning_state(self, state: dict[str, bytes]) -> None:
        """Restores `learning_state`, before the first plan: further plans are those of the run that saved it.

        On other hosts, or another number of ranks, speeds are learned anew. For a pipeline, call it once that
        was made.

        Args:
            state: what this rank saved, or without "times" what another rank saved.

        Raises:
            ValueError: `state` has no "learned".
            RuntimeError: plans were made before.
        """
        if self.learning is not None and state:
            self.learning.restore(state)

    def reserve(self) -> None:
        """Lets only the calling thread plan, until `release`: concurrent plans would interleave their
        collectives."""
        if self._reserved_by is None:
            self._reserved_by = threading.get_ident()

    def release(self) -> None:
        """Lets any thread plan again."""
        self._reserved_by = None

    def plan_ahead(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, ShufflePlan]]:
        """Plans each step in a thread of its own while the one before trains; for a loop of your own.

        Collective: every rank of the group takes one step after another, and all end together, or leave the
        loop in the same step. Pipelines do this by themselves.

        Args:
            batches: this rank's, on the host. The loop copies one to the device after the next was loaded,
                so each needs memory of its own. That it did not change is checked.

        Yields:
            This rank's batch of a step (`padding_batch` once its own have ended), to be copied to the device;
            and the plan to `exchange` it by.

        Raises:
            Exception: the error that planning, or loading, raised on any rank.
        """

        def planned_step(loaded: Batch | None, failure: Exception | None) -> tuple[Batch, ShufflePlan] | None:
            self.reserve()
            plan = self.plan_with(self.planner, loaded, failure)
            return (self.batch_for_step(loaded, plan), plan) if plan.has_batch else None

        memory = LoadedMemory(self.sample_rows)

        def prepare(batch: Batch) -> Batch:
            memory.loaded(batch)
            return batch

        ahead: PlanAhead[tuple[Batch, ShufflePlan]] = PlanAhead(planned_step, prepare)
        slow_plans = SlowPlans(self.planner, self.settings, type(self).__name__)
        loader = iter(batches)
        try:
            while (planned := ahead.next_step(loader)) is not None:
                memory.handed_out()
                slow_plans.after(ahead.busy_seconds)
                yield planned[0]
        finally:
            ahead.drop()
            self.release()

    def unshuffle(self, values: Any, plan: ShufflePlan) -> Any:
        """Returns per-sample results to the rank and row that each sample was loaded on. Collective.

        One all-to-all; jagged values take one more, and a host-device synchronization, for their lengths.
        The first call for each kind of values (their names, keys, dtypes and trailing shapes) takes a gather
        of host numbers more, in which ranks agree on it. The order of names does not matter.

        A later call in which ranks return different kinds is not compared unless they `verify`: a rank whose
        kind is new to it waits for the others, and two known kinds are taken for each other.

        Args:
            values: a tensor, KeyedJaggedTensor or JaggedTensor, or a batch of such, with a row for each row
                that the exchange gave this rank, or only for its `plan.num_placed[rank]` samples. Where the
                step ran in micro-batches, a list with the values of each.
            plan: the plan of the exchange.

        Returns:
            Values of the same kind in the order of the loaded batch, zero or empty in its padding rows. The
            jagged values of a sample's pieces are joined, a dense value is that of the last piece.

        Raises:
            ValueError: `values` are of different kinds on the ranks, at the first call for one of them;
                raised on every rank. Or they have another number of rows; raised on this rank alone, while
                the others wait for it.
        """
        return return_values(values, plan, self.group, self.sample_rows, self._returned)

    def batch_for_step(self, batch: Any, plan: ShufflePlan) -> Any:
        """Returns this rank's host batch of a planned step, with its samples cut, to be copied and exchanged.

        Args:
            batch: as loaded, on the host, and planned; None if the rank's loader has ended.
            plan: the placement within the group.
        """
        return self.padding_batch() if batch is None else self._in_pieces(batch, plan)

    def traffic(self, plan: ShufflePlan) -> Traffic:
        """Returns the bytes that `exchange` sends and receives on this rank for a plan."""
        if self.group.num_ranks == 1 or not plan.moves:
            return Traffic(0, 0)
        return self._exchange.traffic(plan, self.group.rank)

    def padding_batch(self) -> Any:
        """Returns a host batch of one row, for a rank whose loader has ended while others go on.

        It is padding, or a copy of a real row, the same on all ranks, where batches do not know padding.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        if self._agreed is None:
            raise RuntimeError("no rank of the group has had a batch yet, so that its fields are unknown")
        return self._agreed.padding_batch()

    def _in_pieces(self, batch: Any, plan: ShufflePlan) -> Any:
        """Returns the batch with its samples cut as planned; itself if it is, or if none of them is cut.

        A batch on the device is copied to the host for it, which waits for the device.
        """
        own = plan.loaded_by(self.group.rank)
        # Padding rows are not counted: a batch with a row for each piece has more samples than were loaded.
        if plan.pieces is None or self.sample_rows.batch_rows(batch)[1] == len(own):
            return batch
        on_host = self.sample_rows.to_host(batch)
        row_of = np.cumsum(plan.starts_sample[own]) - 1
        cut = on_host.cut_by(plan.pieces[own], row_of)
        self._check_counts_of_pieces(cut, plan, own)
        if self.settings.verify:
            check_cut(on_host, cut, plan.pieces[own], row_of)
        if on_host is not batch:
            return cut.to(self.sample_rows.device_of(batch))
        return cut.pin_memory() if self.sample_rows.is_pinned(batch) else cut

    def _check_counts_of_pieces(self, cut: BaseBatch, plan: ShufflePlan, own: np.ndarray) -> None:
        """Compares a cut batch's own counts with those that the rules gave planning."""
        rules = None if self._agreed is None else self._agreed.cut_rules
        if rules is None or rules.has_halo:  # a batch counts its halo, too
            return
        shown = self.sample_rows.with_long_lengths(cut)
        for name, planned in (("get_tokens", plan.tokens), ("get_loss_tokens", plan.loss_tokens)):
            counted = getattr(self, name)(shown)[: len(own)].cpu().numpy()
            for row in np.flatnonzero(counted != planned[own])[:1]:
                raise ValueError(
                    f"{name} counts {counted[row]} in a piece, and cut_rules {planned[own][row]}; expected "
                    f"the same: check the rules of the fields that {name} counts"
                )

    def _batch_of(self, like: Batch, rows: PackedRows, num_rows: int) -> Batch:
        """Makes a batch of packed rows, padded to `num_rows`; a copy of a real row if there are none."""
        if rows.num_rows or knows_padding(like):
            return self.sample_rows.unpacked(like, rows, num_rows)
        copied = containers.moved_to(
            self.padding_batch(), self.sample_rows.device_of(like), non_blocking=True
        )
        return self.sample_rows.with_rows(like, self.sample_rows.per_sample_fields(copied), 1, 0)

    def _with_row_counts(self, batch: Batch, row_counts: np.ndarray) -> Batch:
        """Returns the batch with the row counts that the plan has of its real rows, int64
        `[samples, names]`."""
        names = () if self._agreed is None else self._agreed.columns.count_names
        if not names or not isinstance(batch, BaseBatch):
            return batch
        padded = np.zeros((len(names), batch.batch_size), dtype=np.int64)
        padded[:, : len(row_counts)] = row_counts.T
        return batch.with_row_counts(dict(zip(names, padded, strict=True)))

    def _check_planned(self, rows: PackedRows, plan: ShufflePlan) -> None:
        """Compares the host's knowledge of a batch with the plan; any other batch would be cut mid-sample."""
        own = plan.loaded_by(self.group.rank)
        num_rows = max(int(plan.batch_sizes[self.group.rank]), 1)
        planned = plan.num_elements[own].sum(0).tolist()
        same_elements = rows.num_elements == planned or len(own) < num_rows
        difference = "" if self._agreed is None else self._agreed.schema.difference(rows.schema)
        if difference or rows.num_rows != num_rows or not same_elements:
            raise ValueError(
                f"exchange got a batch of {rows.num_rows} rows with {rows.num_elements} elements in its "
                f"jagged fields; the plan is for {num_rows} rows with {planned} elements"
                f"{'; ' if difference else ''}{difference}: give exchange the batch that plan was made for"
            )


class IdentityShuffler(BatchShuffler):
    """Leaves every sample where it was loaded.

    By itself it communicates nothing. In a pipeline all ranks gather their samples' numbers, as with any
    shuffler: for the loss tokens of all ranks, and for reports.

    Args:
        process_group, settings: as `BatchShuffler` takes them, so that it can stand in for any other.
        get_workloads: the cost of each row, as `BatchShuffler.get_workloads`, for the reported imbalance; by
            default the row's tokens.
        unit: of these, as `BatchShuffler.unit`.
        get_tokens, get_loss_tokens: tokens and loss tokens of each row, as `BatchShuffler` has them.
        shared_fields: as `BatchShuffler.shared_fields`; None for those of the class.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        get_workloads: Callable[[Any], torch.Tensor] | None = None,
        unit: str = WORKLOAD_UNITS,
        get_tokens: Callable[[Any], torch.Tensor] | None = None,
        get_loss_tokens: Callable[[Any], torch.Tensor] | None = None,
        shared_fields: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        if shared_fields is not None:
            self.shared_fields = shared_fields
        if settings.get("cost") == LEARNED:
            raise ValueError(
                f'cost="{LEARNED}" has no effect on an IdentityShuffler, which moves no sample: leave it out'
            )
        super().__init__(process_group, **settings)
        self._get_workloads = get_workloads
        self.unit = "tokens" if get_workloads is None else unit
        self._get_tokens, self._get_loss_tokens = get_tokens, get_loss_tokens

    def _make_group(self, process_group: dist.ProcessGroup | None) -> RankGroup:
        return RankGroup.alone()

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Returns the given function's costs, or the tokens of each row."""
        return self.get_tokens(batch) if self._get_workloads is None else self._get_workloads(batch)

    def get_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the given function's tokens, or those that `BatchShuffler` counts."""
        given = self._get_tokens
        return super().get_tokens(batch) if given is None else given(batch)

    def get_loss_tokens(self, batch: Any) -> torch.Tensor:
        """Returns the given function's loss tokens, or those that `BatchShuffler` counts."""
        given = self._get_loss_tokens
        return super().get_loss_tokens(batch) if given is None else given(batch)
