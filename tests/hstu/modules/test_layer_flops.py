from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from commons.perf_model import HSTUFlops
from hstu.modules import HSTULayer, SampleMask


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    num_layers=st.integers(1, 3),
    hidden_size=st.integers(1, 24),
    num_heads=st.integers(1, 4),
    head_dim=st.integers(1, 16),
)
@settings(max_examples=40, deadline=None)
def test_hstu_flops_match_the_layers(
    lengths: list[int], num_layers: int, hidden_size: int, num_heads: int, head_dim: int
) -> None:
    x = torch.randn(sum(lengths), hidden_size)
    masks = [SampleMask(length, 0, length, 2, True) for length in lengths]
    with FlopCounterMode(display=False) as counter:
        for _ in range(num_layers):
            layer = HSTULayer(
                hidden_size, num_heads, head_dim, scaling_seqlen=50, dropout=0.2, norm_epsilon=1e-5
            )
            x = layer(x, masks)
    flops = HSTUFlops(num_layers, hidden_size, num_heads, head_dim).per_sample(torch.tensor(lengths))
    assert counter.get_total_flops() == int(flops.sum())
