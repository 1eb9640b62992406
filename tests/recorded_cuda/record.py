"""Runs a case on this rank, on the CPU and on the recorded GPU."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

from tests.commons.distributed.loaded_batches import check_identical

from . import modes
from .cases import CASES, Place
from .clocks import DEVICE
from .mutants import MUTANTS


@dataclass
class Record:
    """The findings of a case on one rank.

    Attributes:
        findings, waits, launches: as of `clocks.Device`.
        error: what it raised, if anything.
    """

    findings: Counter[str]
    waits: Counter[str]
    launches: list[tuple[str, str]]
    error: str = ""


def record(case: str, mutant: str = "", compare: bool = True) -> Record:
    """Runs a case with a fault put in, or none; checks that results are those on the CPU, to the bit."""
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    expected = CASES[case](Place(on_cuda=False)) if compare else None
    error, results = "", None
    with modes.recorded_cuda(), MUTANTS[mutant]() if mutant else nullcontext():
        try:
            results = CASES[case](Place(on_cuda=True))
        except Exception as raised:
            if not mutant:
                raise
            error = repr(raised)
        found = [Counter(of) for of in (DEVICE.findings, DEVICE.waits)]
        launches = list(DEVICE.launches)
    if compare:
        check_identical(results, expected, case)
    return Record(*found, launches, error)
