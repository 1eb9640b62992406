"""The shuffler: plans on the host who computes which sample, and moves the samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed import exchange as exchanges
from commons.distributed.placement import LoadedSamples, Placement
from commons.distributed.plan_gather import PlanGather, SampleFacts
from commons.distributed.rank_group import RankGroup
from commons.distributed.shuffle_plan import ShufflePlan
from commons.sequence_batch import BaseBatch
from commons.sequence_batch.packed_rows import PackedRows, check_jagged_fields, key_lengths, row_elements
from commons.sequence_batch.row_schema import RowSchema

Batch = TypeVar("Batch", bound=BaseBatch)

EXCHANGES: dict[str, Callable[[PackedRows, ShufflePlan, RankGroup], PackedRows]] = {
    "all_gather": exchanges.all_gather
}


class BatchShuffler(ABC):
    """Places the samples of a global batch so that every rank has nearly the same load.

    A model's shuffler subclasses this, gives `get_workloads`, and is registered with
    `register_batch_shuffler`.

    Collectives of a step: `plan` takes one all-gather of host tensors, `exchange` one of the batch's device.
    Host-device synchronisations: none if the batch given to `plan` is on the host, as it should be.

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
        exchange: name of a way to move samples, one of `EXCHANGES`.

    Raises:
        KeyError: an unknown partitioner or exchange.
        ValueError: this rank is not in `process_group`; or a setting is out of range, or has no effect.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        partitioner: str = "refined",
        tolerance: float | None = None,
        equal_rows: bool = True,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        exchange: str = "all_gather",
    ) -> None:
        self._placement = Placement(partitioner, tolerance, equal_rows, max_rows, max_tokens)
        if exchange not in EXCHANGES:
            raise KeyError(f"unknown exchange {exchange!r}; there are {sorted(EXCHANGES)}")
        self._exchange = EXCHANGES[exchange]
        self.equal_rows = equal_rows
        self.process_group = process_group
        self.group = self._make_group(process_group)
        self._gather = PlanGather(self.group)
        if self.group.num_ranks > 1:
            self._placement.warm_up()

    def _make_group(self, process_group: dist.ProcessGroup | None) -> RankGroup:
        return RankGroup.of(process_group)

    @abstractmethod
    def get_workloads(self, batch: Any) -> torch.Tensor:
        """What each row costs: a batch on the host to `[batch_size]` integers of at least 0.

        The unit is up to the shuffler, but the same everywhere. Values of padding rows are ignored.
        """

    def plan(self, batch: BaseBatch | None) -> ShufflePlan:
        """Works out the placement of one global batch. Collective over the group, host only.

        Args:
            batch: this rank's batch, on the host (one on a device is copied to it); None if its loader has
                ended. A rank without a batch takes part in `exchange` with `padding_batch()`.

        Raises:
            ValueError: workloads of the wrong length, negative, NaN or infinite; or batches of different
                ranks or steps differ in their fields; or they cannot be placed under `max_rows` and
                `max_tokens`. Raised on every rank, as is any error of `get_workloads`.
        """
        facts: SampleFacts | None = None
        failure: Exception | None = None
        if batch is not None:
            try:
                facts = self._facts(batch)
            except StopIteration as error:  # would look like the end of the data further up
                failure = RuntimeError(f"{type(self).__name__}.get_workloads raised {error!r}")
            except Exception as error:  # whatever a user's get_workloads raises must reach all ranks
                failure = error
        gathered = self._gather.gather(facts, failure)
        if gathered is None:
            return _empty_plan(self.group.num_ranks)
        workloads, tokens, loss_tokens = gathered.per_sample[:, :3].T
        num_elements = gathered.per_sample[:, 3:]
        sample_bytes = gathered.schema.row_bytes(num_elements)
        loaded = LoadedSamples(workloads, tokens, sample_bytes, gathered.batch_sizes, gathered.num_loaded)
        partition = self._placement.place(loaded, self.group.ranks_per_node)
        return ShufflePlan(
            batch_sizes=gathered.batch_sizes,
            num_loaded=gathered.num_loaded,
            workloads=workloads,
            tokens=tokens,
            loss_tokens=loss_tokens,
            num_elements=num_elements,
            sample_bytes=sample_bytes,
            partition=tuple(partition),
            rows=self._placement.rows(gathered.batch_sizes, partition),
        )

    def exchange(self, batch: Batch, plan: ShufflePlan) -> Batch:
        """Moves the samples as planned. Collective over the group, on the batch's device.

        Args:
            batch: this rank's part of the batch that `plan` was made for, on any device.
            plan: the placement.

        Returns:
            A batch with this rank's samples first, padding rows behind them, at least one row.

        Raises:
            ValueError: `plan` was made for another batch.
        """
        if self.group.num_ranks == 1:
            return batch
        fields = batch.per_sample_fields()
        rows = PackedRows.pack(fields, RowSchema.of(fields), batch.batch_size)
        self._check_planned(rows, plan)
        mine = self._exchange(rows, plan, self.group)
        num_rows = int(plan.rows[self.group.rank])
        return batch.with_fields(mine.pad_to(num_rows).unpack(), num_rows, mine.num_rows)

    def shuffle(self, batch: Batch) -> Batch:
        """`plan` and `exchange` in one."""
        return self.exchange(batch, self.plan(batch))

    def padding_batch(self) -> BaseBatch:
        """A host batch of one padding row, for a rank whose loader has ended while others go on.

        Raises:
            RuntimeError: no rank of the group has had a batch yet.
        """
        return self._gather.padding_batch()

    def _facts(self, batch: BaseBatch) -> SampleFacts:
        if batch.features.device().type != "cpu":
            batch = batch.to(torch.device("cpu"))
        fields = batch.per_sample_fields()
        check_jagged_fields(fields)
        schema = RowSchema.of(fields)
        workloads = self._checked_workloads(batch)
        elements = row_elements(key_lengths(fields, schema, batch.batch_size), schema)
        columns = [workloads, batch.num_tokens(), batch.num_loss_tokens(), *elements.unbind(1)]
        per_sample = torch.stack(columns, 1)[: batch.num_samples]
        padding_batch = batch.index_select([]) if self._gather.schema is None else None
        return SampleFacts(schema, batch.batch_size, per_sample.numpy(), padding_batch)

    def _check_planned(self, rows: PackedRows, plan: ShufflePlan) -> None:
        """Compares what the host knows of a batch with the plan; anything else would cut samples in two."""
        rank = self.group.rank
        num_rows, num_real = max(int(plan.batch_sizes[rank]), 1), int(plan.num_loaded[rank])
        planned = plan.num_elements[plan.home_start[rank] :][:num_real].sum(0).tolist()
        same_elements = rows.num_elements == planned or num_real < num_rows
        if rows.schema != self._gather.schema or rows.num_rows != num_rows or not same_elements:
            raise ValueError(
                f"exchange got a batch of {rows.num_rows} rows with {rows.num_elements} elements in its "
                f"jagged fields; the plan is for {num_rows} rows with {planned} elements (or fields differ): "
                "give exchange the batch that plan was made for"
            )

    def _checked_workloads(self, batch: BaseBatch) -> torch.Tensor:
        """int64 `[batch_size]` from `get_workloads`, 0 for padding rows."""
        returned = self.get_workloads(batch)
        try:
            workloads = torch.as_tensor(returned).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{type(self).__name__}.get_workloads returned {type(returned).__name__}, expected integers"
            ) from error
        if workloads.is_complex() or workloads.dtype == torch.uint64:
            raise ValueError(
                f"{type(self).__name__}.get_workloads returned {workloads.dtype}, expected integers"
            )
        if workloads.shape != (batch.batch_size,):
            raise ValueError(
                f"{type(self).__name__}.get_workloads returned shape {tuple(workloads.shape)}, "
                f"expected one workload per row: ({batch.batch_size},)"
            )
        real = workloads[: batch.num_samples]
        whole = torch.ones_like(real, dtype=torch.bool)
        if real.is_floating_point():  # NaN equals nothing; infinity is too large
            whole = (real == real.round()) & (real < 2.0**63)
        bad = torch.nonzero(~(whole & (real >= 0)))
        if len(bad):
            row = int(bad[0])
            raise ValueError(
                f"{type(self).__name__}.get_workloads returned {real[row].item()} for row {row}, "
                "expected an integer of at least 0, below 2**63; scale fractions up and round them"
            )
        checked = torch.zeros(batch.batch_size, dtype=torch.int64)
        checked[: batch.num_samples] = real
        return checked


