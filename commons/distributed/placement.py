"""Places samples: which rank computes each sample, in which step and in which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from commons.distributed.cut_search import cut_and_placed
from commons.distributed.cutting import Cutting
from commons.distributed.loaded_samples import LoadedSamples
from commons.distributed.partitioning import Partitioning
from commons.distributed.shuffle_plan import ShufflePlan
from commons.distributed.shuffler_settings import ShufflerSettings
from commons.distributed.slow_start import shown_if_slow
from commons.partition import (
    balance_window,
    divide_into_micro_batches,
    karmarkar_karp,
    longest_processing_time,
    lower_bound,
    rebalance,
    refined,
)
from commons.partition.pieces import divided, leveled
from commons.partition.problem import indices_of_parts, number_of_part


def place(
    samples: LoadedSamples,
    settings: ShufflerSettings,
    ranks_per_node: int | None = None,
    pads: bool = True,
    cutting: Cutting | None = None,
    speeds: np.ndarray | None = None,
) -> ShufflePlan:
    """Places the samples of one step, or of a window of steps, on the ranks that loaded them.

    Samples of one step stay as loaded if the partitioner does no better and the limits allow it.

    Args:
        samples: of one batch per rank, or of up to `settings.window`.
        settings: how to place them.
        ranks_per_node: consecutive ranks per node, where moves across nodes cost more.
        pads: whether batches may get padding rows, to make rows equal.
        cutting: cuts samples that stand in the way of balance; None to keep them whole.
        speeds: float64 `[ranks]`; None if all ranks are equally fast.

    Raises:
        ValueError: `max_rows` or `max_tokens` cannot be kept, or no placement that keeps them was found.
    """
    num_ranks = samples.num_ranks
    num_steps = _num_steps(samples)
    if num_ranks == 1:
        return _as_loaded(samples)
    if num_steps > 1:
        steps = balance_window(
            samples.workloads,
            num_ranks,
            num_steps,
            settings.window_max_step_ratio,
            equal_size=settings.equal_rows,
            speeds=speeds,
        )
        slots = [part for step in steps for part in step]
        step, rank = np.divmod(number_of_part(slots, len(samples.workloads)), num_ranks)
    else:
        relative = None
        if speeds is not None and (speeds != speeds[0]).any():
            relative = speeds / speeds.max()
        partitioning = Partitioning(settings, ranks_per_node, relative)
        if cutting is None:
            rank = partitioning.rank_of(samples)
        else:
            samples, rank = cut_and_placed(samples, partitioning, cutting)
        step = np.zeros_like(rank)
    if settings.equal_rows and pads:
        equal = -(-int(samples.batch_sizes.sum()) // (num_ranks * num_steps))
        rows = np.full((num_ranks, num_steps), max(equal, 1))
    else:
        rows = np.bincount(rank * num_steps + step, minlength=num_ranks * num_steps)
        rows = np.maximum(rows, 1).reshape(num_ranks, num_steps)
    return _planned(samples, rank, step, rows, speeds)


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

    def place_among(ranks: np.ndarray, ranks_per_node: int | None) -> ShufflePlan:
        of_group = None if speeds is None else speeds[ranks]
        return place(samples.within(ranks), settings, ranks_per_node, pads, cutting, of_group)

    placed = [
        (ranks, place_among(ranks, ranks_per_node))
        for ranks, ranks_per_node in groups
        if len(ranks) > 1  # a rank of its own keeps what it loaded
    ]
    if cutting is not None:
        samples = _with_cuts_of(placed, samples, cutting)
    destination, step = samples.home.copy(), samples.batch_of.copy()
    rows = _rows_as_loaded(samples)
    for ranks, of_group in placed:
        chosen = np.isin(samples.home, ranks)
        destination[chosen] = ranks[of_group.destination]
        step[chosen] = of_group.step
        # In steps that only other groups have, the ranks keep one row without a sample.
        rows[ranks, : of_group.num_steps] = of_group.rows
    return _planned(samples, destination, step, rows, speeds)


def divide(plan: ShufflePlan, max_tokens: int) -> ShufflePlan:
    """Returns the plan with the samples of every rank and step in micro-batches of at most `max_tokens`."""
    micro_batch, counts = np.zeros_like(plan.destination), np.ones(plan.num_steps, dtype=np.int64)
    for step in range(plan.num_steps):
        chosen = np.flatnonzero(plan.step == step)
        partition = indices_of_parts(plan.destination[chosen], plan.num_ranks)
        divided = divide_into_micro_batches(
            plan.workloads[chosen], plan.tokens[chosen], partition, max_tokens
        )
        counts[step] = len(divided[0])
        parts = [part for of_rank in divided for part in of_rank]
        micro_batch[chosen] = number_of_part(parts, len(chosen)) % counts[step]
    return replace(plan, micro_batch=micro_batch, micro_batch_counts=counts)


def placed_by_hand(
    samples: LoadedSamples, cutting: Cutting, numbers: np.ndarray, items: np.ndarray, ranks: np.ndarray
) -> ShufflePlan:
    """Returns the plan of given cuts and places.

    Args:
        samples: of one step.
        cutting, numbers, items: as `Cutting.cut` takes them.
        ranks: int64 `[rows]`, the rank of each row after the cuts.
    """
    samples = cutting.cut(samples, numbers, items) if len(numbers) else samples
    rows = np.maximum(np.bincount(ranks, minlength=samples.num_ranks), 1)[:, None]
    return _planned(samples, ranks, np.zeros_like(ranks), rows)


def warm_up(settings: ShufflerSettings) -> None:
    """Compiles, or loads from numba's cache, all that `place` may call, so that no step waits for it."""
    with shown_if_slow("compiling the partition functions, once per machine and version"):
        _call_all(settings)


