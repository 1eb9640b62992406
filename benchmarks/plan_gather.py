"""Compares a channel's gather of a plan, in log2(ranks) rounds, with gloo's own gather, around a ring.

The processes share this machine's cores, so their times are mostly waits for a core. Both gathers alternate
in one run, for a fair ratio.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import Record, show_progress, start_forks, summarize, time_in_turns
from benchmarks.markdown import make_table
from commons.distributed.ranks import Channel

RANKS = (2, 8, 16, 32, 64)
COLUMNS = 8  # int64 numbers that describe an HSTU sample
ROWS = 32  # samples per rank
BYTES_PER_RANK = 8 * COLUMNS * ROWS
ROUNDS = 30


def measure() -> Record:
    """Returns a record for each number of processes."""
    return {"measured": [_fork_ranks(ranks) for ranks in show_progress(RANKS, "gathers")]}


def _fork_ranks(ranks: int) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        for process in start_forks(ranks, _run_rank, ranks, folder):
            process.join()
        return json.loads((Path(folder) / "result.json").read_text())


def _run_rank(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    figures = _measure(rank, ranks)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort while the interpreter shuts down


def _measure(rank: int, ranks: int) -> Record:
    channel = Channel(rank, tuple(range(ranks)), dist.group.WORLD, tag=1)
    row = np.arange(ROWS * COLUMNS) + rank
    mine, gathered = torch.from_numpy(row), torch.empty(ranks * len(row), dtype=torch.int64)
    gathers: dict[str, Callable[[], Any]] = {
        "channel": lambda: channel.all_gather(row),
        "gloo": lambda: dist.all_gather_into_tensor(gathered, mine),
    }
    if not np.array_equal(channel.all_gather(row), row - rank + np.arange(ranks)[:, None]):
        raise RuntimeError("the channel gathered something else than the rows")
    times = time_in_turns(gathers, ROUNDS, clock=time.perf_counter, before_each=dist.barrier)
    return {
        "ranks": ranks,
        "ms": {name: summarize(values) for name, values in times.items()},
        "median_ratio": float(np.median(np.divide(times["channel"], times["gloo"]))),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    columns = {
        "processes": "{ranks}",
        "gloo, ms": "{ms[gloo][median]:.1f} ({ms[gloo][min]:.1f} to {ms[gloo][max]:.1f})",
        "ours, ms": "{ms[channel][median]:.1f} ({ms[channel][min]:.1f} to {ms[channel][max]:.1f})",
        "median ratio": "{median_ratio:.2f}",
    }
    return {"plan-gather gloo": make_table(figures["measured"], columns)}
