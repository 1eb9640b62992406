"""Which strategy to switch on, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass

from commons.advisor.figures import duration
from commons.advisor.prediction import Case, Outcome
from commons.advisor.strategies import KARMARKAR_KARP, REBALANCE, REFINED, WINDOW

LEAST_GAIN = 0.02  # below it, what is not predicted here decides
SAME = 0.005  # speedups nearer than this count as equal
HIGH_BOUND = 1.05


@dataclass(frozen=True)
class Recommendation:
    """What to do with one number of ranks.

    Attributes:
        strategy: name of the strategy to switch on; None where there is nothing to gain.
        headline: that, in a sentence.
        notes: further sentences.
        gin_lines: what to paste; empty where there is nothing to gain.
    """

    strategy: str | None
    headline: str
    notes: list[str]
    gin_lines: list[str]


def recommend(case: Case) -> Recommendation:
    """The best of the strategies that leave a step's samples as they are; a window is only pointed out."""
    if case.num_ranks == 1:
        return Recommendation(None, "Nothing to gain here: a single rank waits for no other.", [], [])
    best = _best_within_a_step(case)
    notes = [
        *_about_the_bound(case),
        *_about_karmarkar_karp(case, best),
        *_about_costs(best),
        *_about_the_window(case),
    ]
    if best.speedup < 1 + LEAST_GAIN:
        headline = (
            f"Nothing to gain here within a step: {best.speedup:.3f} × at best, and less than "
            f"{LEAST_GAIN:.0%} is as much as what this prediction leaves out."
        )
        return Recommendation(None, headline, notes, [])
    headline = f"Switch on {best.strategy.title}: {_times(best)} as fast as loaded."
    return Recommendation(best.strategy.name, headline, notes, best.strategy.gin_lines(case.rows_per_rank))


def _best_within_a_step(case: Case) -> Outcome:
    """The default, unless fewer moves pay, as they may where the network is slow."""
    refined, few_moves = _of(case, REFINED), _of(case, REBALANCE)
    return few_moves if few_moves.speedup > refined.speedup + SAME else refined


def _about_the_bound(case: Case) -> list[str]:
    refined = _of(case, REFINED)
    bound = case.lower_bound.mean
    if bound < HIGH_BOUND:
        return []
    reached = (
        f"No placement of whole samples within a step gets below an imbalance of {bound:.3f} (refined: "
        f"{refined.imbalance.mean:.3f}): single samples cost more than a rank's fair share."
    )
    ways = (
        "Only other steps help: a window, loading by length (BucketSampler), shorter histories, or more "
        "rows per rank, which make the mean load larger (in micro-batches, "
        "TrainerArgs.max_tokens_per_micro_batch, they need no more memory)."
    )
    return [reached, ways]


def _about_karmarkar_karp(case: Case, best: Outcome) -> list[str]:
    differencing = _of(case, KARMARKAR_KARP)
    if best.speedup < 1 + LEAST_GAIN or differencing.speedup < best.speedup - SAME:
        return []
    return ["Equal-size Karmarkar–Karp gives no less on these lengths."]


def _about_costs(best: Outcome) -> list[str]:
    if best.step_seconds is None:
        return []
    notes = []
    if best.exchange_seconds > (1 - LEAST_GAIN) * best.step_seconds:
        notes.append(
            f"The exchange ({duration(best.exchange_seconds)}) takes as long as a step: the network decides, "
            "and not the largest load."
        )
    if not best.planning_is_hidden:
        notes.append(
            f"Planning ({duration(best.planning_seconds)} on this machine) takes longer than a step "
            f"({duration(best.step_seconds)}): training would wait for it."
        )
    return notes


def _about_the_window(case: Case) -> list[str]:
    window = case.outcome(WINDOW)
    without = max(_best_within_a_step(case).speedup, 1.0)
    if window is None or window.speedup < without * (1 + LEAST_GAIN):
        return []
    return [
        f"A window of {window.strategy.window} steps would give {_times(window)}, but it changes training: "
        "steps no longer hold the samples that were drawn for them, and one holds up to "
        f"{window.largest_step:.1f} × the work of its window's mean step. Ask for it with: "
        + ", ".join(window.strategy.gin_lines(case.rows_per_rank)[1:])
    ]


def _of(case: Case, name: str) -> Outcome:
    return next(outcome for outcome in case.outcomes if outcome.strategy.name == name)


def _times(outcome: Outcome) -> str:
    shown = (outcome.speedup_error or 0.0) >= 0.005
    error = f" (±\N{NO-BREAK SPACE}{outcome.speedup_error:.2f})" if shown else ""
    return f"{outcome.speedup:.2f} ×{error}"
