"""Samples cut into pieces: time of a step, the longest sequence that fits, and the time of planning.

Trains the demo's model on two ranks, on whole samples and on pieces, in turn; and plans on eight.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat

import gin
import numpy as np
import torch
import torch.distributed as dist

import hstu.batch_shuffler  # noqa: F401  registers "hstu"
from benchmarks.demo.training import Arm, parse_config
from benchmarks.harness import (
    Record,
    in_turn,
    machine,
    milliseconds,
    on_ranks,
    progress,
    speedup_interval,
    spread,
    step_memory,
)
from benchmarks.markdown import table
from benchmarks.partition.lengths import lognormal
from commons.datasets import HSTUBatch
from commons.datasets.sample_source import keyed_rows
from commons.distributed import BatchShufflerFactory
from commons.perf_model import HSTUFlops
from hstu.modules import SampleMask, batch_attention

RANKS = 2
# Items of each sample of each rank, which have two tokens each.
GIANT = ((4000, 480), (520, 440))  # one sample is longer than the other three together
EVEN = ((300,) * 8, (300,) * 8)
BLOCKS, EVEN_BLOCKS = 16, 120
LONGEST_ON_ONE_RANK = 2000
# The longest sequence is looked for between these multiples of it.
MULTIPLES = (1.4, 1.6, 1.8, 2.0)
ROOM = 1.02  # tokens that a rank may hold ÷ half the sequence
LAYERS = (2, 4)
PLANNING_RANKS, PLANNED_ROWS, PLANNED_STEPS = 8, 32, 200
FLOPS = HSTUFlops(1, 128, 2, 64)


def measure() -> Record:
    """Returns the figures of the training, and of planning."""
    trained = on_ranks(RANKS, train)
    return {"ranks": RANKS, **trained, "planning": on_ranks(PLANNING_RANKS, plan), "machine": machine()}


def history_batch(lengths: Sequence[int], seed: int) -> HSTUBatch:
    """Returns a batch for the demo's HSTU with samples of these lengths, or with one padding row."""
    rng = np.random.default_rng(seed)
    num_rows = max(len(lengths), 1)

    def ids(high: int, counts: Sequence[int]) -> list[np.ndarray]:
        return [rng.integers(0, high, count) for count in counts]

    actions = ids(5, lengths)
    features = {"user": ids(10_000, [1] * len(lengths)), "item": ids(10_000, lengths), "action": actions}
    return HSTUBatch(
        features=keyed_rows(features, num_rows),
        batch_size=num_rows,
        actual_batch_size=len(lengths),
        feature_to_max_seqlen={"user": 1, "item": max(lengths, default=1), "action": max(lengths, default=1)},
        contextual_feature_names=["user"],
        labels=keyed_rows({"label": actions}, num_rows),
        item_feature_name="item",
        action_feature_name="action",
    )


@contextlib.contextmanager
def _busy_core() -> Iterator[None]:
    """While active, whatever this rank's core has left is taken by attention, at the lowest priority.

    Ranks on one machine share caches and memory, so one computes faster while the other waits. Devices of
    their own would not. With a neighbor per rank, a rank computes as if the others never waited.
    """
    program = f"from {__name__} import keep_busy; keep_busy()"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def keep_busy() -> None:
    """Computes until it is killed."""
    os.nice(19)
    torch.set_num_threads(1)
    attention = batch_attention("pytorch", [SampleMask(4096, 0, 4096, 1, True)], 1, torch.device("cpu"))
    q, k, v = torch.randn(3, 4096, 2, 64, requires_grad=True).unbind()
    while True:
        attention(q, k, v).sum().backward()


def train(device: torch.device) -> Record:
    """Trains on a rank."""
    make_task = parse_config("hstu")
    rank = dist.get_rank()

    def arm(lengths: Sequence[Sequence[int]], split: bool, max_tokens: int | None = None) -> Arm:
        settings = {
            "enable_balanced_shuffler": True,
            "balance_equal_rows": False,
            "balance_partitioner": "refined",
            "balance_split": split,
            "balance_max_tokens": max_tokens,
        }
        batch = history_batch(lengths[rank], seed=rank)
        made = Arm(make_task, settings, device, lambda task: repeat(batch))
        made.run(2, timed=False)
        return made

    def both(lengths: Sequence[Sequence[int]], blocks: int, what: str) -> Record:
        whole, pieces = arm(lengths, False), arm(lengths, True)
        for each in in_turn([whole, pieces], blocks, what):
            each.run(1)
        return _compared(whole, pieces)

    alone = both(GIANT, BLOCKS, "one giant")
    with _busy_core():
        busy = both(GIANT, BLOCKS, "one giant, busy cores")
    even = both(EVEN, EVEN_BLOCKS, "nothing to split")
    memory = []
    for num_layers in LAYERS:
        gin.bind_parameter("NetworkArgs.num_layers", num_layers)
        whole, pieces = _memory(arm(((LONGEST_ON_ONE_RANK,), ()), False), device), []
        for multiple in progress(MULTIPLES, f"{num_layers} layers"):
            items = round(multiple * LONGEST_ON_ONE_RANK)
            pieces.append(_memory(arm(((items,), ()), True, int(ROOM * items)), device))
        longest = _longest(whole, pieces)
        memory.append({"layers": num_layers, "whole": whole, "pieces": pieces, "longest": longest})
    return {"giant": busy, "giant_alone": alone, "even": even, "memory": memory}


