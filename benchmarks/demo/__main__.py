"""Trains as loaded and balanced in three ways, replays 8 ranks, prints a table and draws the picture.

python -m benchmarks.demo [OUTPUT_FOLDER] [--model MODEL]
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.demo.picture import draw
from benchmarks.demo.replay import RANKS as RANKS_OF_REPLAY
from benchmarks.demo.replay import replay
from benchmarks.demo.table import TITLES, format_duration, tabulate_model
from benchmarks.demo.training import ARMS, TASKS, train
from benchmarks.harness import machine, read_result, run_on_ranks
from commons.perf_model import Cost

RANKS = 2


def main() -> None:
    """Writes `summary.json`, `balance.png` and `learned_cost.json` to the output folder."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", nargs="?", type=Path, default=Path("out/demo"))
    parser.add_argument("--model", choices=sorted(TASKS), default="hstu")
    arguments = parser.parse_args()
    out, model = arguments.out, arguments.model
    print(_announce(model), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    start = time.perf_counter()
    summary = {"model": model, "arms": ARMS, **run_on_ranks(RANKS, train, model)}
    trained = time.perf_counter()
    cost = Cost(**summary["learned_cost"])
    cost.save(out / "learned_cost.json")
    summary |= replay(model, out / "learned_cost.json")
    summary["seconds"] = {"training": trained - start, "replay": time.perf_counter() - trained}
    summary["machine"] = machine()
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(summary, out / "balance.png")
    print(f"\n{tabulate_model(summary)}")
    print(f"\nwritten: {out / 'summary.json'}, {out / 'balance.png'}")


def _announce(model: str) -> str:
    """Returns what the demo will do, and how long that took when the committed results were measured."""
    before = read_result(f"demo/{model}/summary")
    training, replayed = (format_duration(before["seconds"][part]) for part in ("training", "replay"))
    return (
        f"{TITLES[model]} on random histories, in {len(ARMS)} ways: {'; '.join(ARMS)}. On 2 CPU cores,\n"
        f"- training on {RANKS} ranks takes {training}, and about 20 seconds more the first time, to "
        "compile;\n"
        f"- replaying {RANKS_OF_REPLAY} ranks, one after another, takes {replayed}."
    )


if __name__ == "__main__":
    main()
