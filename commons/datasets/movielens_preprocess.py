"""Prepares MovieLens for training: one row per user, with the user's ratings in order of time.

    python -m commons.datasets.movielens_preprocess --dataset ml-100k [--raw DIR] [--out DIR]

Downloads raw files from GroupLens if they are absent. Writes `meta.json` and `sequences.parquet`, sorted by
user id, with the contextual columns and the list columns items, actions, and timestamps (seconds). An action
id is 1 + the rating's class: 1 to 5 for whole stars, 1 to 10 for half stars. A hash of user and item, which
`meta.json` names, orders ratings of equal time. Age, gender, occupation, and zip code become ids from 1, in
the order of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

from .movielens import MOVIELENS
from .prepared_dataset import run_preprocessor


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. On an error, prints one line and exits with code 1."""
    description = "Prepares a MovieLens dataset for training; downloads it if absent."
    run_preprocessor(MOVIELENS, description, arguments)


if __name__ == "__main__":
    main()
