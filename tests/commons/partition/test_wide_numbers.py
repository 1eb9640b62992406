"""Costs in types in which squares of lengths overflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from commons.partition import (
    balance_window,
    imbalance,
    karmarkar_karp,
    longest_processing_time,
    lower_bound,
    pack_micro_batches,
    rebalance,
    refine,
    refined,
)

LENGTHS = np.array([65536, 93000, 131072, 5000, 40000, 92683, 20000, 30000])
HALVES = [np.arange(4), np.arange(4, 8)]
FUNCTIONS = {
    "refined": lambda costs: refined(costs, 4),
    "karmarkar_karp": lambda costs: karmarkar_karp(costs, 4),
    "longest_processing_time": lambda costs: longest_processing_time(costs, 4),
    "rebalance": lambda costs: rebalance(costs, np.arange(8) // 2, 4),
    "refine": lambda costs: refine(costs, HALVES),
    "lower_bound": lambda costs: lower_bound(costs, 4),
    "imbalance": lambda costs: imbalance(costs, HALVES),
    "balance_window": lambda costs: balance_window(costs, 2, 2),
    "pack_micro_batches": lambda costs: pack_micro_batches(costs, LENGTHS, 10**6),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["array", "tensor"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_narrow_costs_are_refused_and_wide_ones_taken(function, make, dtype):
    of = getattr(np if make is np.array else torch, dtype)
    with pytest.raises(ValueError, match=f"workloads is of {dtype}, in which squares and FLOPs overflow"):
        function(make((LENGTHS % 100).tolist(), dtype=of))
    function(make((LENGTHS**2).tolist()))


def test_complex_costs_are_refused():
    with pytest.raises(ValueError, match="complex128, expected real numbers"):
        refined(np.array([1 + 2j, 3]), 2)


def test_tokens_may_be_narrow():
    pack_micro_batches(LENGTHS**2, LENGTHS.astype(np.int32), 10**6)
