"""Trains with and without the shuffler, replays 8 ranks, prints a table and draws the picture.

python -m benchmarks.demo [OUTPUT_FOLDER] [--model MODEL]
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import json
from pathlib import Path

import torch

from benchmarks.demo.models import TASKS
from benchmarks.demo.picture import draw
from benchmarks.demo.replay import replay
from benchmarks.machine import machine
from benchmarks.torchrun import torchrun

RANKS = 2


def main() -> None:
    """Writes `summary.json` and `balance.png` to the output folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo")
    parser.add_argument("out", nargs="?", type=Path, default=Path("out/demo"))
    parser.add_argument("--model", choices=sorted(TASKS), default="hstu")
    arguments = parser.parse_args()
    out, model = arguments.out, arguments.model
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    summary = {"model": model, **_train(model, out)}
    summary["replay"] = replay(model)
    summary["machine"] = machine()
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(summary, out / "balance.png")
    print(_table(summary))
    print(f"\nwritten: {out / 'summary.json'}, {out / 'balance.png'}")


def _train(model: str, out: Path) -> dict:
    """The training run, in processes of its own: one rank per process, one thread per rank."""
    result = out / "training.json"
    torchrun(RANKS, "benchmarks.demo.training", model, result)
    summary = json.loads(result.read_text())
    result.unlink()
    return summary


def _table(summary: dict) -> str:
    rows = [
        ("imbalance", f"{summary['imbalance_before']:.3f}", f"{summary['imbalance_after']:.3f}"),
        (
            "mean step time",
            f"{summary['seconds_per_step_identity'] * 1e3:.1f} ms",
            f"{summary['seconds_per_step_balanced'] * 1e3:.1f} ms",
        ),
    ]
    lines = [f"{'':<18}{'as loaded':>12}{'balanced':>12}"]
    lines += [f"{name:<18}{before:>12}{after:>12}" for name, before, after in rows]
    untrimmed = summary["untrimmed"]
    lines += [
        f"{'speedup':<18}{'':>12}{summary['speedup']:>11.3f}×",
        f"{'predicted':<18}{'':>12}{summary['speedup_predicted']:>11.3f}×",
        f"largest relative difference of a step's loss: {summary['max_relative_loss_difference']:.1e}",
        f"({summary['ranks']} ranks of one thread. Trimmed means over {summary['steps']} of "
        f"{untrimmed['steps']} steps each;",
        f"over all: {untrimmed['speedup']:.3f}×, predicted {untrimmed['speedup_predicted']:.3f}×.)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
