"""Places samples: which rank computes each sample, in which step and in which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from commons.distributed.cutting import Cutting
from commons.distributed.loaded_samples import LoadedSamples
from commons.distributed.shuffle_plan import ShufflePlan
from commons.distributed.shuffler_settings import PARTITIONERS, ShufflerSettings
from commons.distributed.slow_start import shown_if_slow
from commons.partition import (
    balance_window,
    divide_into_micro_batches,
    lower_bound,
    rebalance,
    refined,
)
from commons.partition.problem import indices_of_parts, number_of_part

# Samples are cut where whole ones cannot come this close to the mean load.
CUT_TOLERANCE = 0.01
# Attempts to balance pieces; each cuts further what was too large in the one before.
MAX_ATTEMPTS = 8


def place(
    samples: LoadedSamples,
    settings: ShufflerSettings,
    ranks_per_node: int | None = None,
    pads: bool = True,
    cutting: Cutting | None = None,
) -> ShufflePlan:
    """Places the samples of one step, or of a window of steps, on the ranks that loaded them.

    Samples of one step stay as loaded if the partitioner does no better and the limits allow it.

    Args:
        samples: of one batch per rank, or of up to `settings.window`.
        settings: how to place them.
        ranks_per_node: consecutive ranks per node, where moves across nodes cost more.
        pads: whether batches may get padding rows, to make rows equal.
        cutting: cuts samples that stand in the way of balance; None to keep them whole.

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
        )
        slots = [part for step in steps for part in step]
        step, rank = np.divmod(number_of_part(slots, len(samples.workloads)), num_ranks)
    else:
        if cutting is None:
            rank = _rank_of(samples, settings, ranks_per_node)
        else:
            samples, rank = _cut_and_placed(samples, settings, ranks_per_node, cutting)
        step = np.zeros_like(rank)
    if settings.equal_rows and pads:
        equal = -(-int(samples.batch_sizes.sum()) // (num_ranks * num_steps))
        rows = np.full((num_ranks, num_steps), max(equal, 1))
    else:
        rows = np.bincount(rank * num_steps + step, minlength=num_ranks * num_steps)
        rows = np.maximum(rows, 1).reshape(num_ranks, num_steps)
    return _planned(samples, rank, step, rows)


def place_within(
    samples: LoadedSamples,
    groups: Sequence[tuple[np.ndarray, int | None]],
    settings: ShufflerSettings,
    pads: bool,
    cutting: Cutting | None = None,
) -> ShufflePlan:
    """`place`, with every sample kept among the ranks of its group.

    Args:
        samples: of all ranks.
        groups: the ascending ranks of each group, each rank in one of them, and its ranks per node.
        settings, pads, cutting: as `place` takes them.
    """
    if len(groups) == 1:
        return place(samples, settings, groups[0][1], pads, cutting)
    placed = [
        (ranks, place(samples.within(ranks), settings, ranks_per_node, pads, cutting))
        for ranks, ranks_per_node in groups
        if len(ranks) > 1  # a rank of its own keeps what it loaded
    ]
    if cutting is not None:
        samples = _with_cuts_of(placed, samples, cutting)
    plan = _as_loaded(samples)
    for ranks, of_group in placed:
        chosen = np.isin(samples.home, ranks)
        plan.destination[chosen] = ranks[of_group.destination]
        plan.step[chosen] = of_group.step
        # In steps that only other groups have, the ranks keep one row without a sample.
        plan.rows[ranks, : of_group.num_steps] = of_group.rows
    return plan


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
    for partitioner in PARTITIONERS:  # also those that compile functions of their own
        each = ones[:, None]
        samples = LoadedSamples(each, each, ones, ones, ones, each, ones, each)
        _rank_of(samples, ShufflerSettings(partitioner, equal_rows=False), None)
    rebalance(ones, home, 2)  # rows have to be made equal
    rebalance(ones, home, 2, equal_size=False, tokens=ones, max_tokens=1)  # a limit has to be met
    balance_window(ones, 1, 2)
    refined(ones, 2, tokens=ones, max_tokens=1)
    lower_bound(ones, 2)  # for reports
    if settings.max_tokens_per_micro_batch is not None:
        divide_into_micro_batches(ones, ones, [np.arange(2)], 1)


def _as_loaded(samples: LoadedSamples) -> ShufflePlan:
    rows = np.maximum(samples.batch_sizes[:, : _num_steps(samples)], 1)
    return _planned(samples, samples.home.copy(), samples.batch_of.copy(), rows)


def _num_steps(samples: LoadedSamples) -> int:
    return max(int(samples.batch_sizes.any(0).sum()), 1)


def _planned(
    samples: LoadedSamples, destination: np.ndarray, step: np.ndarray, rows: np.ndarray
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
    )


def _rank_of(samples: LoadedSamples, settings: ShufflerSettings, ranks_per_node: int | None) -> np.ndarray:
    """Returns int64 `[samples]`, the rank of each; as loaded where the partitioner does no better."""
    _check_tokens(samples, settings.max_tokens)
    num_ranks = samples.num_ranks
    arguments = {
        "workloads": samples.workloads,
        "num_partitions": num_ranks,
        "home": samples.home,
        "sizes": samples.sample_bytes,
        "ranks_per_node": ranks_per_node,
        "equal_size": settings.equal_rows,
        "tolerance": settings.tolerance,
        "max_rows": settings.max_rows,
        "tokens": None if settings.max_tokens is None else samples.tokens,
        "max_tokens": settings.max_tokens,
    }
    given = {name: value for name, value in arguments.items() if settings.takes(name) and value is not None}
    partition = PARTITIONERS[settings.partitioner](**given)
    rank_of = number_of_part(partition, len(samples.workloads))  # a user's function may lose samples
    home = samples.home
    stays = _allows(samples, settings) and _largest_load(samples, home) <= _largest_load(samples, rank_of)
    return home.copy() if stays else rank_of


def _cut_and_placed(
    samples: LoadedSamples, settings: ShufflerSettings, ranks_per_node: int | None, cutting: Cutting
) -> tuple[LoadedSamples, np.ndarray]:
    """Returns the samples in as few pieces as balance takes, and int64 `[rows]`, the rank of each.

    Samples start with enough pieces of equal cost for none to be above the target. Then the ranks above it
    are looked at, and the largest piece on each is cut further.
    """
    num_ranks = samples.num_ranks
    mean = samples.workloads.sum(dtype=np.float64) / num_ranks
    target = mean * (1 + max(CUT_TOLERANCE, settings.tolerance or 0.0))
    cap = settings.max_tokens or np.inf
    has_room = samples.tokens.max(initial=0) <= cap
    if has_room and lower_bound(samples.workloads, num_ranks, equal_size=False) <= 1 + CUT_TOLERANCE:
        try:
            return samples, _rank_of(samples, settings, ranks_per_node)
        except ValueError:  # whole samples have no place under max_tokens
            pass
    most = cutting.most_pieces(samples)
    needed = np.maximum(samples.workloads / max(target, 1), samples.tokens / cap)
    num_pieces = np.clip(np.ceil(needed).astype(np.int64), 1, most)
    for attempt in range(MAX_ATTEMPTS):
        cuts = cutting.equal_cuts(samples, num_pieces)
        cut = cutting.cut(samples, *cuts) if len(cuts[0]) else samples
        sample_of = np.cumsum(cut.starts_sample) - 1
        try:
            rank = _rank_of(cut, settings, ranks_per_node)
        except ValueError:
            further = np.unique(sample_of[cut.tokens > cut.tokens.max() / 2])
            if attempt == MAX_ATTEMPTS - 1 or not (num_pieces < most)[further].any():
                raise
        else:
            loads = np.bincount(rank, cut.workloads, minlength=num_ranks)
            further = _largest_on(np.flatnonzero(loads > target), cut.workloads, rank, sample_of)
            further = further[num_pieces[further] < most[further]]
            if not further.size or attempt == MAX_ATTEMPTS - 1:
                return cut, rank
        more = num_pieces[further] + np.maximum(num_pieces[further] // 2, 1)
        num_pieces[further] = np.minimum(more, most[further])
    raise AssertionError("the last attempt returns or raises")


def _largest_on(
    ranks: np.ndarray, workloads: np.ndarray, rank_of: np.ndarray, sample_of: np.ndarray
) -> np.ndarray:
    """Returns the samples of the largest row on each of the given ranks, int64, ascending."""
    largest_first = np.lexsort((-workloads, rank_of))
    first = np.searchsorted(rank_of[largest_first], ranks)
    return np.unique(sample_of[largest_first[first]])


def _with_cuts_of(
    placed: Sequence[tuple[np.ndarray, ShufflePlan]], samples: LoadedSamples, cutting: Cutting
) -> LoadedSamples:
    """Returns the samples of all ranks in the pieces of their groups' plans."""
    numbers, items = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for ranks, plan in placed:
        if plan.pieces is not None:
            later = np.flatnonzero(~plan.starts_sample)
            of_group = np.flatnonzero(np.isin(samples.home, ranks))
            numbers.append(of_group[np.cumsum(plan.starts_sample)[later] - 1])
            items.append(plan.pieces["first_item"][later])
    order = np.argsort(np.concatenate(numbers), kind="stable")
    if not len(order):
        return samples
    return cutting.cut(samples, np.concatenate(numbers)[order], np.concatenate(items)[order])


def _check_tokens(samples: LoadedSamples, max_tokens: int | None) -> None:
    """Raises what the partitioner would, with the rank and row of the sample."""
    over = np.flatnonzero(samples.tokens > (max_tokens or np.inf))
    if over.size:
        rank, _, row = samples.where_loaded(over[0])
        raise ValueError(
            f"row {row} of rank {rank} has {samples.tokens[over[0]]} tokens, above "
            f"max_tokens={max_tokens}: truncate histories or raise the limit"
        )


def _allows(samples: LoadedSamples, settings: ShufflerSettings) -> bool:
    """Whether the samples may stay where they were loaded."""
    num_loaded = samples.num_loaded.sum(1)
    tokens = np.bincount(samples.home, samples.tokens, minlength=1)
    even = not settings.equal_rows or np.ptp(num_loaded) <= 1
    few = settings.max_rows is None or num_loaded.max() <= settings.max_rows
    return even and few and (settings.max_tokens is None or tokens.max() <= settings.max_tokens)


def _largest_load(samples: LoadedSamples, rank_of: np.ndarray) -> float:
    """Adds one by one, as bincount does, so that all processors get the same last bit."""
    return float(np.bincount(rank_of, samples.workloads, minlength=1).max())
