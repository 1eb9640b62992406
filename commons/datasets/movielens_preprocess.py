"""Prepares MovieLens for training: one row per user, with the user's ratings in order of time.

    python -m commons.datasets.movielens_preprocess --dataset ml-100k [--raw DIR] [--out DIR]

Downloads raw files from GroupLens if they are absent. Writes `meta.json` and `sequences.parquet`, sorted by
user id, with the contextual columns and the list columns items, actions and timestamps. An action id is
1 + the rating's class: 1 to 5 for whole stars, 1 to 10 for half stars. Ratings with equal time are ordered
by a hash of user and item, which `meta.json` names. Age, gender, occupation and zip code become ids from 1 in
the order of their values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import NAME
from .movielens import MOVIELENS


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. Errors print one line and exit with code 1."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}.datasets.movielens_preprocess",
        description="Prepares a MovieLens dataset for training; downloads it if absent.",
    )
    parser.add_argument("--dataset", required=True, choices=list(MOVIELENS))
    parser.add_argument("--raw", type=Path, help="folder of the official files (data/DATASET/raw)")
    parser.add_argument("--out", type=Path, help="folder to write to (data/DATASET)")
    options = parser.parse_args(arguments)
    default = Path("data") / options.dataset
    out_dir = options.out or default
    try:
        MOVIELENS[options.dataset]().prepare(options.raw or default / "raw", out_dir)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{options.dataset} is in {out_dir}")


if __name__ == "__main__":
    main()
