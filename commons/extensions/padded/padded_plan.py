"""The plan of a step for padded models. Imports no torch, so that the advisor plans as a job does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...distributed.placement import check_tokens, make_plan, place_at_home
from ...distributed.row_table import RowTable
from ...distributed.shuffle_plan import MICRO_BATCH, RankLoads, ShufflePlan
from .division import Division, divide_by_runs, divide_where_loaded
from .runs import NO_LIMIT, Limits


@dataclass(frozen=True)
class PaddedLoads(RankLoads):
    """Loads of ranks in a padded model.

    Attributes:
        padding_before, padding_after: padded tokens ÷ real tokens of all ranks, as loaded and as placed.
    """

    padding_before: float
    padding_after: float


def plan_padded(
    rows: RowTable,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    max_real_tokens: float | None = None,
    exchanges: bool = True,
) -> ShufflePlan:
    """Places samples by runs, or leaves them where they are if that is no slower.

    If `rows.arguments` has `micro_batch_tokens`, ranks are divided into micro-batches of at most so many
    padded tokens.

    Args:
        rows: rows of a step.
        max_tokens: largest number of padded tokens of a rank, or of a micro-batch.
        max_rows, max_real_tokens: as in `Padded`.
        exchanges: whether rows may move. If not, the plan still has the loads and the least load, and
            `max_tokens` has no effect.

    Raises:
        ValueError: a sample is above `max_tokens`, or no placement meets `max_tokens` and `max_rows`.
    """
    max_tokens = max_tokens if exchanges else None
    check_tokens(rows, max_tokens)
    micro_tokens = rows.arguments.get("micro_batch_tokens")
    in_parts = micro_tokens is not None
    given = [most for most in (micro_tokens, max_tokens) if most is not None]
    required = Limits(padded_tokens=min(given, default=NO_LIMIT), samples=max_rows or NO_LIMIT)
    loaded = divide_where_loaded(rows, required, in_parts)
    may_stay = loaded.meets(required) or not exchanges
    # 1. Look for runs that are no fuller than the fullest rank, and faster, if rows may also stay.
    limits = required
    if not in_parts:
        fullest = min(required.padded_tokens, int(loaded.padded_tokens.max()))
        limits = limits._replace(padded_tokens=fullest)
        if may_stay:
            limits = limits._replace(cost=min(int(loaded.largest_load) - 1, NO_LIMIT))
    most_cost = min(int(loaded.largest_load), NO_LIMIT)
    placed = divide_by_runs(rows, limits, in_parts, max_real_tokens, most_cost)
    # 2. If rows may not stay, any runs within the required limits will do.
    if placed is None and not may_stay:
        placed = divide_by_runs(rows, required, in_parts, max_real_tokens, most_cost)
        if placed is None:
            raise ValueError(
                f"no placement of {len(rows.tokens)} samples, the longest of {rows.tokens.max()} tokens, on "
                f"{rows.num_ranks} ranks meets max_tokens={max_tokens}, which limits rows × longest, and "
                f"Padded(max_rows={max_rows}): raise the limits, or load fewer samples"
            )
    is_better = placed is not None and (not may_stay or placed.largest_load < loaded.largest_load)
    chosen = placed if placed is not None and is_better and exchanges else loaded
    least = min([chosen.largest_load, *(of.least for of in (loaded, placed) if of is not None)])
    return _planned(rows, loaded, chosen, least)


def _planned(rows: RowTable, loaded: Division, chosen: Division, least: float) -> ShufflePlan:
    """Makes the plan of the chosen division, with the loads before and after."""
    before, after = (float(of.padded_tokens.sum() / max(rows.tokens.sum(), 1)) for of in (loaded, chosen))
    if chosen.num_parts:
        rows = replace(rows, columns={**rows.columns, MICRO_BATCH: chosen.micro_batch})
    plan = place_at_home(rows) if chosen is loaded else make_plan(rows, chosen.rank_of)
    return replace(
        plan,
        num_parts=chosen.num_parts,
        rank_loads=PaddedLoads(loaded.loads, chosen.loads, least, before, after),
    )
