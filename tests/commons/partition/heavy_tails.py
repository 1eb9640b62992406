"""Histories of realistic lengths, most of them short and few very long, and what they cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commons.perf_model import HSTUFlops

LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "lognormal": lambda rng, n: rng.lognormal(5, 1.2, n).clip(1, 4096),
    "zipf": lambda rng, n: rng.zipf(1.2, n).clip(1, 4096),
}
DRAWN_LENGTHS = LENGTHS | {
    "uniform": lambda rng, n: rng.integers(20, 201, n),
    "Pareto": lambda rng, n: (20 * (1 + rng.pareto(1.6, n))).clip(max=4096),
}
FLOPS = HSTUFlops(num_layers=1, hidden_size=128, num_heads=1, head_dim=128)
ROWS = 32  # of each rank


def draw_tokens(lengths: str, rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """int64 `[samples]`: an item and an action for each one of the history, and one more."""
    return 2 * LENGTHS[lengths](rng, num_samples).astype(np.int64) + 1


def draw_flops(lengths: str, rng: np.random.Generator, num_samples: int) -> np.ndarray:
    return FLOPS.per_sample(draw_tokens(lengths, rng, num_samples))
