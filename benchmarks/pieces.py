"""Measures the time of a step in pieces.

Trains the demo's model on two ranks, alternately on whole samples and on pieces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import repeat

import numpy as np
import torch
import torch.distributed as dist

import hstu.batch_shuffler  # noqa: F401  registers "hstu"
from benchmarks.batches import make_history_batch
from benchmarks.demo.training import make_arm, parse_config
from benchmarks.harness import Arm, Record, compare_times, run_on_ranks, summarize, train_in_turn
from benchmarks.markdown import make_table
from hstu.modules import SampleMask, batch_attention

RANKS = 2
# Number of items in each sample of each rank. An item has two tokens.
GIANT = ((4000, 480), (520, 440))  # one sample is longer than the other three together
EVEN = ((300,) * 8, (300,) * 8)
BLOCKS, EVEN_BLOCKS = 16, 120


def measure() -> Record:
    """Returns the figures of training."""
    return {**run_on_ranks(RANKS, train)}


def keep_busy() -> None:
    """Computes at the lowest priority, to keep a core busy, until the process is killed."""
    os.nice(19)
    torch.set_num_threads(1)
    attention = batch_attention("pytorch", [SampleMask(4096, 0, 4096, 1, True)], 1, torch.device("cpu"))
    q, k, v = torch.randn(3, 4096, 2, 64, requires_grad=True).unbind()
    while True:
        attention(q, k, v).sum().backward()


def train(device: torch.device) -> Record:
    """Trains on this rank, and returns the figures."""
    make_task = parse_config("hstu")
    rank = dist.get_rank()

    def compare(lengths: Sequence[Sequence[int]], blocks: int, what: str) -> Record:
        batch = make_history_batch(lengths[rank], seed=rank)
        settings = {
            "enable_balanced_shuffler": True,
            "balance_equal_rows": False,
            "balance_partitioner": "refined",
        }
        whole, pieces = (
            make_arm(make_task, settings | {"balance_split": split}, device, repeat(batch))
            for split in (False, True)
        )
        train_in_turn([whole, pieces], blocks, what)
        return _compare(whole, pieces)

    alone = compare(GIANT, BLOCKS, "one giant")
    # Ranks on one machine share caches and memory, so a rank computes faster while the other waits. Separate
    # devices would not. Beside a busy process on its core, a rank computes as if the others never waited.
    program = f"from {__name__} import keep_busy; keep_busy()"
    with subprocess.Popen([sys.executable, "-c", program]) as other:
        try:
            busy = compare(GIANT, BLOCKS, "one giant, busy cores")
        finally:
            other.kill()
    return {"giant": busy, "giant_alone": alone, "even": compare(EVEN, EVEN_BLOCKS, "nothing to cut")}


def _compare(whole: Arm, pieces: Arm) -> Record:
    """Returns the figures of steps on whole samples and on pieces."""
    reports = pieces.reports
    imbalances = [arm.reports[0].imbalance_after for arm in (whole, pieces)]
    return {
        "imbalance_whole": imbalances[0],
        "imbalance_pieces": imbalances[1],
        "megabytes_fetched": reports[-1].extensions["bytes_fetched"] / 1e6,
        "fetch_seconds": float(np.median([report.extensions["fetch_seconds"] for report in reports])),
        "seconds_pieces": summarize(pieces.block_seconds, 4),
        "speedup_predicted": imbalances[0] / imbalances[1],
        **compare_times(whole, pieces),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    titles = {
        "giant": "one giant of four samples",
        "giant_alone": "the same; a rank that waits leaves its core idle",
        "even": "nothing to cut",
    }
    times = {
        "samples": "{title}",
        "imbalance, whole": "{imbalance_whole:.3f}",
        "pieces": "{imbalance_pieces:.3f}",
        "predicted": "{speedup_predicted:.3f}",
        "measured speedup": "{speedup:.3f} ({speedup_interval[0]:.3f} to {speedup_interval[1]:.3f})",
        "MB fetched": "{megabytes_fetched:.1f}",
        "wait": lambda each: (
            f"{each['fetch_seconds'] * 1e3:.0f} ms of {each['seconds_pieces']['median'] * 1e3:.0f}"
        ),
    }
    trained = [figures[name] | {"title": title} for name, title in titles.items()]
    return {"pieces step times": make_table(trained, times)}
