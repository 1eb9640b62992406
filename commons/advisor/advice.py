"""Advice: which strategy to switch on for each number of ranks, and why."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tqdm import tqdm

from commons.advisor.command_line import CHART_RANKS, Request
from commons.advisor.figures import duration
from commons.advisor.prediction import Case, Outcome, draw_steps, predict, warm_up
from commons.advisor.samples import TRAINING_FLOPS_PER_FORWARD, SampleLengths
from commons.advisor.strategies import (
    KARMARKAR_KARP,
    REBALANCE,
    REBALANCE_GROUPS,
    REFINED,
    SPLIT,
    WINDOW,
    strategies,
)

LEAST_GAIN = 0.02  # below it, what the prediction leaves out decides
SAME = 0.005  # speedups closer than this count as equal
HIGH_BOUND = 1.05


@dataclass(frozen=True)
class Recommendation:
    """Advice for one number of ranks; its fields are entries of the JSON output.

    Attributes:
        strategy: name of the strategy to switch on; None if there is nothing to gain.
        headline: the recommendation in a sentence.
        notes: further sentences.
        gin: lines to paste into the gin file; empty if there is nothing to gain.
    """

    strategy: str | None
    headline: str
    notes: list[str]
    gin: list[str]


@dataclass(frozen=True)
class Advice:
    """The answer to a request.

    Attributes:
        samples: the data.
        model: in words.
        assumptions: sentences without a period.
        cases: the requested numbers of ranks, each with its recommendation.
        over_ranks: cases for the chart of the speedup over ranks; empty without a page.
    """

    samples: SampleLengths
    model: str
    assumptions: list[str]
    cases: list[tuple[Case, Recommendation]]
    over_ranks: list[Case]


def advise(request: Request) -> Advice:
    """Predicts and recommends what was requested.

    Raises:
        InputError: there are fewer samples than a step needs, or one of them costs too much to count.
    """
    samples = request.samples
    workloads = request.cost.of(samples.tokens)
    sizes = request.bytes_per_item * samples.items
    compared = strategies(
        request.window, request.cost.setting, request.cost.pieces is not None, samples.group_column
    )
    asked = [(ranks, rows) for rows in request.rows_per_rank for ranks in request.ranks]
    charted = []
    if request.html is not None:
        rows = request.rows_per_rank[0]
        charted = [(ranks, rows) for ranks in CHART_RANKS if ranks * rows <= len(sizes)]
    drawn = {
        key: draw_steps(
            workloads,
            samples.tokens,
            sizes,
            *key,
            multiple_of=request.window,
            in_order=samples.in_file_order,
            groups=samples.groups,
            ids=samples.ids if key in asked else None,
        )
        for key in dict.fromkeys([*asked, *charted])
    }
    # A single rank never waits: there is nothing to compare.
    to_plan = {key: compared if key[0] > 1 else compared[:1] for key in drawn}
    total = sum(map(len, to_plan.values())) + 1
    cases: dict[tuple[int, int], Case] = {}
    with tqdm(total=total, desc="planning", file=sys.stderr, disable=None, leave=False) as progress:
        progress.set_postfix_str("compiling, once per machine, for about a minute")
        warm_up(request.cost, compared)
        progress.set_postfix_str("")
        progress.update()
        for key, steps in drawn.items():
            cases[key] = predict(steps, request.cost, to_plan[key], request.network, progress.update)
    return Advice(
        samples=samples,
        model=request.cost.description,
        assumptions=_assumptions(request),
        cases=[(cases[key], recommend(cases[key])) for key in asked],
        over_ranks=[cases[key] for key in charted],
    )


def _assumptions(request: Request) -> list[str]:
    network, pieces = request.network, request.cost.pieces
    left = "rank" if network.ranks_per_node is None else f"node of {network.ranks_per_node} ranks"
    return [
        request.cost.assumption,
        "Not predicted: the gradients' all-reduce, embedding lookups and their communication, and devices of "
        "different speeds",
        f"The exchange moves {request.bytes_per_item} bytes per item at {network.bytes_per_second / 1e9:g} "
        f"GB/s per rank, counting bytes that leave a {left}; the pipelines native and prefetch overlap it "
        "with the previous step, none does not",
        "Pieces of samples are not compared: a measured cost does not tell what a part of a sample costs"
        if pieces is None
        else pieces.assumption(network.bytes_per_second),
        "Steps are those of a loader that keeps the file's order and gives each rank the next rows; they are "
        "spread over the file, and an incomplete last step is left out"
        if request.samples.in_file_order
        else "Steps are drawn from the samples in random order, one epoch without replacement after another; "
        "incomplete last steps are left out",
    ]


def recommend(case: Case) -> Recommendation:
    """Recommends the best strategy that keeps a step's samples; a window is only pointed out.

    Pieces of samples have to gain more than what the prediction leaves out. Without times, the speedup does
    not count the fetch of keys and values, so they are only pointed out, too.
    """
    if case.ranks == 1:
        return Recommendation(None, "Nothing to gain here: a single rank waits for no other.", [], [])
    refined, default = case.outcomes[REFINED], case.outcomes[REBALANCE]
    # The prediction leaves out what a percent of balance costs in lookups and traffic.
    whole = refined if _gains(refined, default) else default
    best, split = whole, case.outcomes.get(SPLIT)
    if split is not None and split.samples_cut and _gains(split, whole):
        counts_fetch = split.step_seconds is not None or not split.fetch_seconds
        best = split if counts_fetch else whole
    gains = best.speedup >= 1 + LEAST_GAIN
    pieces = _about_pieces(case, whole, best)
    notes = [*_about_the_bound(case), *pieces, *_about_different_steps(case, best)]
    if gains and case.outcomes[KARMARKAR_KARP].speedup >= best.speedup - SAME:
        notes.append("Equal-size Karmarkar–Karp does as well on these lengths.")
    if gains:
        notes += _about_lookups(case, best)
    notes += [*_about_costs(best), *_about_the_window(case, best)]
    if not gains:
        within = "a step of whole samples" if pieces else "a step"
        headline = (
            f"Nothing to gain here within {within}: {best.speedup:.3f} × at best, and below {LEAST_GAIN:.0%} "
            "what this prediction leaves out decides."
        )
        return Recommendation(None, headline, notes, [])
    headline = f"Switch on {best.strategy.title}: {_times(best)} as fast as without balancing."
    return Recommendation(best.strategy.name, headline, notes, best.strategy.gin_lines(case.rows_per_rank))


def _about_the_bound(case: Case) -> list[str]:
    bound = case.lower_bound.mean
    if bound < HIGH_BOUND:
        return []
    return [
        f"No placement of whole samples within a step gets below an imbalance of {bound:.3f} (refined: "
        f"{case.outcomes[REFINED].imbalance.mean:.3f}): single samples cost more than a rank's fair share."
    ]


def _about_different_steps(case: Case, best: Outcome) -> list[str]:
    if case.lower_bound.mean < HIGH_BOUND or best.strategy.splits:
        return []
    return [
        "Different steps help: a window, loading by length (BucketSampler), shorter histories, or more rows "
        "per rank, which raise the mean load (in micro-batches, TrainerArgs.max_tokens_per_micro_batch, they "
        "need no more memory)."
    ]


def _about_pieces(case: Case, whole: Outcome, best: Outcome) -> list[str]:
    """Tells what pieces take, if they even out the load more than the best placement of whole samples."""
    split = case.outcomes.get(SPLIT)
    if split is None or split.relative_time * (1 + LEAST_GAIN) > whole.relative_time:
        return []
    if best is split:
        return [
            "The model and its batches have to support pieces of samples, as HSTU and SID-GR do; windows and "
            "micro-batches exclude them."
        ]
    if not split.fetch_seconds:
        return []
    saved = split.loads.mean() * (whole.relative_time - split.relative_time)
    break_even = TRAINING_FLOPS_PER_FORWARD * saved / split.fetch_seconds
    return [
        f"Pieces of samples bring the largest load to {split.relative_time:.3f} × the mean, and fetch keys "
        f"and values for {duration(split.fetch_seconds)} per step. They pay off where a device achieves less "
        f"than {break_even / 1e12:.3g} TFLOP/s, or the network is faster. To use them: "
        + ", ".join(split.strategy.gin_lines(case.rows_per_rank)[1:])
    ]


def _about_lookups(case: Case, best: Outcome) -> list[str]:
    """Names the strategy that keeps ids together, if the best one by speed looks up more of them."""
    kept = case.outcomes.get(REBALANCE_GROUPS, case.outcomes[REBALANCE])
    if best.unique_ids is None or kept.unique_ids is None:
        return []
    more = best.unique_ids.per_rank_relative
    if more < (1 + LEAST_GAIN) * kept.unique_ids.per_rank_relative:
        return []
    return [
        f"With {best.strategy.title}, a rank looks up {more:.2f} × as many unique ids as loaded; with "
        f"{kept.strategy.title}, {kept.unique_ids.per_rank_relative:.2f} × at a speedup of {_times(kept)}. "
        "Speedups exclude lookups: if these dominate your step, measure both. To use it: "
        + ", ".join(kept.strategy.gin_lines(case.rows_per_rank)[1:])
    ]


def _about_costs(best: Outcome) -> list[str]:
    if best.step_seconds is None:
        return []
    notes = []
    if best.exchange_seconds > (1 - LEAST_GAIN) * best.step_seconds:
        notes.append(
            f"The exchange ({duration(best.exchange_seconds)}) takes as long as a step: the network decides, "
            "not the largest load."
        )
    if not best.planning_hidden:
        notes.append(
            f"Planning ({duration(best.planning_seconds_measured)} on this machine) takes longer than a step "
            f"({duration(best.step_seconds)}): training would wait for it."
        )
    return notes


def _about_the_window(case: Case, best: Outcome) -> list[str]:
    window = case.outcomes.get(WINDOW)
    if window is None or not _gains(window, best):
        return []
    return [
        f"A window of {window.strategy.window} steps would give {_times(window)}, but it changes training: "
        "samples move between the steps of a window, and a step has up to "
        f"{window.largest_step_ratio:.1f} × the work of its window's mean step. To use it: "
        + ", ".join(window.strategy.gin_lines(case.rows_per_rank)[1:])
    ]


def _gains(outcome: Outcome, over: Outcome) -> bool:
    """Whether an outcome is better by more than what this prediction leaves out."""
    return outcome.speedup >= max(over.speedup, 1.0) * (1 + LEAST_GAIN)


def _times(outcome: Outcome) -> str:
    error = outcome.speedup_standard_error or 0.0
    shown = f" (±\N{NO-BREAK SPACE}{error:.2f})" if error >= 0.005 else ""
    return f"{outcome.speedup:.2f} ×{shown}"
