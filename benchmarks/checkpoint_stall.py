"""Measures how long training stalls for a checkpoint, compared with the time to write it.

Runs an HSTU model on two ranks, with a sharded table of a million rows of 128 numbers.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Record, run_torchrun, summarize

RANKS, ROWS, DIM = 2, 1_000_000, 128
CHECKPOINTS, STEPS_BETWEEN = 8, 60


def measure() -> Record:
    """Returns the size of a checkpoint, and the times of saving and of steps."""
    with TemporaryDirectory() as folder:
        bindings = {
            "train_batch_size": 32,
            "max_train_iters": CHECKPOINTS * STEPS_BETWEEN + 1,
            "ckpt_save_interval": STEPS_BETWEEN,
            "ckpt_save_dir": f"'{folder}/checkpoints'",
            "log_dir": f"'{folder}/logs'",
        }
        settings = [f"TrainerArgs.{name} = {value}" for name, value in bindings.items()]
        settings += [f"item/EmbeddingArgs.item_vocab_size_or_capacity = {ROWS}"]
        settings += [f"NetworkArgs.item_embedding_dim = {DIM}"]
        arguments = ["--gin-config-file", Path(__file__).with_name("soak.gin"), "--gin-bindings", *settings]
        run_torchrun(RANKS, "hstu.training.pretrain_gr_ranking", *arguments)
        checkpoints = sorted((Path(folder) / "checkpoints").iterdir())
        size = sum(path.stat().st_size for path in checkpoints[-1].iterdir())
        lines = [json.loads(line) for line in (Path(folder) / "logs/train.jsonl").read_text().splitlines()]
    return {"checkpoint_mb": round(size / 1e6), **_summarize(lines)}


def _summarize(lines: list[Record]) -> Record:
    """Summarizes all checkpoints except the last, which no steps follow."""
    saved = {line["step"]: line for line in lines if line["kind"] == "checkpoint"}
    saved = {step: line for step, line in saved.items() if step % STEPS_BETWEEN == 0}
    seconds = {line["step"]: line["seconds_per_step"] for line in lines if line["kind"] == "train"}
    while_writing, otherwise = [], []
    for step, line in saved.items():
        left = line["writing_ms"] / 1e3
        for after in range(step + 2, step + STEPS_BETWEEN):  # the step after a save includes the stall
            if after in seconds:
                (while_writing if left > 0 else otherwise).append(seconds[after])
                left -= seconds[after]
    return {
        "stall_ms": summarize([line["stall_ms"] for line in saved.values()]),
        "writing_ms": summarize([line["writing_ms"] for line in saved.values()]),
        "step_ms": round(statistics.median(otherwise) * 1e3, 1),
        "step_while_writing_ms": round(statistics.median(while_writing) * 1e3, 1),
    }


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
    text = (
        "{checkpoint_mb} MB: training stops for {stall_ms[median]:.0f} ms ({stall_ms[min]:.0f} to "
        "{stall_ms[max]:.0f}); writing takes {writing_ms[median]:,.0f} ms ({writing_ms[min]:,.0f} to "
        "{writing_ms[max]:,.0f}), during which steps take {step_while_writing_ms:.0f} ms instead of "
        "{step_ms:.0f} ms"
    )
    return {"checkpoint stall": text.format(**figures)}
