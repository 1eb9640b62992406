"""Placement: which rank computes each row, by the partitioner that the settings name."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..partition import karmarkar_karp, lower_bound, rebalance, refined
from ..partition.problem import indices_of_parts, number_of_part, token_goal
from ..partition.refined import refine
from ..partition.workloads import MOST_TOKENS
from .extension import Extension
from .plan import RowTable, ShufflePlan
from .settings import OWN_PARTITIONERS, PARTITIONERS, ShufflerSettings

# Number of rows with loss tokens that `_find_swap` tries first, on each side of the most similar work.
NEAR_GIVERS = 32


def place_rows(rows: RowTable, settings: ShufflerSettings) -> np.ndarray:
    """Returns the rank of each row, int64 `[rows]`.

    Keeps all rows at home if the limits allow that, and the partitioner improves neither the longest time nor
    the tokens above the tolerance. A user's partitioner always wins, as one with an extension's column does.

    Raises:
        ValueError: `max_tokens` cannot be met, or no placement that meets it was found.
        RuntimeError: the partitioner returned an invalid result; see `partition`.
    """
    max_tokens, tolerance = settings.max_tokens, token_tolerance(rows, settings)
    check_tokens(rows, max_tokens)
    tokens = None if max_tokens is None and tolerance is None else rows.tokens
    rank_of = partition(rows, settings, tokens=tokens, token_tolerance=tolerance)
    home = rows.home
    stays = (
        settings.partitioner in OWN_PARTITIONERS
        and not any(settings.takes(name, rows.partitioner) for name in rows.columns)
        and allows(rows, home, settings)
        and times(rows, home).max() <= times(rows, rank_of).max()
        and excess_tokens(rows, home, settings) <= excess_tokens(rows, rank_of, settings)
    )
    rank_of = home.copy() if stays else rank_of
    if settings.partitioner in OWN_PARTITIONERS:
        _fill_empty_ranks(rows, rank_of)
        _spread_loss_tokens(rows, rank_of, max_tokens)
    return rank_of


def _fill_empty_ranks(rows: RowTable, rank_of: np.ndarray) -> None:
    """Modifies `rank_of`, int64 `[rows]`, to give each rank a row, if there are enough: the lightest one of
    the ranks with several. A rank that would take longer for it than the slowest rank stays empty."""
    sizes = np.bincount(rank_of, minlength=rows.num_ranks)
    for rank in np.flatnonzero(sizes == 0).tolist():
        able = np.flatnonzero(sizes[rank_of] > 1)
        for row in able[rows.workloads[able].argsort(kind="stable")[:1]]:
            placed = rank_of.copy()
            placed[row] = rank
            if times(rows, placed).max() <= times(rows, rank_of).max():
                sizes[[rank, rank_of[row]]] += 1, -1
                rank_of[row] = rank


def _spread_loss_tokens(rows: RowTable, rank_of: np.ndarray, max_tokens: int | None) -> None:
    """Modifies `rank_of`, int64 `[rows]`, to give each rank loss tokens, if one swap for each can do so.

    On a rank without loss tokens, a model that returns the mean of its losses divides by zero. Such a rank
    swaps one of its rows for a row with loss tokens and similar work, from a rank that keeps other such rows.
    No rank takes longer than the slowest did before, or has more than `max_tokens`.
    """
    givers = np.flatnonzero(rows.loss_tokens > 0)
    with_loss = np.bincount(rank_of[givers], minlength=rows.num_ranks)
    if with_loss.all():
        return
    givers = givers[np.argsort(rows.workloads[givers], kind="stable")]
    amounts = np.stack([rows.workloads, rows.tokens])
    sums = np.stack([np.bincount(rank_of, of, minlength=rows.num_ranks) for of in amounts])
    most, speeds = np.full(sums.shape, max_tokens or np.inf), relative_speeds(rows)
    slightly_less = 1.0 if speeds is None else speeds * (1 - 2.0**-40)  # rounding may increase a product
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
    """Returns a row for `rank` to receive, and a row of similar work to give back; None if no swap fits.

    `amounts`, `[2, rows]`, has the rows' work and tokens. `room`, `[2, ranks]`, has the work and tokens
    that each rank may still take. `able` lists the rows that other ranks may give, in order of work.
    """
    own, by_work = np.flatnonzero(rank_of == rank), amounts[0, able]
    # 1. Receiving more work or tokens than `highest`, or less than `lowest`, breaks some rank's limit.
    lowest, highest = amounts[:, own] - room.max(1)[:, None], amounts[:, own] + room[:, rank, None]
    first, end = np.searchsorted(by_work, lowest[0]), np.searchsorted(by_work, highest[0], side="right")
    least, largest = amounts[1, able].min(), amounts[1, able].max()
    may = np.flatnonzero((first < end) & (lowest[1] <= largest) & (least <= highest[1]))
    if not may.size:
        return None
    own, first, end = own[may], first[may], end[may]
    # 2. Try rows of similar work first: the first own row usually finds one. Then try all, row by row.
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
    """Returns the partitioner's rank of each row, int64 `[rows]`; `arguments` override the usual ones.

    Raises:
        RuntimeError: the result of the partitioner, which may be a user's, is neither a rank per row nor an
            index array per rank with every row in exactly one, or it exceeds the given limits.
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
    partitioner = rows.partitioner or PARTITIONERS[settings.partitioner]
    named = {name: value for name, value in arguments.items() if settings.takes(name, partitioner)}
    given = {name: value for name, value in named.items() if value is not None}
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
    """Returns whether the limits allow this placement; `rank_of` is int64 `[rows]`."""
    return not _fault(rows, rank_of, settings.equal_rows, settings.max_tokens)


