"""Trains as loaded and balanced in three ways, replays 8 ranks, prints a table and draws the picture.

python -m benchmarks.demo [OUTPUT_FOLDER] [--model MODEL]
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.demo.models import TASKS
from benchmarks.demo.picture import draw
from benchmarks.demo.replay import RANKS as RANKS_OF_REPLAY
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
    arms = summary["balanced"]
    first = next(iter(arms.values()))
    rows = [
        ("imbalance", f"{first['imbalance_before']:.3f}", "{imbalance_after:.3f}"),
        ("mean step time", f"{first['seconds_per_step_as_loaded'] * 1e3:.1f} ms", "{milliseconds:.1f} ms"),
        ("speedup", "", "{speedup:.3f}×"),
        ("predicted", "", "{speedup_predicted:.3f}×"),
        ("over all steps", "", "{all_steps:.3f}×"),
        ("95% interval", "", "{interval}"),
        ("predicted", "", "{all_steps_predicted:.3f}×"),
        ("bytes moved", "", "{share_of_bytes_moved:.0%}"),
        ("wait for plans", "", "{plan_wait_ms:.2f} ms"),
        ("sent per rank", "", "{kilobytes_sent:.0f} kB"),
        ("samples cut", "", "{samples_cut_per_step:.2f}"),
        ("fetched per rank", "", "{megabytes_fetched:.1f} MB"),
        ("loss differs by", "", "{max_relative_loss_difference:.0e}"),
    ]
    titles = (summary["as_loaded"], *arms)
    widths = [max(16, len(title) + 2) for title in titles]

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name:<18}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))

    lines = [line("", titles)]
    for name, as_loaded, balanced in rows:
        cells = [balanced.format(**_flat(arm)) for arm in arms.values()]
        lines.append(line(name, (as_loaded, *cells)))
    ends = {arm: sum(max(step) for step in steps) for arm, steps in summary["replay"].items()}
    lines.append(line(f"{RANKS_OF_REPLAY} ranks replayed", [f"{seconds:.1f} s" for seconds in ends.values()]))
    waits = [
        1 - sum(map(sum, steps)) / (ends[arm] * RANKS_OF_REPLAY) for arm, steps in summary["replay"].items()
    ]
    lines.append(line("waiting", [f"{share:.0%}" for share in waits]))
    slowest = next(iter(ends.values()))
    lines.append(line("speedup", ["", *(f"{slowest / seconds:.3f}×" for seconds in list(ends.values())[1:])]))
    lines.append(
        f"({summary['ranks']} ranks of one thread. Trimmed means over {first['steps']} of "
        f"{first['untrimmed']['steps']} steps each.)"
    )
    return "\n".join(lines)


def _flat(arm: dict) -> dict:
    return {
        **arm,
        "milliseconds": arm["seconds_per_step"] * 1e3,
        "plan_wait_ms": arm["plan_wait_seconds_per_step"] * 1e3,
        "megabytes_fetched": arm["bytes_fetched_per_step"] / 1e6,
        "kilobytes_sent": arm["bytes_sent_per_step"] / 1e3,
        "all_steps": arm["untrimmed"]["speedup"],
        "interval": "{:.2f} to {:.2f}".format(*arm["untrimmed"]["speedup_interval"]),
        "all_steps_predicted": arm["untrimmed"]["speedup_predicted"],
    }


if __name__ == "__main__":
    main()
