"""Trains the demo's model on whole samples and on pieces, in turn.

torchrun --nproc_per_node 2 -m benchmarks.split_samples.training OUTPUT.json
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import json
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import gin
import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.demo.models import parse_config
from benchmarks.demo.training import Arm
from benchmarks.machine import speedup_interval, spread
from benchmarks.markdown import markdown_table
from benchmarks.micro_batch.memory import step_memory
from benchmarks.split_samples.batches import history_batch
from benchmarks.split_samples.neighbor import busy_core
from commons.training import rank_process, run_rank

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


def main() -> None:
    """Runs all arms; rank 0 writes the figures."""
    output: Path = parse_arguments(__doc__, output={"type": Path}).output
    make_task = parse_config("hstu")
    with rank_process() as device:

        def arm(lengths: Sequence[Sequence[int]], split: bool, max_tokens: int | None = None) -> Arm:
            settings = {
                "enable_balanced_shuffler": True,
                "balance_equal_rows": False,
                "balance_partitioner": "refined",
                "balance_split": split,
                "balance_max_tokens": max_tokens,
            }
            made = Arm(
                make_task,
                settings,
                device,
                repeat(history_batch(lengths[dist.get_rank()], seed=dist.get_rank())),
            )
            made.run(2, timed=False)
            return made

        giants = [arm(GIANT, split) for split in (False, True)]
        alone = _in_turn("one giant", *giants, BLOCKS)
        with busy_core():
            giants = [arm(GIANT, split) for split in (False, True)]
            busy = _in_turn("one giant, busy cores", *giants, BLOCKS)
        even = _in_turn("nothing to split", *(arm(EVEN, split) for split in (False, True)), EVEN_BLOCKS)
        memory = []
        for num_layers in LAYERS:
            gin.bind_parameter("NetworkArgs.num_layers", num_layers)
            whole, pieces = _memory(arm(((LONGEST_ON_ONE_RANK,), ()), False)), []
            for multiple in tqdm(MULTIPLES, desc=f"{num_layers} layers", disable=dist.get_rank() != 0):
                items = round(multiple * LONGEST_ON_ONE_RANK)
                pieces.append(_memory(arm(((items,), ()), True, int(ROOM * items))))
            longest = _longest(whole, pieces)
            memory.append({"layers": num_layers, "whole": whole, "pieces": pieces, "longest": longest})
        if dist.get_rank() == 0:
            figures = {
                "ranks": RANKS,
                "giant": busy,
                "giant_alone": alone,
                "even": even,
                "memory": memory,
            }
            output.write_text(json.dumps(figures))


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Returns the tables by name."""
    rows = []
    titles = {
        "giant": "one giant of four samples",
        "giant_alone": "the same; a rank that waits leaves its core idle",
        "even": "nothing to split",
    }
    for name, title in titles.items():
        of = figures[name]
        low, high = of["speedup_interval"]
        rows.append(
            [
                title,
                f"{of['imbalance_whole']:.3f}",
                f"{of['imbalance_pieces']:.3f}",
                f"{of['speedup_predicted']:.3f}",
                f"{of['speedup']:.3f} ({low:.3f} to {high:.3f})",
                f"{of['pieces']:.0f}",
                f"{of['megabytes_fetched']:.1f}",
                f"{of['fetch_seconds'] * 1e3:.0f} ms of {of['seconds_pieces']['median'] * 1e3:.0f}",
            ]
        )
    times = markdown_table(
        [
            "samples",
            "imbalance, whole",
            "pieces",
            "predicted",
            "measured speedup",
            "pieces of a step",
            "MB fetched",
            "wait",
        ],
        rows,
    )
    rows = [
        [
            f"{of_model['layers']}",
            f"{of['tokens']:,} on {'one rank' if of is of_model['whole'] else 'two'}",
            f"{of['kept_megabytes']:.1f}",
            f"{of['peak_megabytes']:.1f}",
        ]
        for of_model in figures["memory"]
        for of in (of_model["whole"], *of_model["pieces"])
    ]
    memory = markdown_table(["layers", "tokens of the sample", "kept for backward, MB", "peak, MB"], rows)
    rows = [
        [f"{of['layers']}", *(f"{of['longest'][name]:.2f}" for name in ("kept_megabytes", "peak_megabytes"))]
        for of in figures["memory"]
    ]
    longest = markdown_table(["layers", "at equal memory kept for backward", "at equal peak"], rows)
    return {"step times": times, "memory": memory, "longest": longest}


def _in_turn(title: str, whole: Arm, pieces: Arm, blocks: int) -> dict[str, Any]:
    """Returns the figures of steps on whole samples and on pieces, in turn."""
    for block in tqdm(range(blocks), desc=title, disable=dist.get_rank() != 0):
        for arm in (whole, pieces) if block % 2 else (pieces, whole):
            arm.run(1, timed=True)
    reports = [arm.block_reports[0][0] for arm in (whole, pieces)]
    fetched = [report for block in pieces.block_reports for report in block]
    predicted = reports[0].imbalance_after / reports[1].imbalance_after
    speedup = sum(whole.block_seconds) / sum(pieces.block_seconds)
    return {
        "imbalance_whole": reports[0].imbalance_after,
        "imbalance_pieces": reports[1].imbalance_after,
        "samples_cut": reports[1].samples_cut,
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


def _memory(arm: Arm) -> dict[str, Any]:
    """Returns the memory of a step on the rank with most, for one sample."""
    of_rank = torch.tensor(step_memory(lambda: arm.run(1, timed=True)), dtype=torch.float64)
    dist.all_reduce(of_rank, op=dist.ReduceOp.MAX)
    kept, peak = (of_rank / 1e6).tolist()
    report = arm.block_reports[-1][0]
    return {
        "tokens": int(report.tokens_after.sum()),
        "tokens_of_a_rank": int(report.tokens_after.max()),
        "imbalance": report.imbalance_after,
        "pieces": report.pieces,
        "kept_megabytes": round(kept, 2),
        "peak_megabytes": round(peak, 2),
    }


def _longest(whole: dict[str, Any], pieces: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the longest sequence in pieces ÷ that of one rank, at one rank's memory, interpolated."""
    tokens = [of["tokens"] / whole["tokens"] for of in pieces]
    return {
        name: round(float(np.interp(whole[name], [of[name] for of in pieces], tokens)), 3)
        for name in ("kept_megabytes", "peak_megabytes")
    }


if __name__ == "__main__":
    run_rank(main)
