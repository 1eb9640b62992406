"""Drawn problems, and checksums of their plans: the same on every machine, and changed only on purpose."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

# Integers only, which NumPy draws alike on every processor.
WORKLOADS = {
    "giants": lambda rng, count: rng.integers(1, 10, count) ** rng.integers(1, 7, count),
    "heavy": lambda rng, count: rng.integers(1, 30, count) ** 2,
    "ties": lambda rng, count: rng.integers(0, 6, count),
}
SIZES = ((2, 3), (4, 16), (16, 8), (32, 32), (64, 16))  # parts, and samples of each
HOMES = {
    "loaded": lambda rng, parts, rows: np.repeat(np.arange(parts), rows),
    "anywhere": lambda rng, parts, rows: rng.integers(0, parts, parts * rows),
    "one": lambda rng, parts, rows: np.full(parts * rows, parts - 1),
}


def problems() -> Iterator[tuple[np.ndarray, int, dict[str, np.ndarray], np.random.Generator]]:
    """Yields (workloads, parts, homes, a generator for options)."""
    for number, draw in enumerate(WORKLOADS.values()):
        for parts, rows in SIZES:
            rng = np.random.default_rng([number, parts])
            workloads = draw(rng, parts * rows)
            yield workloads, parts, {name: home(rng, parts, rows) for name, home in HOMES.items()}, rng


def checksum(partitions: Iterable[list[np.ndarray]]) -> int:
    number = 0
    for partition in partitions:
        for part in partition:
            number = zlib.crc32(np.append(part, -1).astype("<i8").tobytes(), number)
    return number


def from_home(function: Callable[..., list[np.ndarray]], **options: Any) -> Iterator[list[np.ndarray]]:
    for workloads, parts, homes, rng in problems():
        given = drawn_options(options, workloads, parts, rng)
        for home in homes.values():
            yield function(workloads, home, parts, **given)


def drawn_options(options: dict[str, Any], *problem: Any) -> dict[str, Any]:
    """Returns the options, those that are functions called with (workloads, parts, generator)."""
    return {name: value(*problem) if callable(value) else value for name, value in options.items()}


def tokens(workloads: np.ndarray, parts: int, rng: np.random.Generator) -> np.ndarray:
    return np.array([int(work).bit_length() for work in workloads]) + rng.integers(0, 3, len(workloads))


SPEEDS: Any = {"speeds": lambda workloads, parts, rng: rng.integers(1, 5, parts)}
SIZES_OF: Any = {"sizes": lambda workloads, parts, rng: 1 + rng.integers(0, 1000, len(workloads))}
EVEN_TOKENS: Any = {"tokens": tokens, "token_tolerance": 0.05}
CAPPED: Any = {
    "tokens": tokens,
    "max_tokens": lambda workloads, parts, rng: 12 * len(workloads) // parts + 24,
}
FREE: Any = {"equal_size": False}
