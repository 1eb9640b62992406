"""Places rows: which rank computes each of them, by the partitioner that the settings name."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..partition import lower_bound, rebalance, refine, refined
from ..partition.problem import indices_of_parts, number_of_part, token_goal
from ..partition.workloads import MOST_TOKENS
from .extension import Extension
from .row_table import RowTable
from .shuffle_plan import ShufflePlan
from .shuffler_settings import OWN_PARTITIONERS, PARTITIONERS, ShufflerSettings
from .slow_start import show_if_slow

# Where a rank has no loss tokens, so many rows that have some are tried first, to each side by work.
NEAR_GIVERS = 32


def place_rows(rows: RowTable, settings: ShufflerSettings) -> np.ndarray:
    """Returns int64 `[rows]`, the rank of each.

    Keeps rows as loaded if the partitioner does no better, in load or in tokens above their tolerance,
    unless it also heeds an extension's column.

    Raises:
        ValueError: `max_tokens` cannot be kept, or no placement that keeps it was found.
        RuntimeError: as `partition`.
    """
    max_tokens, tolerance = settings.max_tokens, token_tolerance(rows, settings)
    _check_tokens(rows, max_tokens)
    heeds_tokens = max_tokens is not None or tolerance is not None
    tokens = rows.tokens if heeds_tokens else None
    rank_of = partition(rows, settings, tokens=tokens, token_tolerance=tolerance)
    home = rows.home
    stays = (
        not any(settings.takes(name) for name in rows.columns)
        and allows(rows, home, settings)
        and times(rows, home).max() <= times(rows, rank_of).max()
        and excess_tokens(rows, home, settings) <= excess_tokens(rows, rank_of, settings)
    )
    rank_of = home.copy() if stays else rank_of
    if settings.partitioner in OWN_PARTITIONERS:
        _spread_loss_tokens(rows, rank_of, max_tokens)
    return rank_of


def _spread_loss_tokens(rows: RowTable, rank_of: np.ndarray, max_tokens: int | None) -> None:
    """Changes `rank_of`, int64 `[rows]`, so that each rank has loss tokens, where one swap for each does.

    Without any, a model that returns the mean of its losses divides by zero. A rank gives a row for the one
    of most similar work with loss tokens, of a rank that keeps others. No rank takes longer than the slowest
    did, nor has more than `max_tokens`.
    """
    givers = np.flatnonzero(rows.loss_tokens > 0)
    with_loss = np.bincount(rank_of[givers], minlength=rows.num_ranks)
    if with_loss.all():
        return
    givers = givers[np.argsort(rows.workloads[givers], kind="stable")]
    amounts = np.stack([rows.workloads, rows.tokens])
    sums = np.stack([np.bincount(rank_of, of, minlength=rows.num_ranks) for of in amounts])
    most, speeds = np.full(sums.shape, max_tokens or np.inf), relative_speeds(rows)
    slightly_less = 1.0 if speeds is None else speeds * (1 - 2.0**-40)  # a product may be rounded up
    most[0] = np.maximum(sums[0], times(rows, rank_of).max() * slightly_less)
    waiting, num_waiting = np.flatnonzero(with_loss == 0), 0
    while len(waiting) != num_waiting:  # a swap may make room for another
        num_waiting, able = len(waiting), givers[with_loss[rank_of[givers]] > 1]
        for rank in waiting.tolist():
            swap = _find_swap(amounts, most - sums, rank_of, able, rank) if able.size else None
            if swap is not None:
                given, returned = swap
                giver, change = rank_of[given], amounts[:, given] - amounts[:, returned]
                with_loss[[rank, giver]] += 1, -1
                sums[:, rank] += change
                sums[:, giver] -= change
                rank_of[[given, returned]] = rank, giver
                able = givers[with_loss[rank_of[givers]] > 1]
        waiting = np.flatnonzero(with_loss == 0)


def _find_swap(
    amounts: np.ndarray, room: np.ndarray, rank_of: np.ndarray, able: np.ndarray, rank: int
) -> tuple[int, int] | None:
    """Returns a row that a rank may get, and one that it returns, of most similar work; None without any.

    `amounts` `[2, rows]` are work and tokens, `room` `[2, ranks]` what each rank can take of them, and `able`
    the rows that others may give, by work.
    """
    own, by_work = np.flatnonzero(rank_of == rank), amounts[0, able]
    # 1. With more work or tokens than the highest, or less than the lowest, some rank exceeds its limit.
    lowest, highest = amounts[:, own] - room.max(1)[:, None], amounts[:, own] + room[:, rank, None]
    first, end = np.searchsorted(by_work, lowest[0]), np.searchsorted(by_work, highest[0], side="right")
    least, largest = amounts[1, able].min(), amounts[1, able].max()
    may = np.flatnonzero((first < end) & (lowest[1] <= largest) & (least <= highest[1]))
    if not may.size:
        return None
    own, first, end = own[may], first[may], end[may]
    # 2. Look at those of similar work first: mostly the first row fits. Then look at all, row by row.
    start = np.searchsorted(by_work, amounts[0, own])
    near = start[:, None] + np.arange(-NEAR_GIVERS, NEAR_GIVERS)
    wide = np.flatnonzero(np.maximum(start - first, end - start) > NEAR_GIVERS)
    others = ((own[[row]], np.arange(first[row], end[row])[None]) for row in wide)
    for returned, at in itertools.chain([(own[:1], near[:1]), (own[1:], near[1:])], others):
        given = able[at.clip(0, len(able) - 1)]
        more = amounts[:, given] - amounts[:, returned, None]
        fits = (at >= 0) & (at < len(able)) & (more <= room[:, rank, None, None]).all(0)
        fits &= (-more <= room[:, rank_of[given]]).all(0)
        if fits.any():
            row = fits.any(1).argmax()
            chosen = np.where(fits[row], np.abs(more[0, row]), np.inf).argmin()
            return given[row, chosen], returned[row]
    return None


def partition(rows: RowTable, settings: ShufflerSettings, **arguments: Any) -> np.ndarray:
    """Returns int64 `[rows]`, the rank of each, by the partitioner; `arguments` replace those from settings.

    Raises:
        RuntimeError: the partitioner, which may be a user's, returned neither the rank of each row nor
            one array of indices per rank, with each row once, within the limits that it was given.
    """
    arguments = {
        "workloads": rows.workloads,
        "num_partitions": rows.num_ranks,
        "home": rows.home,
        "sizes": rows.sample_bytes,
        "ranks_per_node": rows.ranks_per_node,
        "speeds": relative_speeds(rows),
        "equal_size": settings.equal_rows,
        "tolerance": settings.tolerance,
        "max_tokens": settings.max_tokens,
        **rows.columns,
        **rows.arguments,
        **arguments,
    }
    given = {name: value for name, value in arguments.items() if value is not None and settings.takes(name)}
    partitioner = PARTITIONERS[settings.partitioner]
    returned = getattr(partitioner, "part_of", partitioner)(**given)
    try:
        rank_of = _rank_of(returned, rows)
        fault = _fault(rows, rank_of, settings.equal_rows, given.get("max_tokens"))
    except (TypeError, ValueError) as error:
        fault = str(error)
    if fault:
        raise RuntimeError(f"partitioner {settings.partitioner!r} returned {reprlib.repr(returned)}: {fault}")
    return rank_of


def allows(rows: RowTable, rank_of: np.ndarray, settings: ShufflerSettings) -> bool:
    """Whether the limits allow the rows on these ranks, int64 `[rows]`."""
    return not _fault(rows, rank_of, settings.equal_rows, settings.max_tokens)


def times(rows: RowTable, rank_of: np.ndarray) -> np.ndarray:
    """Returns loads ÷ speeds, float64 `[ranks]`."""
    # bincount adds one by one, so that all processors get the same last bit.
    loads, speeds = np.bincount(rank_of, rows.workloads, minlength=rows.num_ranks), relative_speeds(rows)
    return loads if speeds is None else loads / speeds


def token_tolerance(rows: RowTable, settings: ShufflerSettings) -> float | None:
    """Returns the tolerance; None where nothing heeds it, or tokens are too many to be added."""
    most = int(rows.tokens.max(initial=0)) * len(rows.tokens)
    heeded = settings.takes("token_tolerance") and most < MOST_TOKENS
    return rows.arguments.get("token_tolerance", settings.token_tolerance) if heeded else None


def excess_tokens(rows: RowTable, rank_of: np.ndarray, settings: ShufflerSettings) -> int:
    """Returns the fullest rank's tokens above the tolerated ones, with `rank_of` int64 `[rows]`."""
    tolerance = token_tolerance(rows, settings)
    if tolerance is None:
        return 0
    goal = token_goal(int(rows.tokens.sum()), rows.num_ranks, tolerance)
    return max(int(np.bincount(rank_of, rows.tokens, minlength=1).max()) - goal, 0)