class IdentityShuffler(BatchShuffler):
    """Leaves every sample where it was loaded, and communicates nothing.

    Args:
        process_group, settings: as `BatchShuffler` takes them, so that it can stand in for any other.
        get_workloads: what each row costs, as `BatchShuffler.get_workloads`, for the reported imbalance; by
            default the row's tokens.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        get_workloads: Callable[[Any], torch.Tensor] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(process_group, **settings)
        self._get_workloads = get_workloads

    def _make_group(self, process_group: dist.ProcessGroup | None) -> RankGroup:
        return RankGroup.alone()

    def get_workloads(self, batch: BaseBatch) -> torch.Tensor:
        """What the given function says, or the tokens of each row."""
        return batch.num_tokens() if self._get_workloads is None else self._get_workloads(batch)


def _empty_plan(num_ranks: int) -> ShufflePlan:
    """The plan of a step for which no rank has a batch."""
    nothing = np.zeros(0, dtype=np.int64)
    return ShufflePlan(
        batch_sizes=np.zeros(num_ranks, dtype=np.int64),
        num_loaded=np.zeros(num_ranks, dtype=np.int64),
        workloads=nothing,
        tokens=nothing,
        loss_tokens=nothing,
        num_elements=np.zeros((0, 0), dtype=np.int64),
        sample_bytes=nothing,
        partition=(nothing,) * num_ranks,
        rows=np.ones(num_ranks, dtype=np.int64),
    )
