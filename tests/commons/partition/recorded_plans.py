"""Drawn problems, and checksums of their plans: the same on every machine, and changed only on purpose."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

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
