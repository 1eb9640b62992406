"""Tokens and memory of the fullest rank, with and without a token tolerance.

Computed loads and tokens of random histories; drawn cases of any shape, which must not fail; and the bytes
that layers save for backward on the fullest of 8 ranks, whose batches run one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Record, cases, machine, means, measured, progress, timed
from benchmarks.markdown import table
from benchmarks.partition.lengths import PUBLISHED, Lengths, all_lengths
from benchmarks.partition.placements import BYTES_PER_TOKEN, ROWS_PER_RANK, GlobalBatch, draw_batches
from commons.distributed import ShufflerSettings
from commons.partition import imbalance, rebalance, refined
from commons.partition.problem import Problem, number_of_part
from hstu.modules import HSTULayer, SampleMask, batch_attention

TOLERANCE = ShufflerSettings.token_tolerance
HIDDEN_SIZES, RANKS = (256, 1024), (8, 64, 1024)
DRAWS, FEWER_DRAWS, TIMED_CALLS = 20, 5, 5
CASES, MOST_PARTS, MOST_SAMPLES = 10_000, 12, 96
ROUNDING = 1 + 1e-6
# Lengths and width are a 16th of those with d = 256, so that attention has the same share of the FLOPs.
REPLAYED_RANKS, REPLAYED_STEPS, SHORTER, WIDTH, LAYERS, HEADS = 8, 5, 16, 16, 2, 2
CPU = torch.device("cpu")


def measure() -> Record:
    """Returns records of computed placements, counts of drawn cases, and the memory of replayed ones."""
    of_all = cases(lengths=histories(), hidden_size=HIDDEN_SIZES, ranks=RANKS)
    return {
        "token_tolerance": TOLERANCE,
        "placements": measured(of_all, _compare, "placements"),
        "drawn_cases": _drawn_cases(),
        "memory": _replay(),
        "machine": machine(),
    }


def histories() -> dict[str, Lengths]:
    """Returns lengths by name, those of public data sets first."""
    lengths = all_lengths(None)
    return {name: lengths[name] for name in (*PUBLISHED, *lengths)}


def _placed(batch: GlobalBatch, token_tolerance: float | None) -> list[np.ndarray]:
    tokens = None if token_tolerance is None else batch.tokens
    return rebalance(
        batch.workloads,
        batch.home,
        batch.ranks,
        sizes=batch.sizes,
        tokens=tokens,
        token_tolerance=token_tolerance,
    )


def _compare(lengths: str, hidden_size: int, ranks: int) -> Record:
    """Means over draws of `rebalance` without and with the tolerance, and the extremes that must hold."""
    batches = draw_batches(histories()[lengths], hidden_size, ranks, DRAWS if ranks < 1000 else FEWER_DRAWS)
    arms = {
        name: [_quality(batch, partial(_placed, batch, tolerance)) for batch in batches]
        for name, tolerance in (("without", None), ("with", TOLERANCE))
    }
    of_draws = list(zip(arms["without"], arms["with"], strict=True))
    return {
        "draws": len(batches),
        **{name: means(arm) for name, arm in arms.items()},
        "largest_load_ratio": round(max(new["load"] / old["load"] for old, new in of_draws), 5),
        "largest_token_growth": round(max(new["tokens"] - old["tokens"] for old, new in of_draws), 5),
    }


def _quality(batch: GlobalBatch, place: Callable[[], list[np.ndarray]]) -> dict[str, float]:
    """Largest ÷ mean load and tokens, percent of samples that left home, and milliseconds of CPU."""
    calls = [timed(place, time.process_time) for _ in range(TIMED_CALLS)]
    partition = calls[0][0]
    moved = number_of_part(partition, len(batch.home)) != batch.home
    return {
        "load": imbalance(batch.workloads, partition),
        "tokens": imbalance(batch.tokens, partition),
        "percent_moved": 100 * float(moved.mean()),
        "ms": min(taken for _, taken in calls),
    }


def _drawn_cases() -> dict[str, int]:
    """Counts what differs for the worse in cases of any sizes, limits, speeds, nodes and homes."""
    counts = {"cases": CASES, "changed": 0, "new_errors": 0, "fuller": 0, "slower": 0, "no_placement": 0}
    rng = np.random.default_rng(0)
    for _ in progress(range(CASES), "drawn cases"):
        function, work, tokens, options = _drawn(rng)
        speeds = options.get("speeds")
        try:
            without = function(work, **options)
        except ValueError:
            counts["no_placement"] += 1
            continue
        try:
            partition = function(
                work, **options | {"tokens": tokens, "token_tolerance": rng.choice([0, 0.1])}
            )
        except Exception:
            counts["new_errors"] += 1
            continue
        reached, allowed = imbalance(work, partition, speeds), _allowed(work, options)
        counts["changed"] += not all(map(np.array_equal, partition, without))
        counts["fuller"] += imbalance(tokens, partition) > imbalance(tokens, without)
        counts["slower"] += reached > max(allowed, imbalance(work, without, speeds)) * ROUNDING
    return counts


def _allowed(work: np.ndarray, options: dict[str, Any]) -> float:
    """The imbalance that the tolerance allows under limits on rows."""
    names = ("num_partitions", "equal_size", "speeds")
    problem = Problem.of(work, **{name: options[name] for name in names if name in options})
    target = problem.target(options["tolerance"])
    return float(target / max(problem.work.sum() / problem.speeds.sum(), 1))


def _drawn(
    rng: np.random.Generator,
) -> tuple[Callable[..., list[np.ndarray]], np.ndarray, np.ndarray, dict[str, Any]]:
    """A function, workloads, tokens, and the other options."""
    parts, samples = int(rng.integers(1, MOST_PARTS)), int(rng.integers(0, MOST_SAMPLES))
    tokens = rng.lognormal(4, rng.choice([0, 1, 2]), samples).astype(np.int64)
    work = tokens * (tokens + rng.choice([1, 100, 10_000])) if rng.random() < 0.7 else rng.permutation(tokens)
    options: dict[str, Any] = {
        "num_partitions": parts,
        "equal_size": bool(rng.random() < 0.5),
        "tolerance": float(rng.choice([0, 0.01, 0.1])),
    }
    if rng.random() < 0.3:
        most = int(tokens.sum() / parts * rng.uniform(1, 1.5)) + 1
        options |= {"tokens": tokens, "max_tokens": max(most, int(tokens.max(initial=0)))}
    if rng.random() < 0.3:
        options["speeds"] = rng.uniform(0.3, 3, parts)
    if rng.random() < 0.4:
        return refined, work, tokens, options
    options["home"] = rng.integers(0, parts, samples)
    if rng.random() < 0.5:
        options["sizes"] = BYTES_PER_TOKEN * tokens
    if rng.random() < 0.3:
        options["ranks_per_node"] = int(rng.integers(1, 5))
    return rebalance, work, tokens, options


def _replay() -> list[Record]:
    """Bytes that forward saves for backward on the fullest rank, means over steps."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        HSTULayer(WIDTH, HEADS, WIDTH // HEADS, 0.0, 1e-5) for _ in range(LAYERS)
    ).to(CPU)
    yambda = histories()["Yambda-5B"]
    batches = draw_batches(lambda rng, n: yambda(rng, n) // SHORTER, WIDTH, REPLAYED_RANKS, REPLAYED_STEPS)
    as_loaded = np.split(np.arange(ROWS_PER_RANK * REPLAYED_RANKS), REPLAYED_RANKS)
    arms: dict[str, Callable[[GlobalBatch], list[np.ndarray]]] = {
        "as loaded": lambda batch: as_loaded,
        "balanced, without": lambda batch: _placed(batch, None),
        "balanced, with": lambda batch: _placed(batch, TOLERANCE),
    }
    records = []
    for name, place in progress(arms.items(), "replay"):
        partitions = [place(batch) for batch in batches]
        placed = list(zip(batches, partitions, strict=True))
        saved = [[_saved_bytes(layers, batch.tokens[rows]) for rows in ranks] for batch, ranks in placed]
        tokens, loads = (
            [imbalance(of_batch, ranks) for of_batch, ranks in zip(figures, partitions, strict=True)]
            for figures in ([batch.tokens for batch in batches], [batch.workloads for batch in batches])
        )
        records.append(
            {
                "placement": name,
                "fullest_rank_mb": round(float(np.max(saved, 1).mean()) / 1e6, 2),
                "mean_rank_mb": round(float(np.mean(saved)) / 1e6, 2),
                "tokens": round(float(np.mean(tokens)), 4),
                "load": round(float(np.mean(loads)), 4),
            }
        )
    return records


def _saved_bytes(layers: torch.nn.ModuleList, tokens: np.ndarray) -> int:
    """Returns the bytes of different memory that forward on samples of these lengths saves."""
    masks = [SampleMask(length, 0, length, 1, is_causal=True) for length in tokens.tolist()]
    attention = batch_attention("pytorch", masks, int(tokens.max()), CPU)
    storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address comes twice
    weights = {each.untyped_storage().data_ptr() for each in layers.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    x = torch.randn(int(tokens.sum()), WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        for layer in layers:
            x = layer(x, attention)
    return sum(storage.nbytes() for address, storage in storages.items() if address not in weights)


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    placements = table(
        figures["placements"],
        {
            "lengths": "{lengths}",
            "d": "{hidden_size}",
            "ranks": "{ranks}",
            "largest ÷ mean load": "{without[load]:.3f} → {with[load]:.3f}",
            "fullest ÷ mean tokens": "{without[tokens]:.3f} → {with[tokens]:.3f}",
            "samples moved": "{without[percent_moved]:.1f}% → {with[percent_moved]:.1f}%",
            "ms": "{without[ms]:.2f} → {with[ms]:.2f}",
        },
    )
    memory = table(
        figures["memory"],
        {
            "placement": "{placement}",
            "saved on the fullest rank": "{fullest_rank_mb:.1f} MB",
            "÷ mean": lambda record: f"{record['fullest_rank_mb'] / record['mean_rank_mb']:.3f}",
            "tokens ÷ mean": "{tokens:.3f}",
            "load ÷ mean": "{load:.3f}",
        },
    )
    return {"token-tolerance placements": placements, "token-tolerance memory": memory}
