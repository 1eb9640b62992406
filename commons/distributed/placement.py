"""Places samples: which rank computes each sample, and in which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from ..partition import (
    divide_into_micro_batches,
    lower_bound,
    rebalance,
    refine,
    refined,
)
from ..partition.pieces import cut_heavy, level
from ..partition.problem import number_of_part
from .cut_search import cut_and_placed
from .cutting import Cutting
from .loaded_samples import LoadedSamples
from .partitioning import Partitioning
from .shuffle_plan import ShufflePlan
from .shuffler_settings import ShufflerSettings
from .slow_start import shown_if_slow


def place(
    samples: LoadedSamples,
    settings: ShufflerSettings,
    ranks_per_node: int | None = None,
    pads: bool = True,
    cutting: Cutting | None = None,
    speeds: np.ndarray | None = None,
) -> ShufflePlan:
    """Places the samples of a step on the ranks that loaded them.

    They stay as loaded if the partitioner does no better and the limits allow it.

    Args:
        samples: as loaded.
        settings: how to place them.
        ranks_per_node: consecutive ranks per node, where moves across nodes cost more.
        pads: whether batches may get padding rows, to make rows equal.
        cutting: cuts samples that stand in the way of balance; None to keep them whole.
        speeds: float64 `[ranks]`; None if all ranks are equally fast.

    Raises:
        ValueError: `max_rows` or `max_tokens` cannot be kept, or no placement that keeps them was found.
    """
    return _planned(*_placed(samples, settings, ranks_per_node, pads, cutting, speeds), speeds)


def _placed(
    samples: LoadedSamples,
    settings: ShufflerSettings,
    ranks_per_node: int | None,
    pads: bool,
    cutting: Cutting | None,
    speeds: np.ndarray | None,
) -> tuple[LoadedSamples, np.ndarray, np.ndarray]:
    """Returns the samples after cuts, the rank of each, and the rows of each rank, int64 both."""
    num_ranks = samples.num_ranks
    if num_ranks == 1:
        return samples, samples.home, _rows_as_loaded(samples)
    relative = None
    if speeds is not None and (speeds != speeds[0]).any():
        relative = speeds / speeds.max()
    partitioning = Partitioning(settings, ranks_per_node, relative)
    if cutting is None:
        rank = partitioning.rank_of(samples)
    else:
        samples, rank = cut_and_placed(samples, partitioning, cutting)
    if settings.equal_rows and pads:
        rows = np.full(num_ranks, max(-(-int(samples.batch_sizes.sum()) // num_ranks), 1))
    else:
        rows = _rows_of(rank, num_ranks)
    return samples, rank, rows


def place_within(
    samples: LoadedSamples,
    groups: Sequence[tuple[np.ndarray, int | None]],
    settings: ShufflerSettings,
    pads: bool,
    cutting: Cutting | None = None,
    speeds: np.ndarray | None = None,
) -> ShufflePlan:
    """`place`, with every sample kept among the ranks of its group.

    Args:
        samples: of all ranks.
        groups: the ascending ranks of each group, each rank in one of them, and its ranks per node.
        settings, pads, cutting, speeds: as `place` takes them.
    """
    if len(groups) == 1:
        return place(samples, settings, groups[0][1], pads, cutting, speeds)

    placed = []
    for ranks, ranks_per_node in groups:
        if len(ranks) > 1:  # a rank of its own keeps what it loaded
            of_group = None if speeds is None else speeds[ranks]
            among = samples.within(ranks)
            placed.append((ranks, *_placed(among, settings, ranks_per_node, pads, cutting, of_group)))
    if cutting is not None:
        samples = _with_cuts_of([(ranks, among) for ranks, among, _, _ in placed], samples, cutting)
    destination, rows = samples.home.copy(), _rows_as_loaded(samples)
    for ranks, _, rank, rows_of_group in placed:
        destination[samples.loaded_by(ranks)] = ranks[rank]
        rows[ranks] = rows_of_group
    return _planned(samples, destination, rows, speeds)


def divide(plan: ShufflePlan, max_tokens: int) -> ShufflePlan:
    """Returns the plan with the samples of every rank in micro-batches of at most `max_tokens`."""
    of_ranks = divide_into_micro_batches(plan.workloads, plan.tokens, plan.partition, max_tokens)
    count = len(of_ranks[0])
    parts = [part for of_rank in of_ranks for part in of_rank]
    micro_batch = number_of_part(parts, len(plan.workloads)) % count
    return replace(plan, micro_batch=micro_batch, num_micro_batches=count)


def placed_by_hand(
    samples: LoadedSamples, cutting: Cutting, numbers: np.ndarray, items: np.ndarray, ranks: np.ndarray
) -> ShufflePlan:
    """Returns the plan of given cuts and places.

    Args:
        samples: as loaded.
        cutting, numbers, items: as `Cutting.cut` takes them.
        ranks: int64 `[rows]`, the rank of each row after the cuts.
    """
    samples = cutting.cut(samples, numbers, items) if len(numbers) else samples
    return _planned(samples, ranks, _rows_of(ranks, samples.num_ranks))


def warm_up(settings: ShufflerSettings, has_groups: bool = False) -> None:
    """`compile_all`, and shows that it runs if it takes long."""
    with shown_if_slow("compiling the partition functions, once per machine and version"):
        compile_all(settings, has_groups)


def compile_all(settings: ShufflerSettings, has_groups: bool = False) -> None:
    """Compiles, or loads from numba's cache, all that `place` and `divide` may call, so that no step does.

    Args:
        settings: of the shuffler; what only other settings reach is left out.
        has_groups: whether samples have groups; they have if the settings name a feature for them.
    """
    # Rows have to be made equal, and then no single swap reaches the target: rebalancing needs every search.
    work, home = np.array([2, 5, 7, 2, 5, 1, 5]), np.array([1, 0, 0, 1, 0, 0, 0])
    ones, each = np.ones(2, dtype=np.int64), np.ones((2, 1), dtype=np.int64)
    samples = LoadedSamples(ones, ones, ones, ones, ones, each, ones, each)
    Partitioning(replace(settings, max_tokens=None)).rank_of(samples)  # it may compile functions of its own
    in_micro_batches = settings.max_tokens_per_micro_batch is not None
    if settings.partitioner in ("longest_processing_time", "refined") or in_micro_batches:
        for speeds in (None, [1.0, 0.5]):
            refine(work, [np.flatnonzero(home == rank) for rank in range(2)], equal_size=False, speeds=speeds)
        refined(work, 2)
    if settings.split or settings.partitioner not in ("karmarkar_karp", "longest_processing_time", "refined"):
        rebalance(work, home, 2, tolerance=0.0)
    if has_groups or settings.group_feature is not None:
        rebalance(work, home, 2, tolerance=0.0, groups=0 * home)
    if settings.heeded_token_tolerance is not None:
        rebalance(ones, np.arange(2), 2, tokens=3 * np.arange(2), token_tolerance=0.0)
    lower_bound(ones, 2)  # for reports
    if settings.split:
        whole = cut_heavy(ones, 1, home[:0], home[:0], home[:0])
        level(whole, 0 * ones, 2 * ones, ones, ones, np.arange(2), 1, 1)
    if in_micro_batches:
        divide_into_micro_batches(ones, ones, [np.arange(2)], 1)


def _rows_as_loaded(samples: LoadedSamples) -> np.ndarray:
    return np.maximum(samples.batch_sizes, 1)


def _rows_of(rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """Returns int64 `[ranks]`, rows without padding, but at least one."""
    return np.maximum(np.bincount(rank_of, minlength=num_ranks), 1)


def _planned(
    samples: LoadedSamples, destination: np.ndarray, rows: np.ndarray, speeds: np.ndarray | None = None
) -> ShufflePlan:
    """Makes the plan of a placement, in which batches run whole."""
    of_samples = {spec.name: getattr(samples, spec.name) for spec in fields(LoadedSamples)}
    micro_batch = np.zeros_like(destination)
    return ShufflePlan(
        **of_samples, destination=destination, micro_batch=micro_batch, rows=rows, speeds=speeds
    )


def _with_cuts_of(
    placed: Sequence[tuple[np.ndarray, LoadedSamples]], samples: LoadedSamples, cutting: Cutting
) -> LoadedSamples:
    """Returns the samples of all ranks in the pieces of their groups'."""
    numbers, items = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for ranks, among in placed:
        if among.pieces is not None:
            later = np.flatnonzero(~among.starts_sample)
            numbers.append(samples.loaded_by(ranks)[among.sample_of[later]])
            items.append(among.pieces["first_item"][later])
    order = np.argsort(np.concatenate(numbers), kind="stable")
    if not len(order):
        return samples
    return cutting.cut(samples, np.concatenate(numbers)[order], np.concatenate(items)[order])
