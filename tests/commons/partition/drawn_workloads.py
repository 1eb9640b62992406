"""Hypothesis strategies for workloads, and kinds of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

MAX_SAMPLES = 40
SMALL = st.integers(0, 50)
LARGE = st.integers(0, 10**15)
FRACTION = st.one_of(st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]), st.floats(0.1, 0.9))
TINY = st.floats(1e-300, 1e-297)
PARTS = st.integers(1, 9)
TOLERANCES = st.sampled_from([0.0, 0.01, 0.1, 0.5])

KINDS = (SMALL, LARGE, SMALL | LARGE | st.just(7), FRACTION, TINY)
WORKLOADS = st.one_of(
    *(st.lists(kind, max_size=MAX_SAMPLES) for kind in KINDS),
    st.builds(lambda value, count: [value] * count, SMALL | LARGE | FRACTION, st.integers(0, MAX_SAMPLES)),
    st.builds(lambda giant, others: [*others, giant], LARGE, st.lists(SMALL, max_size=MAX_SAMPLES)),
)


def _strided(values: list) -> np.ndarray:
    return np.repeat(values, 2)[::2]


def _read_only(values: list) -> np.ndarray:
    return np.broadcast_to(np.array(values, np.float64), len(values))


def _float32(values: list) -> np.ndarray:
    return np.array(values, np.float32)


ARRAYS = [list, tuple, torch.tensor, np.array, _float32, _strided, _read_only]


@st.composite
def homes(draw: st.DrawFn, num_samples: int, num_parts: int, even: bool) -> list[int]:
    """A part for each sample; `even` makes part sizes differ by at most one, else they are any."""
    if even:
        first = draw(st.integers(0, num_parts - 1))
        return draw(st.permutations([(first + i) % num_parts for i in range(num_samples)]))
    return draw(st.lists(st.integers(0, num_parts - 1), min_size=num_samples, max_size=num_samples))


@st.composite
def samples_at_home(
    draw: st.DrawFn, even: bool = False, workloads: st.SearchStrategy[list] = WORKLOADS
) -> tuple[list, list[int], int]:
    """(workloads, home, number of parts)."""
    drawn, num_parts = draw(workloads), draw(PARTS)
    return drawn, draw(homes(len(drawn), num_parts, even)), num_parts


@st.composite
def costs(draw: st.DrawFn, num_samples: int) -> dict[str, Any]:
    """Arguments `sizes` and `ranks_per_node` of `rebalance`."""
    sizes = st.lists(SMALL, min_size=num_samples, max_size=num_samples)
    return {"sizes": draw(st.none() | sizes), "ranks_per_node": draw(st.none() | st.integers(1, 4))}


@st.composite
def caps(draw: st.DrawFn, num_samples: int, num_parts: int) -> dict[str, Any]:
    """Arguments `tokens` and `max_tokens`, which most often can be held."""
    tokens = draw(st.lists(SMALL, min_size=num_samples, max_size=num_samples))
    slack = draw(st.sampled_from([1.0, 1.1, 1.5]))
    most = max(int(np.ceil(slack * sum(tokens) / num_parts)), max(tokens, default=0))
    return {"tokens": tokens, "max_tokens": most}
