"""What could be switched on, by the names and settings of `TrainerArgs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from commons.advisor.drawn_steps import LoadedSteps
from commons.partition import balance_window, karmarkar_karp, rebalance, refined

Placed = list[list[np.ndarray]]

AS_LOADED, KARMARKAR_KARP, REFINED, REBALANCE, WINDOW = (
    "as_loaded",
    "karmarkar_karp",
    "refined",
    "rebalance",
    "window",
)


@dataclass(frozen=True)
class Strategy:
    """A way to place samples.

    Attributes:
        name: as in the JSON output.
        title: as in tables.
        place: from the samples of `window` steps to those of each step and rank.
        settings: fields of `TrainerArgs` that ask for it, whatever stood in the gin file.
        window: steps that are planned together.
    """

    name: str
    title: str
    place: Callable[[LoadedSteps], Placed]
    settings: dict[str, object] = field(default_factory=dict)
    window: int = 1

    def gin_lines(self, rows_per_rank: int) -> list[str]:
        """What to paste into the gin file."""
        settings = {"train_batch_size": rows_per_rank, **self.settings}
        return [f"TrainerArgs.{name} = {value!r}" for name, value in settings.items()]


def strategies(window: int, ranks_per_node: int | None, cost_file: Path | None) -> list[Strategy]:
    """All there are, as loaded first.

    Args:
        window: steps of a window; 1 for no such strategy.
        ranks_per_node: consecutive ranks near each other, which `rebalance` prefers; None where none are.
        cost_file: where what is balanced was measured; None for FLOPs.
    """

    def few_moves(steps: LoadedSteps) -> Placed:
        placed = rebalance(
            steps.workloads, steps.home, steps.num_ranks, sizes=steps.sizes, ranks_per_node=ranks_per_node
        )
        return [placed]

    on: dict[str, object] = {"enable_balanced_shuffler": True}
    if cost_file is not None:
        on["balance_cost"] = str(cost_file)
    all_of = [
        Strategy(AS_LOADED, "as loaded", lambda steps: steps.as_loaded),
        Strategy(
            KARMARKAR_KARP,
            "Karmarkar–Karp",
            _unless_no_better(lambda steps: karmarkar_karp(steps.workloads, steps.num_ranks)),
            {**on, "balance_partitioner": "karmarkar_karp"},
        ),
        Strategy(
            REFINED,
            "refined (default)",
            _unless_no_better(lambda steps: refined(steps.workloads, steps.num_ranks)),
            {**on, "balance_partitioner": "refined"},
        ),
        Strategy(REBALANCE, "rebalance (few moves)", few_moves, {**on, "balance_partitioner": "rebalance"}),
    ]
    if window > 1:
        all_of.append(
            Strategy(
                WINDOW,
                f"window of {window} *",
                lambda steps: balance_window(steps.workloads, steps.num_ranks, steps.num_steps),
                {**on, "balance_partitioner": "refined", "balance_window": window},
                window,
            )
        )
    return all_of


def _unless_no_better(
    place: Callable[[LoadedSteps], list[np.ndarray]],
) -> Callable[[LoadedSteps], Placed]:
    """As the shuffler does it: samples stay where they are loaded, if moving them gains nothing."""

    def placed(steps: LoadedSteps) -> Placed:
        better = place(steps)
        stays = largest_load(steps, steps.as_loaded) <= largest_load(steps, [better])
        return steps.as_loaded if stays else [better]

    return placed


def largest_load(steps: LoadedSteps, placed: Placed) -> float:
    """Of one step."""
    return float(per_rank(steps.workloads, placed).max())


def per_rank(amounts: np.ndarray, placed: Placed) -> np.ndarray:
    """float64 `[steps, ranks]`: sums of something of each sample, added up one by one in the same order."""
    parts = [part for step in placed for part in step]
    rank_of = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    sums = np.bincount(rank_of, amounts[np.concatenate(parts)], minlength=len(parts))
    return sums.reshape(len(placed), -1)


def rank_of_samples(placed: Placed, num_samples: int) -> np.ndarray:
    """int64 `[samples]`: the rank that computes each."""
    parts = [part for step in placed for part in step]
    ranks = np.tile(np.arange(len(placed[0])), len(placed))
    rank_of = np.empty(num_samples, dtype=np.int64)
    rank_of[np.concatenate(parts)] = np.repeat(ranks, [len(part) for part in parts])
    return rank_of
