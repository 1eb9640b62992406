"""Hypothesis strategies for workloads, and for the other arguments of functions that partition."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np
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


@dataclass(frozen=True)
class Problem:
    workloads: list
    home: list[int]
    parts: int
    equal_size: bool
    options: dict[str, Any]


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


def per_sample(num_samples: int) -> st.SearchStrategy[list[int]]:
    return st.lists(SMALL, min_size=num_samples, max_size=num_samples)


@st.composite
def caps(draw: st.DrawFn, num_samples: int, num_parts: int) -> dict[str, Any]:
    """Arguments `tokens` and `max_tokens`, which most often can be held."""
    tokens = draw(per_sample(num_samples))
    slack = draw(st.sampled_from([1.0, 1.1, 1.5]))
    most = max(int(np.ceil(slack * sum(tokens) / num_parts)), max(tokens, default=0))
    return {"tokens": tokens, "max_tokens": most}


@st.composite
def problems(draw: st.DrawFn, takes: Set[str]) -> Problem:
    """Problems with some of the options that a function takes."""
    workloads, home, parts = draw(samples_at_home(even=draw(st.booleans())))
    strategies = {
        "speeds": st.lists(st.floats(0.3, 3), min_size=parts, max_size=parts),
        "tolerance": TOLERANCES,
        "sizes": per_sample(len(workloads)),
        "ranks_per_node": st.integers(1, 4),
        "max_step_ratio": st.sampled_from([1.0, 1.25, 2.0]),
    }
    options = {name: draw(strategies[name]) for name in strategies if name in takes and draw(st.booleans())}
    if "max_tokens" in takes and draw(st.booleans()):
        options |= draw(caps(len(workloads), parts))
    if "token_tolerance" in takes and draw(st.booleans()):
        options["token_tolerance"] = draw(TOLERANCES)
        options.setdefault("tokens", draw(per_sample(len(workloads))))
    return Problem(workloads, home, parts, draw(st.booleans()), options)
