"""Runs a case on this rank, on the CPU and on the recorded GPU."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from . import modes
from .cases import CASES, Place
from .clocks import DEVICE
from .mutants import MUTANTS


@dataclass
class Record:
    """The findings of a case on one rank.

    Attributes:
        is_equal: whether results are those on the CPU, to the bit.
        findings, waits, launches: as of `clocks.Device`.
        error: what it raised, if anything.
    """

    is_equal: bool
    findings: Counter[str]
    waits: Counter[str]
    launches: list[tuple[str, str]]
    error: str = ""


def record(case: str, mutant: str = "", compare: bool = True) -> Record:
    """Runs a case with a fault put in, or none."""
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
    return Record(compare and _equal(results, expected), *found, launches, error)  # type: ignore[arg-type]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and one.is_nested:
        return torch.equal(one.values(), other.values()) and torch.equal(one.offsets(), other.offsets())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, JaggedTensor | KeyedJaggedTensor):
        return torch.equal(one.values(), other.values()) and torch.equal(one.lengths(), other.lengths())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
