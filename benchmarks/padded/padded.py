"""Measures `Padded`: computed loads of its plans, steps of two ranks that train, and eight ranks replayed."""

from __future__ import annotations

from benchmarks.harness import Record
from benchmarks.padded.by_length import measure_loading, tabulate_loading
from benchmarks.padded.plans import measure_plans, tabulate_plans
from benchmarks.padded.replay import measure_replay, tabulate_replay
from benchmarks.padded.training import measure_training, tabulate_training


def measure() -> Record:
    """Returns the figures of all parts."""
    return {
        "plans": measure_plans(),
        "loading": measure_loading(),
        "training": measure_training(),
        "replay": measure_replay(),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    return {
        **tabulate_plans(figures["plans"]),
        **tabulate_loading(figures["loading"]),
        **tabulate_training(figures["training"]),
        **tabulate_replay(figures["replay"]),
    }