def _fault(rows: RowTable, rank_of: np.ndarray, equal_rows: bool, max_tokens: int | None) -> str:
    """Returns what keeps rows from being on these ranks, int64 `[rows]`; empty if nothing does."""
    sizes = np.bincount(rank_of, minlength=rows.num_ranks)
    if equal_rows and np.ptp(sizes) > 1:
        found = f"{sizes.min()} to {sizes.max()}"
        return f"parts of {found} samples, expected equal_size=True to make them differ by one at most"
    if max_tokens is not None:
        most = int(np.bincount(rank_of, rows.tokens, 1).max())
        if most > max_tokens:
            return f"a part of {most} tokens, above max_tokens={max_tokens}"
    return ""


def _rank_of(partition: Any, rows: RowTable) -> np.ndarray:
    """Returns int64 `[rows]`, the rank of each, from what a partitioner returned."""
    if isinstance(partition, np.ndarray) and partition.ndim == 1 and partition.dtype.kind in "iu":
        if len(partition) != len(rows.workloads):
            raise ValueError(f"ranks of {len(partition)} rows, expected {len(rows.workloads)}")
        if len(partition) and not 0 <= partition.min() <= partition.max() < rows.num_ranks:
            raise ValueError(f"ranks from {partition.min()} to {partition.max()} of {rows.num_ranks}")
        return partition.astype(np.int64, copy=False)
    parts = list(partition)
    rank_of = number_of_part(parts, len(rows.workloads))
    if len(parts) != rows.num_ranks:
        raise ValueError(f"{len(parts)} parts, expected one for each of {rows.num_ranks} ranks")
    return rank_of


