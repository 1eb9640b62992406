"""Plans of drawn problems by their checksums: the same on every machine, and changed only on purpose.

`python -m tests.commons.partition.test_same_plans` prints the checksums of today, for a change of the search;
with a number, those of so many sizes.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commons.partition import karmarkar_karp, longest_processing_time, rebalance, refined
from tests.commons.partition import recorded_plans
from tests.commons.partition.internals import refine
from tests.commons.partition.recorded_plans import (
    CAPPED,
    EVEN_TOKENS,
    FREE,
    HOMES,
    SIZES_OF,
    SPEEDS,
    WORKLOADS,
    checksum,
    drawn_options,
    from_home,
    problems,
)

FEW_SIZES = 2  # the first ones, small enough for Python


def from_scratch(function: Any, **options: Any) -> Iterator[list[np.ndarray]]:
    for workloads, parts, _, rng in problems():
        yield function(workloads, parts, **drawn_options(options, workloads, parts, rng))


def from_home_with_giants(**options: Any) -> Iterator[list[np.ndarray]]:
    """Giants in a third of the parts, which need the lightest samples of all next to them."""
    for number in range(4):
        parts, rows, rng = 200, 32, np.random.default_rng(number)
        workloads = rng.integers(1, 50, parts * rows) ** 2
        workloads[rng.integers(0, 70, parts * rows) == 0] = 60_000
        yield rebalance(workloads, HOMES["loaded"](rng, parts, rows), parts, **options)


def from_uneven_homes(**options: Any) -> Iterator[list[np.ndarray]]:
    """Parts of few samples, some with one more than others, and with none at first."""
    for number, draw in enumerate(WORKLOADS.values()):
        for parts, rows in ((8, 1), (5, 3), (64, 12)):
            rng = np.random.default_rng([number, parts])
            workloads = draw(rng, parts * rows + parts // 2)
            home = rng.integers(0, parts, len(workloads)) // 2
            yield rebalance(workloads, home, parts, **drawn_options(options, workloads, parts, rng))


def from_few_samples() -> Iterator[list[np.ndarray]]:
    """Parts of one sample or two, of unequal speeds."""
    parts, count = 8, 11
    for seed in range(60):
        rng = np.random.default_rng([seed, parts, count - parts])
        workloads = rng.integers(1, 30, count) ** 2 if seed % 2 else rng.integers(5, 10, count) ** 2
        home = rng.integers(0, parts, count) if seed % 3 else np.arange(count) % parts
        speeds = rng.integers(1, 6, parts) if seed % 4 else None
        yield rebalance(workloads, home, parts, sizes=1 + rng.integers(0, 50, count), speeds=speeds)


def from_home_refined(**options: Any) -> Iterator[list[np.ndarray]]:
    for workloads, parts, homes, _ in problems():
        yield refine(workloads, [np.flatnonzero(homes["loaded"] == part) for part in range(parts)], **options)


# A checksum, and the plans that have it.
CASES: dict[str, tuple[int, Callable[[], Iterator[list[np.ndarray]]]]] = {
    "longest first": (1042925196, partial(from_scratch, longest_processing_time)),
    "longest first, speeds": (2724253986, partial(from_scratch, longest_processing_time, **FREE, **SPEEDS)),
    "differencing": (131250813, partial(from_scratch, karmarkar_karp)),
    "differencing, speeds": (1706986171, partial(from_scratch, karmarkar_karp, **FREE, **SPEEDS)),
    "refined": (1770819663, partial(from_scratch, refined)),
    "refined, speeds": (2166340229, partial(from_scratch, refined, **SPEEDS)),
    "refined, free sizes": (3288448745, partial(from_scratch, refined, **FREE)),
    "refined, even tokens": (2533741858, partial(from_scratch, refined, **EVEN_TOKENS)),
    "refined, capped": (2168221655, partial(from_scratch, refined, **FREE, **CAPPED)),
    "refine": (1018996232, partial(from_home_refined, tolerance=0.01)),
    "rebalance": (2354175167, partial(from_home, rebalance)),
    "rebalance, giants": (3972639652, from_home_with_giants),
    "rebalance, giants, nodes": (2349342089, partial(from_home_with_giants, ranks_per_node=8)),
    "rebalance, uneven": (163088084, from_uneven_homes),
    "rebalance, uneven, speeds": (2307622173, partial(from_uneven_homes, **SPEEDS, **SIZES_OF)),
    "rebalance, uneven, even tokens, nodes": (
        4141734119,
        partial(from_uneven_homes, **EVEN_TOKENS, ranks_per_node=4),
    ),
    "rebalance, few samples": (1818372581, from_few_samples),
    "rebalance, sizes": (799575383, partial(from_home, rebalance, **SIZES_OF)),
    "rebalance, free sizes": (1737064084, partial(from_home, rebalance, **FREE, **SIZES_OF)),
    "rebalance, speeds": (3959369073, partial(from_home, rebalance, **SPEEDS)),
    "rebalance, nodes": (1605550342, partial(from_home, rebalance, ranks_per_node=2, **SIZES_OF)),
    "rebalance, nodes, speeds": (
        477413558,
        partial(from_home, rebalance, ranks_per_node=4, **SPEEDS, **EVEN_TOKENS),
    ),
    "rebalance, even tokens": (3810078557, partial(from_home, rebalance, **EVEN_TOKENS)),
    "rebalance, even tokens, nodes": (
        294126228,
        partial(from_home, rebalance, ranks_per_node=4, **EVEN_TOKENS, **SIZES_OF),
    ),
    "rebalance, capped": (2060703752, partial(from_home, rebalance, **FREE, **CAPPED)),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_are_the_same_on_every_machine(name):
    expected, plans = CASES[name]
    assert checksum(plans()) == expected


def test_plans_are_the_same_without_compiling(monkeypatch):
    """Python checks the bounds of arrays, which compiled functions may write past without a word."""
    monkeypatch.setattr(recorded_plans, "SIZES", recorded_plans.SIZES[:FEW_SIZES])
    result = subprocess.run(
        [sys.executable, "-m", "tests.commons.partition.test_same_plans", str(FEW_SIZES)],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONHASHSEED": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == show_checksums()


def show_checksums() -> str:
    return "".join(f'    "{name}": {checksum(plans())},\n' for name, (_, plans) in CASES.items())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        recorded_plans.SIZES = recorded_plans.SIZES[: int(sys.argv[1])]
    print(show_checksums(), end="")
