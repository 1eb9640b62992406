"""The answer for machines."""

from __future__ import annotations

import json
from typing import Any

from commons.advisor.advice import Advice
from commons.advisor.prediction import Case, Outcome, Spread
from commons.advisor.recommendation import Recommendation

VERSION = 1  # of the format: entries may be added to it, none change their meaning


def json_report(advice: Advice) -> str:
    """A JSON object; seconds, bytes and ratios as plain numbers, null where something is not known."""
    lengths = advice.lengths
    report = {
        "version": VERSION,
        "data": {
            "source": advice.samples.source,
            "samples": lengths.samples,
            "tokens": advice.samples.token_rule,
            "length": {
                "min": lengths.smallest,
                "mean": lengths.mean,
                "median": lengths.median,
                "p99": lengths.percentile_99,
                "max": lengths.largest,
            },
        },
        "model": advice.model,
        "assumptions": advice.assumptions,
        "cases": [_case(case, recommendation) for case, recommendation in advice.cases],
    }
    return json.dumps(report, indent=1, ensure_ascii=False)


def _case(case: Case, recommendation: Recommendation) -> dict[str, Any]:
    return {
        "ranks": case.num_ranks,
        "rows_per_rank": case.rows_per_rank,
        "steps_drawn": case.num_steps,
        "epochs_drawn": case.num_epochs,
        "lower_bound": _spread(case.lower_bound),
        "mean_tokens_per_rank": case.mean_tokens,
        "bytes_loaded_per_rank": case.bytes_loaded,
        "all_gather_bytes_per_rank": case.all_gather_bytes,
        "strategies": [_outcome(case, outcome) for outcome in case.outcomes],
        "recommendation": {
            "strategy": recommendation.strategy,
            "headline": recommendation.headline,
            "notes": recommendation.notes,
            "gin": recommendation.gin_lines,
        },
    }


def _outcome(case: Case, outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.strategy.name,
        "window": outcome.strategy.window,
        "changes_step_contents": outcome.strategy.window > 1,
        "imbalance": _spread(outcome.imbalance),
        "relative_time": outcome.relative_time,
        "speedup": outcome.speedup,
        "speedup_standard_error": outcome.speedup_error,
        "speedup_exchange_not_hidden": outcome.exposed_speedup,
        "step_seconds": outcome.step_seconds,
        "exchange_seconds": outcome.exchange_seconds,
        "bytes_sent_per_rank": outcome.bytes_sent,
        "bytes_of_slowest_rank": outcome.bytes_slowest,
        "share_of_bytes_across_nodes": outcome.share_across_nodes,
        "share_of_samples_moved": outcome.samples_moved,
        "largest_tokens_per_rank": outcome.largest_tokens,
        "most_tokens_per_rank": outcome.most_tokens,
        "largest_step_ratio": outcome.largest_step,
        "host_batches_per_rank": outcome.host_batches,
        "host_bytes_per_rank": outcome.host_batches * case.bytes_loaded,
        "planning_seconds_measured": outcome.planning_seconds,
        "planning_hidden": outcome.planning_is_hidden,
        "gin": outcome.strategy.gin_lines(case.rows_per_rank),
    }


def _spread(spread: Spread) -> dict[str, float | None]:
    return {"mean": spread.mean, "std": spread.std}