def relative_speeds(rows: RowTable) -> np.ndarray | None:
    """Returns speeds relative to the fastest rank, float64 `[ranks]`; None if all are equally fast."""
    speeds = rows.speeds
    return None if speeds is None or (speeds == speeds[0]).all() else speeds / speeds.max()


def place(rows: RowTable, settings: ShufflerSettings, pads: bool = True) -> ShufflePlan:
    """Places the rows of a step, with errors of `place_rows`; where it `pads`, padding makes rows equal."""
    if rows.num_ranks == 1:
        return place_at_home(rows)
    plan = make_plan(rows, place_rows(rows, settings))
    if not (settings.equal_rows and pads):
        return plan
    most = max(-(-int(rows.batch_sizes.sum()) // rows.num_ranks), 1)
    return replace(plan, num_rows=np.full(rows.num_ranks, most))


def place_at_home(rows: RowTable) -> ShufflePlan:
    """Leaves the rows of a step where they were loaded."""
    return ShufflePlan(rows, rows.home, np.maximum(rows.batch_sizes, 1))


def make_plan(rows: RowTable, rank_of: np.ndarray) -> ShufflePlan:
    """Makes the plan of rows on these ranks, int64 `[rows]`, without padding unless a rank has none."""
    return ShufflePlan(rows, rank_of, np.maximum(np.bincount(rank_of, minlength=rows.num_ranks), 1))


def arguments_of(extensions: Sequence[Extension]) -> dict[str, Any]:
    """Returns what extensions give partitioners, by name."""
    return {
        name: value for extension in extensions for name, value in extension.partitioner_arguments.items()
    }


def warm_up(settings: ShufflerSettings, extensions: Sequence[Extension] = ()) -> None:
    """Compiles, or loads from numba's cache, all that placing may call with these settings."""
    with show_if_slow("compiling the partition functions, or loading them from numba's cache"):
        compile_placement(settings, extensions)
        for extension in extensions:
            extension.warm_up()


def compile_placement(settings: ShufflerSettings, extensions: Sequence[Extension] = ()) -> None:
    """Compiles, or loads from numba's cache, what placing calls, but not what extensions do."""
    # Rows have to be made equal, and then no single swap reaches the target: rebalancing needs every search.
    work, home = np.array([2, 5, 7, 2, 5, 1, 5]), np.array([1, 0, 0, 1, 0, 0, 0])
    ones, each = np.ones(2, dtype=np.int64), np.ones((2, 1), dtype=np.int64)
    rows = RowTable(ones, ones, ones, ones, ones, each, ones, each, arguments=arguments_of(extensions))
    settings = replace(settings, max_tokens=None)
    place_rows(rows, settings)  # it may compile functions of its own
    if settings.partitioner == "refined":
        compile_from_scratch()
    elif settings.partitioner not in ("karmarkar_karp", "longest_processing_time"):
        rebalance(work, home, 2, tolerance=0.0)
    if token_tolerance(rows, settings) is not None:
        rebalance(ones, np.arange(2), 2, tokens=3 * np.arange(2), token_tolerance=0.0)
    lower_bound(ones, 2)  # for reports
    indices_of_parts(home, 2)  # for plans


def compile_from_scratch() -> None:
    """Compiles what places samples from scratch, with speeds and without."""
    work, parts = np.array([2, 5, 7, 2, 5, 1, 5]), [np.array([1, 2, 4, 5, 6]), np.array([0, 3])]
    for speeds in (None, [1.0, 0.5]):
        refine(work, parts, equal_size=False, speeds=speeds)
    refined(work, 2)


def _check_tokens(rows: RowTable, max_tokens: int | None) -> None:
    """Raises what the partitioner would, with the rank and row of the sample."""
    over = np.flatnonzero(rows.tokens > (max_tokens or np.inf))
    if over.size:
        rank, row = rows.where_loaded(over[0])
        is_piece = np.count_nonzero(rows.sample_of == rows.sample_of[over[0]]) > 1
        raise ValueError(
            f"{'a piece of ' if is_piece else ''}row {row} of rank {rows.ranks[rank]} has "
            f"{rows.tokens[over[0]]} tokens, above max_tokens={max_tokens}: truncate histories, raise the "
            "limit, or override get_tokens, which counts them"
        )