def times(rows: RowTable, rank_of: np.ndarray) -> np.ndarray:
    """Returns each rank's load ÷ speed, float64 `[ranks]`."""
    # bincount adds sequentially, so all processors get the same last bit.
    loads, speeds = np.bincount(rank_of, rows.workloads, minlength=rows.num_ranks), relative_speeds(rows)
    return loads if speeds is None else loads / speeds


def token_tolerance(rows: RowTable, settings: ShufflerSettings) -> float | None:
    """Returns the token tolerance; None if the partitioner takes none, or the tokens could overflow a sum."""
    most = int(rows.tokens.max(initial=0)) * len(rows.tokens)
    heeded = settings.takes("token_tolerance", rows.partitioner) and most < MOST_TOKENS
    return rows.arguments.get("token_tolerance", settings.token_tolerance) if heeded else None


def excess_tokens(rows: RowTable, rank_of: np.ndarray, settings: ShufflerSettings) -> int:
    """Returns how far the fullest rank's tokens exceed the tolerated number; `rank_of` is int64 `[rows]`."""
    tolerance = token_tolerance(rows, settings)
    if tolerance is None:
        return 0
    goal = token_goal(int(rows.tokens.sum()), rows.num_ranks, tolerance)
    return max(int(np.bincount(rank_of, rows.tokens, minlength=1).max()) - goal, 0)


def _fault(rows: RowTable, rank_of: np.ndarray, equal_rows: bool, max_tokens: int | None) -> str:
    """Returns why the limits forbid this placement; empty if they allow it. `rank_of` is int64 `[rows]`."""
    sizes = np.bincount(rank_of, minlength=rows.num_ranks)
    if equal_rows and np.ptp(sizes) > 1:
        return f"parts of {sizes.min()} to {sizes.max()} samples, which may differ by at most one"
    if max_tokens is not None:
        most = int(np.bincount(rank_of, rows.tokens, 1).max())
        if most > max_tokens:
            return f"a part of {most} tokens, above max_tokens={max_tokens}"
    return ""


def _rank_of(partition: Any, rows: RowTable) -> np.ndarray:
    """Returns the rank of each row, int64 `[rows]`, from a partitioner's result, after checking it."""
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
    """Makes the plan of a step by `place_rows`. With `equal_rows` and `pads`, padding evens out batches."""
    if rows.num_ranks == 1:
        return place_at_home(rows)
    plan = make_plan(rows, place_rows(rows, settings))
    if not (settings.equal_rows and pads):
        return plan
    most = max(-(-int(rows.batch_sizes.sum()) // rows.num_ranks), 1)
    return replace(plan, num_rows=np.full(rows.num_ranks, most))


def place_at_home(rows: RowTable) -> ShufflePlan:
    """Makes the plan that leaves the rows of a step where they were loaded."""
    return ShufflePlan(rows, rows.home, np.maximum(rows.batch_sizes, 1))


def make_plan(rows: RowTable, rank_of: np.ndarray) -> ShufflePlan:
    """Makes the plan for `rank_of`, int64 `[rows]`. Only ranks without rows get a padding row."""
    return ShufflePlan(rows, rank_of, np.maximum(np.bincount(rank_of, minlength=rows.num_ranks), 1))


def arguments_of(extensions: Sequence[Extension]) -> dict[str, Any]:
    """Returns the arguments that extensions pass to partitioners, by name."""
    return {name: value for each in extensions for name, value in each.partitioner_arguments.items()}


def warm_up(settings: ShufflerSettings, extensions: Sequence[Extension] = ()) -> None:
    """Compiles everything that placing rows may call with these settings, or loads it from numba's cache."""
    # These ranks have unequal numbers of rows, and no single swap reaches the target, so all searches run.
    work, home = np.array([2, 5, 7, 2, 5, 1, 5]), np.array([1, 0, 0, 1, 0, 0, 0])
    ones, each = np.ones(2, dtype=np.int64), np.ones((2, 1), dtype=np.int64)
    rows = RowTable(ones, ones, ones, ones, ones, each, ones, each, arguments=arguments_of(extensions))
    settings = replace(settings, max_tokens=None)
    place_rows(rows, settings)  # a user's partitioner may compile functions, too
    if settings.partitioner == "refined":
        compile_from_scratch()
    elif settings.partitioner not in ("karmarkar_karp", "longest_processing_time"):
        rebalance(work, home, 2, tolerance=0.0)
        rebalance(ones, np.arange(2), 2, tokens=3 * np.arange(2), token_tolerance=0.0)
    lower_bound(ones, 2)  # for reports
    indices_of_parts(home, 2)  # for plans
    for extension in extensions:
        extension.warm_up()


def compile_from_scratch() -> None:
    """Compiles the functions that place samples from scratch, with and without speeds."""
    work, parts = np.array([2, 5, 7, 2, 5, 1, 5]), [np.array([1, 2, 4, 5, 6]), np.array([0, 3])]
    for speeds in (None, [1.0, 0.5]):
        refine(work, parts, equal_size=False, speeds=speeds)
    for place_all in (refined, karmarkar_karp):
        place_all(work, 2)


def check_tokens(rows: RowTable, max_tokens: int | None) -> None:
    """Raises a ValueError that names the rank and row of a sample with more than `max_tokens`, if any."""
    over = np.flatnonzero(rows.tokens > (max_tokens or np.inf))
    if over.size:
        rank, row = rows.where_loaded(over[0])
        is_piece = np.count_nonzero(rows.sample_of == rows.sample_of[over[0]]) > 1
        raise ValueError(
            f"{'a piece of ' if is_piece else ''}row {row} of rank {rows.ranks[rank]} has "
            f"{rows.tokens[over[0]]} tokens, above max_tokens={max_tokens}: truncate histories, raise the "
            "limit, or override get_tokens, which counts them"
        )
