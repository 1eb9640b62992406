"""Trains on MovieLens 100K with and without the shuffler, and compares what comes out.

Runs the entry point on two ranks for three seeds, dropout 0:

    python -m benchmarks.movielens_equivalence FOLDER_WITH_u.data_AND_u.user
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.machine import machine
from benchmarks.torchrun import torchrun

RESULT = Path(__file__).parent / "results" / "movielens_equivalence.json"
CONFIG = "hstu/training/configs/movielens_100k_ranking.gin"
SEEDS = (1, 2, 3)
RANKS = 2


def main() -> None:
    """Runs the benchmark, prints its figures and writes them to `RESULT`."""
    raw = Path(sys.argv[1])
    rows = []
    with TemporaryDirectory() as folder:
        prepared = Path(folder) / "ml-100k"
        preprocess = ["-m", "commons.datasets.movielens_preprocess", "--dataset", "ml-100k"]
        subprocess.run([sys.executable, *preprocess, "--raw", raw, "--out", prepared], check=True)
        for seed in SEEDS:
            as_loaded, balanced = (
                _aucs(prepared, Path(folder) / f"{seed}-{enable}", seed, enable) for enable in (False, True)
            )
            rows.append({"seed": seed, "as_loaded": as_loaded, "balanced": balanced})
            print(
                f"seed {seed}: AUC {as_loaded[0]:.4f} → {as_loaded[-1]:.4f} as loaded, "
                f"{balanced[0]:.4f} → {balanced[-1]:.4f} balanced, "
                f"difference at the end {abs(as_loaded[-1] - balanced[-1]):.4f}",
                flush=True,
            )
    figures = {"ranks": RANKS, "config": CONFIG, "auc_of_evaluations": rows, "machine": machine()}
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")


def _aucs(dataset: Path, log_dir: Path, seed: int, balanced: bool) -> list[float]:
    """AUC of each evaluation of one run, in order."""
    bindings = [
        f"DatasetArgs.dataset_path='{dataset}'",
        f"TrainerArgs.log_dir='{log_dir}'",
        f"TrainerArgs.seed={seed}",
        f"TrainerArgs.enable_balanced_shuffler={balanced}",
        "NetworkArgs.hidden_dropout=0.0",
    ]
    module = "hstu.training.pretrain_gr_ranking"
    torchrun(RANKS, module, "--gin-config-file", CONFIG, "--gin-bindings", *bindings)
    lines = [json.loads(line) for line in (log_dir / "train.jsonl").read_text().splitlines()]
    return [line["AUC"] for line in lines if line["kind"] == "eval"]


if __name__ == "__main__":
    main()