def _call_all(settings: ShufflerSettings) -> None:
    ones, home = np.ones(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    each = ones[:, None]
    samples = LoadedSamples(each, each, ones, ones, ones, each, ones, each)
    Partitioning(replace(settings, max_tokens=None)).rank_of(samples)  # it may compile functions of its own
    for partitioner in (karmarkar_karp, longest_processing_time, refined):
        partitioner(ones, 2, equal_size=False)
    rebalance(ones, home, 2, groups=home)  # rows have to be made equal
    rebalance(2 * ones + home, np.arange(2), 2, groups=home)
    rebalance(ones, home, 2, equal_size=False, tokens=ones, max_tokens=1)  # a limit has to be met
    balance_window(ones, 1, 2)
    refined(ones, 2, tokens=ones, max_tokens=1)
    lower_bound(ones, 2)  # for reports
    if settings.split:
        whole = divided(ones, 1, home[:0], home[:0], home[:0])
        leveled(whole, home, 2 * ones, ones, ones, np.arange(2), 1, 1)
    if settings.max_tokens_per_micro_batch is not None:
        divide_into_micro_batches(ones, ones, [np.arange(2)], 1)


def _as_loaded(samples: LoadedSamples) -> ShufflePlan:
    return _planned(samples, samples.home, samples.batch_of, _rows_as_loaded(samples))


def _rows_as_loaded(samples: LoadedSamples) -> np.ndarray:
    return np.maximum(samples.batch_sizes[:, : _num_steps(samples)], 1)


def _num_steps(samples: LoadedSamples) -> int:
    return max(int(samples.batch_sizes.any(0).sum()), 1)


def _planned(
    samples: LoadedSamples,
    destination: np.ndarray,
    step: np.ndarray,
    rows: np.ndarray,
    speeds: np.ndarray | None = None,
) -> ShufflePlan:
    """Makes the plan of a placement, in which batches run whole."""
    num_steps = rows.shape[1]
    of_samples = {spec.name: getattr(samples, spec.name) for spec in fields(LoadedSamples)}
    of_samples["batch_sizes"] = samples.batch_sizes[:, :num_steps]
    of_samples["num_loaded"] = samples.num_loaded[:, :num_steps]
    return ShufflePlan(
        **of_samples,
        destination=destination,
        step=step,
        micro_batch=np.zeros_like(step),
        rows=rows,
        micro_batch_counts=np.zeros(num_steps, dtype=np.int64),
        speeds=speeds,
    )


def _with_cuts_of(
    placed: Sequence[tuple[np.ndarray, ShufflePlan]], samples: LoadedSamples, cutting: Cutting
) -> LoadedSamples:
    """Returns the samples of all ranks in the pieces of their groups' plans."""
    numbers, items = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for ranks, plan in placed:
        if plan.pieces is not None:
            later = np.flatnonzero(~plan.starts_sample)
            of_group = np.flatnonzero(np.isin(samples.home, ranks))
            numbers.append(of_group[plan.sample_of[later]])
            items.append(plan.pieces["first_item"][later])
    order = np.argsort(np.concatenate(numbers), kind="stable")
    if not len(order):
        return samples
    return cutting.cut(samples, np.concatenate(numbers)[order], np.concatenate(items)[order])
