"""Predicts for gin files, each in a process of its own: two applications' settings have the same names.

python -m tests.commons.advisor.gin_runs FILE.gin...
"""

from __future__ import annotations

import multiprocessing
import sys

# Imported once, for all the processes that are forked from this one: it takes seconds.
import commons.advisor.advice
import commons.training  # noqa: F401
from commons.advisor.__main__ import main

if __name__ == "__main__":
    for path in sys.argv[1:]:
        arguments = [path, "--ranks", "2", "--window", "1", "--json"]
        process = multiprocessing.get_context("fork").Process(target=main, args=(arguments,))
        process.start()
        process.join()
