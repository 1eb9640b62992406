"""The plan of a step for padded models. Imports no torch, so that the advisor plans as a job does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...distributed.placement import check_tokens, make_plan, place_at_home
from ...distributed.plan import MICRO_BATCH, RankLoads, RowTable, ShufflePlan
from .loss_rows import sorted_rows, spread_loss_rows
from .runs import NO_LIMIT, Limits, cut_into_runs, padded_costs, ranks_of_runs

# By how much a limit on real tokens grows until it allows a division.
_GIVE_WAY = 1.05


@dataclass(frozen=True)
class PaddedLoads(RankLoads):
    """Loads of ranks in a padded model, with padded tokens ÷ real tokens of all ranks."""

    padding_before: float  # as loaded
    padding_after: float  # as placed


@dataclass(frozen=True)
class _Division:
    """The slot of each row of a step, and what it costs if slots pad.

    A slot is a micro-batch of a rank, or the whole rank. Those of rank 0 come first, the lightest ahead.
    """

    slot_of: np.ndarray  # int64 [rows]
    num_rows: np.ndarray  # int64 [slots], padding rows included
    padded_tokens: np.ndarray  # float64 [slots], rows × longest tokens
    loads: np.ndarray  # float64 [ranks]
    least: float  # no larger than the largest load; less if runs undercut it

    @staticmethod
    def of(rows: RowTable, slot_of: np.ndarray, num_rows: np.ndarray, least: float = np.inf) -> _Division:
        # Copies, because numba compiles anew for read-only arrays.
        work, tokens = rows.work.copy(), rows.tokens[:, None].copy()
        loads = padded_costs(work, slot_of, num_rows).reshape(rows.num_ranks, -1).sum(1)
        padded_tokens = padded_costs(tokens, slot_of, num_rows)
        return _Division(slot_of, num_rows, padded_tokens, loads, min(float(loads.max()), least))


def plan_padded(
    rows: RowTable,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    max_real_tokens: float | None = None,
    exchanges: bool = True,
) -> ShufflePlan:
    """Places samples by runs, or leaves them where they are if that is no slower.

    If `rows.arguments` has `micro_batch_tokens`, ranks are divided into micro-batches of at most so many
    padded tokens. `max_rows` and `max_real_tokens` are as in `Padded`.

    Args:
        max_tokens: largest number of padded tokens of a rank, or of a micro-batch.
        exchanges: whether rows may move. If not, `max_tokens` has no effect, but the least load is still that
            of runs.

    Raises:
        ValueError: a sample is above `max_tokens`, or no runs meet `max_tokens` and `max_rows`.
    """
    # 1. Leave rows where they are.
    max_tokens = max_tokens if exchanges else None
    check_tokens(rows, max_tokens)
    micro_tokens = rows.arguments.get("micro_batch_tokens")
    in_parts, given = micro_tokens is not None, [most for most in (micro_tokens, max_tokens) if most]
    required = Limits(padded_tokens=min(given, default=NO_LIMIT), samples=max_rows or NO_LIMIT)
    loaded = _divide_where_loaded(rows, required, in_parts)
    largest = float(loaded.loads.max())
    within = (loaded.padded_tokens <= required.padded_tokens) & (loaded.num_rows <= required.samples)
    may_stay = not exchanges or (within | (loaded.num_rows <= 1)).all()
    # 2. Look for runs that are no fuller than the fullest rank, and faster. If rows may not stay, any runs
    #    within the required limits will do.
    tries = [required]
    if not in_parts:
        fullest = min(required.padded_tokens, int(loaded.padded_tokens.max()))
        no_fuller = required._replace(padded_tokens=fullest)
        faster = no_fuller._replace(cost=min(int(largest) - 1, NO_LIMIT))
        tries = [faster] if may_stay else [no_fuller, required]
    # A row with loss tokens must not cost so much that all stay.
    found = (_divide_by_runs(rows, limits, in_parts, max_real_tokens, largest - 1) for limits in tries)
    placed = next((division for division in found if division is not None), loaded)
    if placed is loaded and not may_stay:
        placed = _divide_by_tokens(rows, required) or loaded
        if placed is loaded:
            raise ValueError(
                f"no placement of {len(rows.tokens)} samples, the longest of {rows.tokens.max()} tokens, on "
                f"{rows.num_ranks} ranks meets max_tokens={max_tokens}, which limits rows × longest, and "
                f"Padded(max_rows={max_rows}): raise the limits, or load fewer samples"
            )
    # 3. Make the plan of the better one.
    moves = exchanges and (not may_stay or placed.loads.max() < largest)
    chosen = placed if moves else loaded
    per_rank = len(chosen.num_rows) // rows.num_ranks
    if in_parts:
        rows = replace(rows, columns={**rows.columns, MICRO_BATCH: chosen.slot_of % per_rank})
    plan = make_plan(rows, chosen.slot_of // per_rank) if moves else place_at_home(rows)
    padding = (float(of.padded_tokens.sum() / max(rows.tokens.sum(), 1)) for of in (loaded, chosen))
    loads = PaddedLoads(loaded.loads, chosen.loads, min(loaded.least, placed.least), *padding)
    return replace(plan, num_parts=per_rank if in_parts else 0, rank_loads=loads)


def _divide_where_loaded(rows: RowTable, limits: Limits, in_parts: bool) -> _Division:
    """Leaves rows on their ranks, whole as loaded, or cut into as few micro-batches as the limits allow."""
    if not in_parts:
        return _Division.of(rows, rows.home, rows.batch_sizes.copy())
    order = np.lexsort((-rows.workloads, rows.home))
    starts = np.append(rows.home_start, len(order))
    per_rank, run_of = _fewest_parts(rows.work[order], rows.tokens[order], starts, 1, limits)
    slot_of = np.empty_like(order)
    slot_of[order] = (rows.home + 1) * per_rank - 1 - run_of % per_rank  # homes ascend in `order`, too
    return _Division.of(rows, slot_of, np.bincount(slot_of, minlength=rows.num_ranks * per_rank))


def _divide_by_runs(
    rows: RowTable, limits: Limits, in_parts: bool, max_real_tokens: float | None, most_cost: float
) -> _Division | None:
    """Gives each rank one run, or as few micro-batches as the limits allow, the same number to each.

    No run has more than `max_real_tokens` × the mean real tokens of runs, as far as `limits` allow that. A
    run may cost up to `most_cost` if it then gets loss tokens. Returns None if the limits allow no runs.
    """
    # 1. Cut the sorted rows into runs.
    order, num_ranks = sorted_rows(rows), rows.num_ranks
    work, tokens, starts = rows.work[order], rows.tokens[order], np.array([0, len(order)])
    cut = (work, tokens, starts, num_ranks, limits)
    per_rank, run_of = _fewest_parts(*cut) if in_parts else (1, _cut(*cut))
    if run_of is None:
        return None
    num_runs, fewer = num_ranks * per_rank, None
    if max_real_tokens is not None:
        most, total = int(max_real_tokens * tokens.sum() / num_runs), int(tokens.sum())
        while fewer is None and most < total:
            fewer = _cut(work, tokens, starts, num_runs, limits._replace(real_tokens=most))
            most = int(most * _GIVE_WAY) + 1
    run_of = run_of if fewer is None else fewer
    costs = _costs(work, run_of, num_runs)
    least = np.inf if in_parts else float(costs.max())
    if work.shape[1] > 1 and not in_parts:  # no placement undercuts runs of rows whose columns are added up
        summed = rows.workloads[order][:, None]
        undercut = _cut(summed, tokens, starts, num_ranks, limits)
        least = least if undercut is None else min(least, float(_costs(summed, undercut, num_runs).max()))
    # 2. Give each run loss tokens, and a place on a rank that holds many of its bytes.
    has_loss = rows.loss_tokens[order] > 0
    run_of = spread_loss_rows(run_of, has_loss, work, tokens, most_cost, limits.padded_tokens)
    part_of, number = _deal(costs, num_ranks)
    by_part = np.argsort(part_of[run_of], kind="stable")
    numbers, per_node = order[by_part], rows.ranks_per_node or num_ranks
    rank_of_part = ranks_of_runs(
        part_of[run_of[by_part]], rows.home[numbers], rows.sample_bytes[numbers], num_ranks, per_node
    )
    slot_of = np.empty_like(order)
    slot_of[order] = (rank_of_part[part_of] * per_rank + number)[run_of]
    return _Division.of(rows, slot_of, np.bincount(slot_of, minlength=num_runs), least)


def _divide_by_tokens(rows: RowTable, limits: Limits) -> _Division | None:
    """Gives each rank a run of rows sorted by tokens, whatever these cost. None if no placement exists."""
    no_loss = np.zeros_like(rows.loss_tokens)
    alike = replace(rows, workloads=rows.tokens, work=rows.tokens[:, None], loss_tokens=no_loss)
    found = _divide_by_runs(alike, limits, False, None, 0.0)
    return None if found is None else _Division.of(rows, found.slot_of, found.num_rows)


def _cut(
    work: np.ndarray, tokens: np.ndarray, starts: np.ndarray, num_runs: int, limits: Limits
) -> np.ndarray | None:
    """Returns the run of each row, int64 `[rows]`, counted over all lists. None if the limits allow none."""
    work = np.minimum(work, NO_LIMIT // work.shape[1])  # so that any row is a run, and no sum overflows
    fits, ends = cut_into_runs(work, tokens, starts, num_runs, limits)
    return np.searchsorted(ends.ravel(), np.arange(len(tokens)), side="right") if fits else None


def _costs(work: np.ndarray, run_of: np.ndarray, num_runs: int) -> np.ndarray:
    return padded_costs(work, run_of, np.bincount(run_of, minlength=num_runs))


def _fewest_parts(
    work: np.ndarray, tokens: np.ndarray, starts: np.ndarray, num_ranks: int, limits: Limits
) -> tuple[int, np.ndarray]:
    """Returns the fewest micro-batches per rank for which each list has runs, and those runs, as `_cut`."""
    sums = np.append(0, np.cumsum(np.minimum(tokens, limits.padded_tokens)))
    least_runs = -(-int(np.diff(sums[starts]).max()) // limits.padded_tokens)
    per_rank = max(-(-least_runs // num_ranks), 1)
    while (run_of := _cut(work, tokens, starts, num_ranks * per_rank, limits)) is None:
        per_rank += 1  # runs of one row each always fit
    return per_rank, run_of


def _deal(costs: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Deals runs in rounds, from the heaviest on, each to the part with the least load so far.
    Returns the part of each run, and its number in that part, the lightest first."""
    part_of, number, loads = np.arange(len(costs)), np.zeros(len(costs), np.int64), np.zeros(num_ranks)
    rounds = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    if len(rounds) > 1:  # a single run of each part keeps its number
        for past, runs in enumerate(rounds):
            parts = np.argsort(loads, kind="stable")
            part_of[runs], number[runs] = parts, len(rounds) - 1 - past
            loads[parts] += costs[runs]
    return part_of, number