def _compared(whole: Arm, pieces: Arm) -> Record:
    """Returns the figures of steps on whole samples and on pieces."""
    reports = [arm.block_reports[0][0] for arm in (whole, pieces)]
    fetched = [report for block in pieces.block_reports for report in block]
    predicted = reports[0].imbalance_after / reports[1].imbalance_after
    speedup = sum(whole.block_seconds) / sum(pieces.block_seconds)
    return {
        "imbalance_whole": reports[0].imbalance_after,
        "imbalance_pieces": reports[1].imbalance_after,
        "pieces": reports[1].pieces,
        "megabytes_fetched": fetched[-1].bytes_fetched / 1e6,
        "fetch_seconds": float(np.median([report.fetch_seconds for report in fetched])),
        "seconds_whole": spread(whole.block_seconds, 4),
        "seconds_pieces": spread(pieces.block_seconds, 4),
        "speedup_predicted": predicted,
        "speedup": speedup,
        "speedup_interval": speedup_interval(whole.block_seconds, pieces.block_seconds),
        "share_of_gain": (speedup - 1) / (predicted - 1) if predicted > 1 else None,
    }


def _memory(arm: Arm, device: torch.device) -> Record:
    """Returns the memory of a step on the rank with most, for one sample."""
    of_rank = torch.tensor(step_memory(lambda: arm.run(1), device), dtype=torch.float64)
    dist.all_reduce(of_rank, op=dist.ReduceOp.MAX)
    kept, peak = (of_rank / 1e6).tolist()
    tokens = int(arm.block_reports[-1][0].tokens_after.sum())
    return {"tokens": tokens, "kept_megabytes": round(kept, 2), "peak_megabytes": round(peak, 2)}


def _longest(whole: Record, pieces: Sequence[Record]) -> dict[str, float]:
    """Returns the longest sequence in pieces ÷ that of one rank, at one rank's memory, interpolated."""
    tokens = [of["tokens"] / whole["tokens"] for of in pieces]
    return {
        name: round(float(np.interp(whole[name], [of[name] for of in pieces], tokens)), 3)
        for name in ("kept_megabytes", "peak_megabytes")
    }


def plan(device: torch.device) -> Record:
    """Plans the same batches in turn, whole and in pieces, on ranks that really gather; CPU time."""
    shufflers = {
        split: BatchShufflerFactory.create(
            "hstu", flops=FLOPS, partitioner="refined", equal_rows=False, split=split
        )
        for split in (False, True)
    }
    rng = np.random.default_rng(dist.get_rank())
    times: dict[bool, list[float]] = {False: [], True: []}
    batches = [history_batch(lognormal(rng, PLANNED_ROWS).tolist(), step) for step in range(PLANNED_STEPS)]
    cut = sum(shufflers[True].plan(batch).pieces is not None for batch in batches)
    for split in in_turn((False, True), PLANNED_STEPS, "planning"):
        batch = batches[len(times[split])]
        times[split].append(milliseconds(partial(shufflers[split].plan, batch), time.thread_time))
    of_ranks: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [statistics.median(of_one) for of_one in times.values()])
    whole, pieces = (list(column) for column in zip(*of_ranks, strict=True))
    return {
        "ranks": dist.get_world_size(),
        "rows_per_rank": PLANNED_ROWS,
        "share_of_steps_cut": cut / PLANNED_STEPS,
        "ms_whole": spread(whole),
        "ms_pieces": spread(pieces),
        "ratio": spread([b / a for a, b in zip(whole, pieces, strict=True)]),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    titles = {
        "giant": "one giant of four samples",
        "giant_alone": "the same; a rank that waits leaves its core idle",
        "even": "nothing to split",
    }
    interval = "{speedup:.3f} ({speedup_interval[0]:.3f} to {speedup_interval[1]:.3f})"
    times = table(
        [figures[name] | {"title": title} for name, title in titles.items()],
        {
            "samples": "{title}",
            "imbalance, whole": "{imbalance_whole:.3f}",
            "pieces": "{imbalance_pieces:.3f}",
            "predicted": "{speedup_predicted:.3f}",
            "measured speedup": interval,
            "pieces of a step": "{pieces:.0f}",
            "MB fetched": "{megabytes_fetched:.1f}",
            "wait": lambda of: (
                f"{of['fetch_seconds'] * 1e3:.0f} ms of {of['seconds_pieces']['median'] * 1e3:.0f}"
            ),
        },
    )
    of_lengths = [
        of | {"layers": of_model["layers"], "on": "one rank" if of is of_model["whole"] else "two"}
        for of_model in figures["memory"]
        for of in (of_model["whole"], *of_model["pieces"])
    ]
    memory = table(
        of_lengths,
        {
            "layers": "{layers}",
            "tokens of the sample": "{tokens:,} on {on}",
            "kept for backward, MB": "{kept_megabytes:.1f}",
            "peak, MB": "{peak_megabytes:.1f}",
        },
    )
    longest = table(
        figures["memory"],
        {
            "layers": "{layers}",
            "at equal memory kept for backward": "{longest[kept_megabytes]:.2f}",
            "at equal peak": "{longest[peak_megabytes]:.2f}",
        },
    )
    planning = table(
        [figures["planning"]],
        {
            "ranks": "{ranks}",
            "steps with a cut": "{share_of_steps_cut:.0%}",
            "whole, ms": "{ms_whole[median]:.2f}",
            "in pieces, ms": "{ms_pieces[median]:.2f}",
            "ratio, of each rank": "{ratio[median]:.2f} ({ratio[min]:.2f} to {ratio[max]:.2f})",
        },
    )
    return {
        "split-samples step times": times,
        "split-samples memory": memory,
        "split-samples longest": longest,
        "split-samples planning": planning,
    }
