"""Shufflers of drawn batches, and cases that they run on."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from hypothesis import strategies as st

from commons.distributed import PARTITIONERS, BatchShuffler, Extension, ShufflePlan, ShufflerSettings
from tests.commons.distributed.loaded_batches import BOTH, agreed
from tests.drawn_batches import MixedBatch, draw_batch

LIMITED = [name for name in sorted(PARTITIONERS) if ShufflerSettings(name).takes("max_tokens")]


class FieldShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.workload


class DictShuffler(FieldShuffler):
    def get_workloads(self, batch):
        return batch["workload"]


@dataclass(frozen=True)
class Case:
    """Settings of a shuffler, and for each rank the rows and real rows of its batch; None after its end.

    Without `agreed_before`, the first plan of the shuffler is that of these batches.
    """

    seed: int
    labels: str
    settings: dict[str, Any]
    agreed_before: bool
    batches: tuple[tuple[int, int] | None, ...]

    @property
    def equal_rows(self) -> bool:
        return self.settings["equal_rows"]

    @property
    def num_real(self) -> int:
        return sum(sizes[1] for sizes in self.batches if sizes is not None)

    def loaded_by(self, rank: int) -> MixedBatch | None:
        """Draws the batch of a rank."""
        sizes, rng = self.batches[rank], np.random.default_rng((self.seed, rank))
        return None if sizes is None else draw_batch(rng, 1000 * (rank + 1), *sizes, self.labels)


class Posting(Extension):
    """Posts numbers that tell its order, the plan, and the rank; notes what it placed by and took."""

    num_posted = 1

    def __init__(self, name: str = "posting", order: int = 0, num_posted: int = 1) -> None:
        self.name, self.order, self.num_posted = name, order, num_posted
        self.placed: list[tuple[list[int], list[list[int]]]] = []
        self.taken: list[list[list[int]]] = []
        self._numbers = itertools.count(1000 * order + dist.get_rank(), 10)

    def post(self):
        return next(self._numbers) + 100 * np.arange(self.num_posted)

    def place(self, rows, place):
        self.placed.append((rows.num_loaded.tolist(), rows.posts[self.name].tolist()))
        return place(rows)

    def take(self, posted):
        self.taken.append(posted.tolist())


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
        labels=draw(st.sampled_from(["keyed", "dense", "flat", "none"])),
        settings=settings,
        agreed_before=draw(st.booleans()),
        batches=tuple(rows(rank) if has else None for rank, has in enumerate(has_batch)),
    )


def exchanged(case: Case) -> tuple[FieldShuffler, ShufflePlan, MixedBatch, MixedBatch] | None:
    """Returns this rank's shuffler, the plan, and the batch before and after; None where no plan is."""
    shuffler = FieldShuffler(**case.settings)
    if case.agreed_before:
        agreed(shuffler, case.labels)
    batch = case.loaded_by(shuffler.group.rank)
    try:
        plan = shuffler.plan(batch)
    except ValueError:
        return None
    if not plan.has_batch:
        return None
    brought = shuffler.padding_batch() if batch is None else batch
    return shuffler, plan, brought, shuffler.exchange(brought, plan)
