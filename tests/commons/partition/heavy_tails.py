"""Histories of realistic lengths, most of them short and few very long, what they cost, and speeds."""

from collections.abc import Callable

import numpy as np

from commons.perf_model import HSTUFlops

Draw = Callable[[np.random.Generator, int], np.ndarray]
LENGTHS: dict[str, Draw] = {
    "lognormal": lambda rng, n: rng.lognormal(5, 1.2, n).clip(1, 4096),
    "zipf": lambda rng, n: rng.zipf(1.2, n).clip(1, 4096),
}
DRAWN_LENGTHS = LENGTHS | {
    "uniform": lambda rng, n: rng.integers(20, 201, n),
    "Pareto": lambda rng, n: (20 * (1 + rng.pareto(1.6, n))).clip(max=4096),
}
SPEEDS: dict[str, Draw] = {
    "equal": lambda rng, n: np.ones(n),
    "one slow": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 0.5, 1.0),
    "two generations": lambda rng, n: rng.choice([1.0, 1.6], n),
    "all different": lambda rng, n: rng.uniform(0.5, 2, n),
}
FLOPS = HSTUFlops(num_layers=1, hidden_size=128, num_heads=1, head_dim=128)
ROWS = 32  # of each rank


def draw_tokens(lengths: str, rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """int64 `[samples]`: an item and an action for each one of the history, and one more."""
    return 2 * LENGTHS[lengths](rng, num_samples).astype(np.int64) + 1


def draw_flops(lengths: str, rng: np.random.Generator, num_samples: int) -> np.ndarray:
    return FLOPS.per_sample(draw_tokens(lengths, rng, num_samples))
