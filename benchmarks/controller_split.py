"""Measures the time that a controller needs to split a global batch."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.batches import make_hstu_batch
from benchmarks.harness import Record, machine, summarize, time_in_turns
from commons.datasets import HSTUBatch
from commons.distributed import BatchShuffler
from commons.extensions.controller import split_balanced
from commons.perf_model import HSTUFlops

SAMPLES, CHUNKS, CONTEXTUAL = 512, 16, ["context_0", "context_1", "context_2"]
BATCHES, ROUNDS = 10, 30
GIVEN, ASKED = "split_balanced, workloads given", "split_balanced, shuffler asked"


class FlopsShuffler(BatchShuffler):
    """A shuffler that balances the FLOPs of two HSTU layers of width 128."""

    def get_workloads(self, batch: HSTUBatch) -> torch.Tensor:
        """Returns the forward FLOPs of each row."""
        return HSTUFlops(2, 128, 2, 64).per_sample(2 * batch.features["item"].lengths() + 1)


def measure() -> Record:
    """Returns the times of both calls."""
    rng = np.random.default_rng(0)
    shuffler = FlopsShuffler()
    times: dict[str, list[float]] = {GIVEN: [], ASKED: []}
    for _ in range(BATCHES):
        batch = _draw_batch(rng)
        workloads = shuffler.get_workloads(batch).numpy()
        calls = {
            GIVEN: partial(split_balanced, batch, CHUNKS, workloads),
            ASKED: partial(split_balanced, batch, CHUNKS, shuffler),
        }
        for name, taken in time_in_turns(calls, ROUNDS).items():
            times[name] += taken
    return {"ms": {name: summarize(taken) for name, taken in times.items()}, "machine": machine()}


def _draw_batch(rng: np.random.Generator) -> HSTUBatch:
    """Returns a batch of lognormal histories with labels, and one id per row and contextual feature."""
    history = rng.lognormal(5, 1.2, SAMPLES).clip(1, 1024).astype(np.int64)

    def draw(counts: np.ndarray) -> list[np.ndarray]:
        return [rng.integers(0, 1000, count) for count in counts]

    contextual = {name: draw(np.ones(SAMPLES, dtype=np.int64)) for name in CONTEXTUAL}
    return make_hstu_batch(contextual, draw(history), draw(history), SAMPLES)


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    given, asked = (figures["ms"][name]["median"] for name in (GIVEN, ASKED))
    return {"controller split": f"{given:.1f} ms; {asked:.1f} ms if a shuffler computes the workloads"}
