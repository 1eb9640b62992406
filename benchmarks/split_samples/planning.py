"""CPU time of planning a step with and without cuts, on ranks that really gather.

torchrun --nproc_per_node 8 -m benchmarks.split_samples.planning OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

import hstu.batch_shuffler  # noqa: F401  registers "hstu"
from benchmarks.command_line import parse_arguments
from benchmarks.machine import spread
from benchmarks.markdown import markdown_table
from benchmarks.partition.lengths import lognormal
from benchmarks.split_samples.batches import history_batch
from commons.distributed import BatchShufflerFactory
from commons.perf_model import HSTUFlops
from commons.training import rank_process, run_rank

RANKS = 8
ROWS, STEPS = 32, 200
FLOPS = HSTUFlops(1, 128, 2, 64)


def main() -> None:
    """Plans the same batches in turn, whole and in pieces; rank 0 writes the figures of all ranks."""
    output: Path = parse_arguments(__doc__, output={"type": Path}).output
    with rank_process():
        shufflers = {
            split: BatchShufflerFactory.create(
                "hstu", flops=FLOPS, partitioner="refined", equal_rows=False, split=split
            )
            for split in (False, True)
        }
        rng = np.random.default_rng(dist.get_rank())
        milliseconds: dict[bool, list[float]] = {False: [], True: []}
        cut = 0
        for step in tqdm(range(STEPS), desc="planning", disable=dist.get_rank() != 0):
            batch = history_batch(lognormal(rng, ROWS).tolist(), step)
            for split in (False, True) if step % 2 else (True, False):
                start = time.thread_time()
                plan = shufflers[split].plan(batch)
                milliseconds[split].append((time.thread_time() - start) * 1e3)
                cut += plan.pieces is not None
        medians = [statistics.median(of_one) for of_one in milliseconds.values()]
        of_ranks: list[Any] = [None] * RANKS
        dist.all_gather_object(of_ranks, medians)
        if dist.get_rank() == 0:
            whole, pieces = (list(column) for column in zip(*of_ranks, strict=True))
            figures = {
                "ranks": RANKS,
                "rows_per_rank": ROWS,
                "share_of_steps_cut": cut / STEPS,
                "ms_whole": spread(whole),
                "ms_pieces": spread(pieces),
                "ratio": spread([b / a for a, b in zip(whole, pieces, strict=True)]),
            }
            output.write_text(json.dumps(figures))


def table(figures: dict[str, Any]) -> str:
    """Returns a table with a single row."""
    whole, pieces, ratio = (figures[name] for name in ("ms_whole", "ms_pieces", "ratio"))
    cells = [
        f"{figures['ranks']}",
        f"{figures['share_of_steps_cut']:.0%}",
        f"{whole['median']:.2f}",
        f"{pieces['median']:.2f}",
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
    ]
    return markdown_table(
        ["ranks", "steps with a cut", "whole, ms", "in pieces, ms", "ratio, of each rank"], [cells]
    )


if __name__ == "__main__":
    run_rank(main)
