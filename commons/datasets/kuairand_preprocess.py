"""Prepares KuaiRand for training: one row per user, with the user's events in order of time.

    python -m commons.datasets.kuairand_preprocess --dataset kuairand-1k [--raw DIR] [--out DIR]
        [--max-history-seqlen N]

Reads the standard logs of the official files, not the log of randomly exposed videos. Writes `meta.json` and
`sequences.parquet`, sorted by user, with the contextual columns and the list columns items, actions, and
timestamps (milliseconds). An action id is 1 + the event's bits: is_click 1, is_like 2, is_follow 4,
is_comment 8, is_forward 16, is_hate 32, long_view 64, is_profile_enter 128. A hash of user and video, which
`meta.json` names, orders events of equal time. Users and their attributes become ids from 1, in the order of
their values in the users' file. The videos of kept events become ids from 1, in the order of the official
ids. Keeps the newest N events of each user, by default all.

Memory holds a few million events and one id per video, whatever the size of the files, or all events of one
user. All other events wait on disk, in the output folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from .kuairand import KUAIRAND
from .prepared_dataset import run_preprocessor


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. On an error, prints one line and exits with code 1."""
    newest = {"type": int, "metavar": "N", "help": "keep each user's newest N events (all)"}
    description = "Prepares a KuaiRand dataset for training."
    run_preprocessor(KUAIRAND, description, arguments, {"--max-history-seqlen": newest})


if __name__ == "__main__":
    main()
