import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from commons.perf_model import HSTUFlops
from hstu.modules import HSTULayer, SampleMask, batch_attention


@given(
    samples=st.lists(
        st.tuples(st.sampled_from([0, 1, 40, 70]), st.integers(0, 80), st.integers(0, 40)),
        min_size=1,
        max_size=5,
    ),
    is_causal=st.booleans(),
    disable_contextual_mask=st.booleans(),
    num_layers=st.integers(1, 3),
    hidden_size=st.integers(1, 24),
    num_heads=st.integers(1, 4),
    head_dim=st.integers(1, 16),
)
@settings(max_examples=40, deadline=None)
def test_hstu_flops_match_the_layers(
    samples, is_causal, disable_contextual_mask, num_layers, hidden_size, num_heads, head_dim
):
    contextual, lengths, candidates = (torch.tensor(column) for column in zip(*samples, strict=True))
    lengths += contextual + candidates
    x = torch.randn(int(lengths.sum()), hidden_size)
    masks = [
        SampleMask(length, 0 if disable_contextual_mask else ahead, length - last, 1, is_causal)
        for ahead, length, last in zip(
            contextual.tolist(), lengths.tolist(), candidates.tolist(), strict=True
        )
    ]
    attention = batch_attention("pytorch", masks, 50, x.device)
    with FlopCounterMode(display=False) as counter:
        for _ in range(num_layers):
            layer = HSTULayer(hidden_size, num_heads, head_dim, dropout=0.2, norm_epsilon=1e-5)
            x = layer(x, attention)
    layers = HSTUFlops(num_layers, hidden_size, num_heads, head_dim, is_causal, disable_contextual_mask)
    flops = layers.per_sample(lengths, contextual, candidates)
    assert counter.get_total_flops() == int(flops.sum())
