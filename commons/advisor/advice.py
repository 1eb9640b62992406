"""Advice: which strategy to switch on for each number of ranks, and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from .command_line import CHART_RANKS, Request
from .figures import duration
from .prediction import Case, Outcome, draw_steps, predict
from .samples import TRAINING_FLOPS_PER_FORWARD
from .strategies import (
    AS_LOADED,
    KARMARKAR_KARP,
    PIECES,
    REBALANCE,
    REFINED,
    strategies,
)

LEAST_GAIN = 0.02  # effects that the prediction leaves out may outweigh smaller gains
HIGH_BOUND = 1.05
NOT_PREDICTED = (
    "Not predicted, unless --cost measured them: embedding lookups, the gradients' all-reduce, the "
    "optimizer, memory-bound kernels, slow loaders, and devices of different speeds"
)


@dataclass(frozen=True)
class Recommendation:
    """Advice for one number of ranks; its fields are entries of the JSON output.

    Attributes:
        strategy: name of the strategy to switch on; None if there is nothing to gain.
        headline: the recommendation in a sentence.
        notes: further sentences.
        gin: lines to paste into the gin file; empty if there is nothing to gain or to change, or for a model
            that gin files do not configure.
        python: the pipeline's argument in a program of your own; None if there is nothing to gain.
    """

    strategy: str | None
    headline: str
    notes: list[str]
    gin: list[str]
    python: str | None


@dataclass(frozen=True)
class Advice:
    """The answer to a request.

    Attributes:
        request: the request.
        assumptions: assumptions of the prediction, as sentences without a period.
        cases: the requested pairs of ranks and rows per rank, each with its recommendation.
        over_ranks: cases for the chart of the speedup over ranks; empty without a page.
    """

    request: Request
    assumptions: list[str]
    cases: list[tuple[Case, Recommendation]]
    over_ranks: list[Case]


def advise(request: Request) -> Advice:
    """Answers a request with predictions and recommendations.

    Raises:
        InputError: there are fewer samples than a step needs, or a sample costs too much to count.
    """
    samples = request.samples
    workloads = request.cost.of(samples.tokens)
    sizes = request.bytes_per_item * samples.items
    compared = strategies(request.cost.setting)
    asked = [(ranks, rows) for rows in request.rows_per_rank for ranks in request.ranks]
    charted = []
    if request.html is not None:
        rows = request.rows_per_rank[0]
        charted = [(ranks, rows) for ranks in CHART_RANKS if ranks * rows <= len(samples.items)]
    keys = dict.fromkeys([*asked, *charted])
    drawn = {key: draw_steps(workloads, samples.tokens, sizes, *key) for key in keys}
    del workloads, sizes  # frees their memory before steps are planned
    # A single rank never waits: there is nothing to compare.
    to_plan = {key: compared if key[0] > 1 else compared[:1] for key in drawn}
    if sys.stderr.isatty():
        print("planning; the first run on a machine also compiles, for about 20 s", file=sys.stderr)
    for strategy in compared:
        strategy.warm_up()
    cases = {key: predict(steps, request.cost, to_plan[key], request.network) for key, steps in drawn.items()}
    return Advice(
        request=request,
        assumptions=_assumptions(request, any(strategy.cuts_samples for strategy in compared)),
        cases=[(cases[key], recommend(cases[key], request.gin_settings)) for key in asked],
        over_ranks=[cases[key] for key in charted],
    )


def _assumptions(request: Request, cuts_samples: bool) -> list[str]:
    network, pieces = request.network, request.cost.pieces
    left = "rank" if network.ranks_per_node is None else f"node of {network.ranks_per_node} ranks"
    return [
        *([] if request.samples.origin is None else [request.samples.origin]),
        request.cost.assumption,
        NOT_PREDICTED,
        f"The exchange moves {request.bytes_per_item} bytes per item at {network.bytes_per_second / 1e9:g} "
        f"GB/s per rank, counting bytes that leave a {left}; the pipelines native and prefetch overlap it "
        "with the previous step, none does not",
        *([pieces.assumption(network.bytes_per_second)] if cuts_samples else []),
        "Steps are drawn from the samples in random order, one epoch without replacement after another; "
        "incomplete last steps are left out",
    ]


def recommend(case: Case, gin_settings: Mapping[str, object] | None) -> Recommendation:
    """Recommends the best strategy.

    Another strategy replaces the default only if it gains at least `LEAST_GAIN` more. Without times, the
    speedup ignores the fetch of keys and values, so only a note mentions pieces that fetch some.
    `gin_settings` are the settings of a `Request`.
    """
    if case.ranks == 1:
        return Recommendation(None, "Nothing to gain here: a single rank waits for no other.", [], [], None)
    whole = case.outcomes[REBALANCE]
    for other in (case.outcomes[REFINED], case.outcomes[KARMARKAR_KARP]):
        whole = other if other.speedup >= whole.speedup * (1 + LEAST_GAIN) else whole
    best, cut = whole, case.outcomes.get(PIECES)
    if cut is not None and cut.samples_cut and _gains(cut, whole):
        counts_fetch = cut.step_seconds is not None or not cut.fetch_seconds
        best = cut if counts_fetch else whole
    gains = best.speedup >= 1 + LEAST_GAIN
    notes = [
        *_about_the_bound(case, best),
        *_about_pieces(case, whole, best, gin_settings),
        *(_about_karmarkar_karp(case, best) if gains else []),
        *_about_costs(case, best),
    ]
    if not gains:
        return Recommendation(None, _nothing_to_gain(case, best), notes, [], None)
    return Recommendation(
        strategy=best.strategy.name,
        headline=f"Switch on {best.strategy.title}: at most {best.speedup:.2f} × as fast as without "
        "balancing.",
        notes=notes,
        gin=[] if gin_settings is None else best.strategy.gin_lines(gin_settings),
        python=best.strategy.python,
    )


def _waits_for_planning(case: Case, best: Outcome) -> bool:
    """Returns whether the balanced loads would gain, but planning takes as long as a step."""
    would_gain = best.relative_time * (1 + LEAST_GAIN) <= case.outcomes[AS_LOADED].relative_time
    step, planning = best.step_seconds, best.planning_seconds_measured
    return would_gain and step is not None and planning > (1 - LEAST_GAIN) * step


def _nothing_to_gain(case: Case, best: Outcome) -> str:
    if _waits_for_planning(case, best):
        return f"Nothing to gain here: training would wait for planning, {best.speedup:.2f} × at best."
    return (
        f"Nothing to gain here within a step: {best.speedup:.3f} × at best. Gains below {LEAST_GAIN:.0%} are "
        "smaller than the effects that this prediction leaves out."
    )


def _about_the_bound(case: Case, best: Outcome) -> list[str]:
    if case.lower_bound < HIGH_BOUND or best.strategy.cuts_samples:
        return []
    return [
        "Single samples exceed a rank's fair share: no placement of whole ones gets below "
        f"{case.lower_bound:.3f}. Shorter histories or more rows per rank help."
    ]


def _about_pieces(
    case: Case, whole: Outcome, best: Outcome, gin_settings: Mapping[str, object] | None
) -> list[str]:
    """Returns a note on pieces, if their loads gain at least `LEAST_GAIN` over those of whole samples."""
    cut = case.outcomes.get(PIECES)
    if cut is None or cut.relative_time * (1 + LEAST_GAIN) > whole.relative_time:
        return []
    if best is cut:
        return ["The model and its batches have to support pieces of samples, as HSTU and SID-GR do."]
    if not cut.fetch_seconds or cut.strategy.balance_cost is not None:  # loads are not FLOPs
        return []
    saved = cut.loads.mean() * (whole.relative_time - cut.relative_time)
    break_even = TRAINING_FLOPS_PER_FORWARD * saved / cut.fetch_seconds
    settings = str(cut.strategy.python)
    if gin_settings is not None:
        settings = ", ".join(cut.strategy.gin_lines({**gin_settings, "enable_balanced_shuffler": True}))
    return [
        f"Pieces reach {cut.relative_time:.3f}, and pay off below {break_even / 1e12:.3g} TFLOP/s per "
        f"device: {settings}."
    ]


def _about_karmarkar_karp(case: Case, best: Outcome) -> list[str]:
    """Returns a note if Karmarkar–Karp, the usual method, is about as fast as the best strategy."""
    usual = case.outcomes[KARMARKAR_KARP]
    if best is usual or _gains(best, usual):
        return []
    moves = f"{usual.share_of_samples_moved:.0%} instead of {best.share_of_samples_moved:.0%}"
    return [f"Equal-size Karmarkar–Karp does as well ({usual.speedup:.2f} ×), moving {moves} of the samples."]


def _about_costs(case: Case, best: Outcome) -> list[str]:
    notes, step = [], best.step_seconds
    if step is not None and best.exchange_seconds > (1 - LEAST_GAIN) * step:
        notes.append(
            f"The exchange ({duration(best.exchange_seconds)}) takes as long as a step: the network decides, "
            "not the largest load."
        )
    if _waits_for_planning(case, best):
        notes.append(
            f"Planning ({duration(best.planning_seconds_measured)} on this machine) takes longer than a step "
            "otherwise would, and training waits for it. Balancing among fewer ranks at a time, with a "
            "process_group of the shuffler, would help."
        )
    return notes


def _gains(outcome: Outcome, over: Outcome) -> bool:
    """Returns whether an outcome gains at least `LEAST_GAIN` over another one and over no balancing."""
    return outcome.speedup >= max(over.speedup, 1.0) * (1 + LEAST_GAIN)
