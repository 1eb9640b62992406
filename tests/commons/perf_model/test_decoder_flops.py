from __future__ import annotations

import numpy as np
import pytest
import torch

from commons.perf_model import DecoderFlops

L, D, H, HKV, DH, F = 3, 16, 4, 2, 5, 40


@pytest.mark.parametrize(("gated_mlp", "mlp_factor"), [(False, 4), (True, 6)])
def test_the_formula(gated_mlp, mlp_factor) -> None:
    T = 7
    projections = 2 * T * D * (H + 2 * HKV) * DH + 2 * T * H * DH * D
    per_layer = projections + 4 * T**2 * H * DH + mlp_factor * T * D * F
    flops = DecoderFlops(L, D, H, HKV, DH, F, gated_mlp)
    assert flops.per_sample(torch.tensor([T, 0])).tolist() == [L * per_layer, 0]


def test_a_kernel_that_skips_what_is_masked_computes_the_pairs_that_are_not() -> None:
    tokens = np.array([0, 1, 2, 7, 100_000])
    whole = DecoderFlops(L, D, H, HKV, DH, F).per_sample(tokens)
    skipping = DecoderFlops(L, D, H, HKV, DH, F, skips_masked=True).per_sample(tokens)
    hidden_pairs = tokens * (tokens - 1) // 2
    assert (whole - skipping).tolist() == (L * 4 * H * DH * hidden_pairs).tolist()


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="num_kv_heads is 0; expected at least 1"):
        DecoderFlops(1, 1, 1, 0, 1, 1)
    with pytest.raises(ValueError, match="a sample has -2 tokens"):
        DecoderFlops(1, 1, 1, 1, 1, 1).per_sample(torch.tensor([3, -2]))
