"""Tokens and memory of the fullest rank, with and without a token tolerance.

Computed loads and tokens of random histories; drawn cases of any shape, which must not fail; and the bytes
that layers save for backward on the fullest of 8 ranks, whose batches run one after the other.

    python -m benchmarks.token_tolerance
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import markdown_table, publish
from benchmarks.partition.lengths import Lengths, all_lengths
from benchmarks.partition.placements import BYTES_PER_TOKEN, ROWS_PER_RANK, GlobalBatch, draw_batches
from commons.distributed import ShufflerSettings
from commons.partition import imbalance, rebalance, refined
from commons.partition.problem import Problem, number_of_part
from commons.partition.search import target_time
from hstu.modules import HSTULayer, SampleMask, batch_attention

BENCHMARKS = Path(__file__).parent
RESULT, README = BENCHMARKS / "results" / "token_tolerance.json", BENCHMARKS / "README.md"
TOLERANCE = ShufflerSettings.token_tolerance
HIDDEN_SIZES, RANKS = (256, 1024), (8, 64, 1024)
DRAWS, FEWER_DRAWS, TIMED_CALLS = 20, 5, 5
CASES, MOST_PARTS, MOST_SAMPLES = 10_000, 12, 96
ROUNDING = 1 + 1e-6
# Lengths and width are a 16th of those with d = 256, so that attention has the same share of the FLOPs.
REPLAYED_RANKS, REPLAYED_STEPS, SHORTER, WIDTH, LAYERS, HEADS = 8, 5, 16, 16, 2, 2
CPU = torch.device("cpu")


def main() -> None:
    """Prints the tables and writes them to `README`, with `RESULT`."""
    parse_arguments(__doc__)
    torch.set_num_threads(1)
    cases = [(name, size, ranks) for name in histories() for size in HIDDEN_SIZES for ranks in RANKS]
    figures = {
        "token_tolerance": TOLERANCE,
        "placements": [_compare(*case) for case in tqdm(cases, desc="placements")],
        "drawn_cases": _drawn_cases(),
        "memory": _replay(),
        "machine": machine(),
    }
    publish(figures, all_tables(figures), RESULT, README, "token-tolerance")


def histories() -> dict[str, Lengths]:
    """Lengths by name; the first three have the mean, median and limits that were published."""
    published = {
        "Yambda-5B": _lognormal(4763, 2695, 1, 27_738),
        "KuaiRand-27K": _lognormal(11_796, 8591, 100, 228_000),
        "Taobao": _lognormal(101.4, 75, 1, 848),
    }
    return published | all_lengths(None)


def _lognormal(mean: float, median: float, fewest: int, most: int) -> Lengths:
    sigma = np.sqrt(2 * np.log(mean / median))
    return lambda rng, n: rng.lognormal(np.log(median), sigma, n).clip(fewest, most).astype(np.int64)


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


def _compare(lengths: str, hidden_size: int, ranks: int) -> dict[str, Any]:
    """Means over draws of `rebalance` without and with the tolerance, and the extremes that must hold."""
    batches = draw_batches(histories()[lengths], hidden_size, ranks, DRAWS if ranks < 1000 else FEWER_DRAWS)
    arms = {
        name: [_quality(batch, partial(_placed, batch, tolerance)) for batch in batches]
        for name, tolerance in (("without", None), ("with", TOLERANCE))
    }
    of_draws = list(zip(arms["without"], arms["with"], strict=True))
    return {
        "lengths": lengths,
        "hidden_size": hidden_size,
        "ranks": ranks,
        "draws": len(batches),
        **{
            name: {key: round(float(np.mean([each[key] for each in arm])), 5) for key in arm[0]}
            for name, arm in arms.items()
        },
        "largest_load_ratio": round(max(new["load"] / old["load"] for old, new in of_draws), 5),
        "largest_token_growth": round(max(new["tokens"] - old["tokens"] for old, new in of_draws), 5),
    }


def _quality(batch: GlobalBatch, place: Callable[[], list[np.ndarray]]) -> dict[str, float]:
    """Largest ÷ mean load and tokens, percent of samples that left home, and milliseconds of CPU."""
    times = []
    for _ in range(TIMED_CALLS):
        start = time.process_time()
        partition = place()
        times.append(1e3 * (time.process_time() - start))
    moved = number_of_part(partition, len(batch.home)) != batch.home
    return {
        "load": imbalance(batch.workloads, partition),
        "tokens": imbalance(batch.tokens, partition),
        "percent_moved": 100 * float(moved.mean()),
        "ms": min(times),
    }


def _drawn_cases() -> dict[str, int]:
    """Counts what differs for the worse in cases of any sizes, limits, speeds, nodes and homes."""
    counts = {"cases": CASES, "changed": 0, "new_errors": 0, "fuller": 0, "slower": 0, "no_placement": 0}
    rng = np.random.default_rng(0)
    for _ in tqdm(range(CASES), desc="drawn cases"):
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
    names = ("num_partitions", "equal_size", "max_rows", "speeds")
    problem = Problem.of(work, **{name: options[name] for name in names if name in options})
    target = target_time(problem.work, problem.speeds, problem.limits, options["tolerance"])
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
        options["max_rows"] = -(-samples // parts) + int(rng.integers(0, 4))
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


def _replay() -> list[dict[str, Any]]:
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
    for name, place in arms.items():
        saved, tokens, loads = [], [], []
        for batch in tqdm(batches, desc=f"replay {name}"):
            partition = place(batch)
            saved.append([_saved_bytes(layers, batch.tokens[rows]) for rows in partition])
            tokens.append(imbalance(batch.tokens, partition))
            loads.append(imbalance(batch.workloads, partition))
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


def all_tables(figures: dict[str, Any]) -> dict[str, str]:
    """By name; lines of Markdown."""
    return {
        "placements": _placements_table(figures["placements"]),
        "memory": _memory_table(figures["memory"]),
    }


def _placements_table(placements: list[dict[str, Any]]) -> str:
    rows = []
    for record in placements:
        before, after = record["without"], record["with"]
        rows.append(
            [
                record["lengths"],
                str(record["hidden_size"]),
                str(record["ranks"]),
                f"{before['load']:.3f} → {after['load']:.3f}",
                f"{before['tokens']:.3f} → {after['tokens']:.3f}",
                f"{before['percent_moved']:.1f}% → {after['percent_moved']:.1f}%",
                f"{before['ms']:.2f} → {after['ms']:.2f}",
            ]
        )
    titles = ["lengths", "d", "ranks", "largest ÷ mean load", "fullest ÷ mean tokens", "samples moved"]
    return markdown_table([*titles, "ms"], rows)


def _memory_table(memory: list[dict[str, Any]]) -> str:
    rows = [
        [
            record["placement"],
            f"{record['fullest_rank_mb']:.1f} MB",
            f"{record['fullest_rank_mb'] / record['mean_rank_mb']:.3f}",
            f"{record['tokens']:.3f}",
            f"{record['load']:.3f}",
        ]
        for record in memory
    ]
    titles = ["placement", "saved on the fullest rank", "÷ mean", "tokens ÷ mean", "load ÷ mean"]
    return markdown_table(titles, rows)


if __name__ == "__main__":
    main()
