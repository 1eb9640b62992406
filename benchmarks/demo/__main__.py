"""Trains as loaded, balanced, and balanced in pieces, replays 8 ranks, prints a table, and draws the picture.

python -m benchmarks.demo [OUTPUT_FOLDER] [--model MODEL]
"""

from __future__ import annotations

import commons.quiet_logs  # noqa: F401  isort: skip
import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.demo.picture import draw
from benchmarks.demo.replay import RANKS as RANKS_OF_REPLAY
from benchmarks.demo.replay import replay
from benchmarks.demo.table import TITLES, format_duration, tabulate_model
from benchmarks.demo.training import ARMS, SHOWN, TASKS, train
from benchmarks.harness import machine, read_result, run_on_ranks
from commons.perf_model import Cost

RANKS = 2


def main() -> None:
    """Writes `summary.json` and `balance.png` to the output folder, and with `--all` `learned_cost.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", nargs="?", type=Path, default=Path("out/demo"))
    parser.add_argument("--model", choices=sorted(TASKS), default="hstu")
    parser.add_argument(
        "--all", action="store_true", help="Karmarkar–Karp and learned costs, too, as in benchmarks/README.md"
    )
    arguments = parser.parse_args()
    out, model = arguments.out, arguments.model
    arms = tuple(ARMS) if arguments.all else SHOWN
    print(_announce(model, arms), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    start = time.perf_counter()
    settings = {name: ARMS[name] for name in arms}
    summary = {"model": model, "arms": settings, **run_on_ranks(RANKS, train, model, *arms)}
    trained = time.perf_counter()
    if summary["learned_cost"] is not None:
        Cost(**summary["learned_cost"]).save(out / "learned_cost.json")
    summary |= replay(model, arms, out / "learned_cost.json")
    summary["seconds"] = {"training": trained - start, "replay": time.perf_counter() - trained}
    summary["machine"] = machine()
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(summary, out / "balance.png")
    print(f"\n{tabulate_model(summary)}")
    print(f"\nwritten: {out / 'summary.json'}, {out / 'balance.png'}")


def _announce(model: str, arms: Sequence[str]) -> str:
    """Returns a description of the run, and its duration when the committed results were measured."""
    before = read_result(f"demo/{model}/summary")
    share = len(arms) / len(ARMS)
    training, replayed = (format_duration(share * before["seconds"][part]) for part in ("training", "replay"))
    return (
        f"{TITLES[model]} on random histories, in {len(arms)} ways: {'; '.join(arms)}. On 2 CPU cores,\n"
        f"- training on {RANKS} ranks takes {training}, and about 20 seconds more the first time, to "
        "compile;\n"
        f"- replaying {RANKS_OF_REPLAY} ranks, one after another, takes {replayed}."
    )


if __name__ == "__main__":
    main()
