"""Shufflers of drawn batches, and cases that they run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from hypothesis import strategies as st

from commons.distributed import BatchShuffler
from commons.distributed.shuffle_plan import ShufflePlan
from commons.distributed.shuffler_settings import PARTITIONERS, ShufflerSettings
from tests.commons.distributed.container_batches import KINDS, ContainerShuffler, check_shared, make_batch
from tests.commons.distributed.loaded_batches import BOTH, agreed
from tests.drawn_batches import draw_batch

LIMITED = [name for name in sorted(PARTITIONERS) if ShufflerSettings(name).takes("max_tokens")]


class FieldShuffler(BatchShuffler):
    """The workload is a field of the batch."""

    def get_workloads(self, batch):
        return batch.workload


class DictShuffler(FieldShuffler):
    """The workload is an entry of a dict."""

    def get_workloads(self, batch):
        return batch["workload"]


@dataclass(frozen=True)
class Case:
    """Settings of a shuffler, and for each rank the rows and real rows of its batch; None after its end.

    Without `agreed_before`, the first plan of the shuffler is that of these batches.
    """

    seed: int
    kind: str  # a container's, or "mixed"
    labels: str
    settings: dict[str, Any]
    agreed_before: bool
    batches: tuple[tuple[int, int] | None, ...]

    @property
    def equal_rows(self) -> bool:
        return self.settings["equal_rows"]

    @property
    def partitioner(self) -> str:
        return self.settings.get("partitioner", ShufflerSettings.partitioner)

    @property
    def num_real(self) -> int:
        """Real rows of all ranks."""
        return sum(sizes[1] for sizes in self.batches if sizes is not None)


@st.composite
def cases(draw, num_ranks: int, **more: Sequence[Any]) -> Case:
    """Draws a case for ranks that balance, and one of the values of each further setting.

    A sample has up to 12 tokens; a rank that keeps to a limit has 20 or 40.
    """
    kind = draw(st.sampled_from(["complete", "incomplete", "uneven", "one rank empty", "some ranks ended"]))
    batch_size = draw(st.integers(1, 6))
    empty = draw(st.integers(0, num_ranks - 1))

    def rows(rank: int) -> tuple[int, int]:
        size = draw(st.integers(1, 8)) if kind == "uneven" else batch_size
        if kind in ("incomplete", "uneven"):
            return size, draw(st.integers(0, size))
        return size, 0 if kind == "one rank empty" and rank == empty else size

    settings: dict[str, Any] = {
        "equal_rows": draw(st.booleans()),
        "exchange": draw(st.sampled_from(BOTH)),
        "partitioner": draw(st.sampled_from(sorted(PARTITIONERS))),
        **{name: draw(st.sampled_from(values)) for name, values in more.items()},
    }
    if settings["partitioner"] in LIMITED:
        settings["max_tokens"] = draw(st.sampled_from([None, None, 20, 40]))
    has_batch = [kind != "some ranks ended" or draw(st.booleans()) for _ in range(num_ranks)]
    return Case(
        seed=draw(st.integers(0, 10**6)),
        kind=draw(st.sampled_from(["mixed"] * 4 + KINDS)),
        labels=draw(st.sampled_from(["keyed", "dense", "flat", "none"])),
        settings=settings,
        agreed_before=draw(st.booleans()),
        batches=tuple(rows(rank) if has else None for rank, has in enumerate(has_batch)),
    )


def planned(case: Case, group: dist.ProcessGroup | None = None) -> tuple[BatchShuffler, Any, ShufflePlan]:
    """Returns this rank's shuffler, the batch it loaded, and the plan. Collective over the group.

    A container has no padding rows, and at least one row.
    """
    if case.kind == "mixed":
        shuffler: BatchShuffler = FieldShuffler(group, **case.settings)
    else:
        shuffler = ContainerShuffler(process_group=group, **case.settings)
    if case.agreed_before:
        if case.kind == "mixed":
            agreed(shuffler, case.labels)
        else:
            shuffler.shuffle(make_batch(case.kind, 0, 0, 2))
    rank = shuffler.group.rank
    sizes, first = case.batches[rank], 1000 * (rank + 1)
    if sizes is None or (case.kind != "mixed" and sizes[1] == 0):
        batch = None
    elif case.kind == "mixed":
        batch = draw_batch(np.random.default_rng((case.seed, rank)), first, *sizes, case.labels)
    else:
        batch = make_batch(case.kind, case.seed, first, sizes[1])
    return shuffler, batch, shuffler.plan(batch)


@dataclass(frozen=True)
class Step:
    """A step on one rank: the batch it loaded, if any, the one that is exchanged, and what it gets."""

    shuffler: BatchShuffler
    plan: ShufflePlan
    loaded: Any
    brought: Any
    moved: Any


def exchanged(case: Case, group: dist.ProcessGroup | None = None) -> Step | str:
    """Runs a step; returns the error where no plan is, or says that no rank has a batch."""
    try:
        shuffler, batch, plan = planned(case, group)
    except ValueError as error:
        return str(error)
    if not plan.has_batch:
        return "no rank has a batch"
    brought = shuffler.batch_for_step(batch, plan)
    moved = shuffler.exchange(brought, plan)
    check_shared(moved, brought)
    return Step(shuffler, plan, batch, brought, moved)
