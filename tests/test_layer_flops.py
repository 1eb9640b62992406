"""The FLOPs of cost models are those that the layers' operations have."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from commons.perf_model import HSTUFlops, transformer_flops
from hstu.modules import HSTUConfig, HSTULayer, batch_attention
from sid_gr.modules import Decoder, DecoderConfig, JaggedCausalAttention
from tests.hstu.modules.attention_cases import mask
from tests.sid_gr.internals import transformer_config
from tests.tiled_attention import tiled_attention


@given(
    samples=st.lists(
        st.tuples(st.sampled_from([0, 1, 40, 70]), st.integers(0, 80), st.integers(0, 40)),
        min_size=1,
        max_size=5,
    ),
    is_causal=st.booleans(),
    disable_contextual_mask=st.booleans(),
    num_layers=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 24), st.integers(1, 4), st.integers(1, 16)),
)
def test_hstu_flops_are_those_of_the_layers(samples, is_causal, disable_contextual_mask, num_layers, sizes):
    contextual, history, candidates = (torch.tensor(column) for column in zip(*samples, strict=True))
    lengths = contextual + history + candidates
    x = torch.randn(int(lengths.sum()), sizes[0])
    masks = [mask(*sample, 1, is_causal) for sample in samples]
    if disable_contextual_mask:
        masks = [replace(each, num_contextual=0) for each in masks]
    attention = batch_attention("pytorch", masks, 50, x.device)
    with FlopCounterMode(display=False) as counter:
        for _ in range(num_layers):
            x = HSTULayer(HSTUConfig(num_layers, *sizes, scaling_seqlen=50))(x, attention)
    layers = HSTUFlops(num_layers, *sizes, is_causal, disable_contextual_mask)
    assert counter.get_total_flops() == int(layers.per_sample(lengths, contextual, candidates).sum())


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    num_layers=st.integers(1, 3),
    hidden_size=st.integers(1, 24),
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 3),
    head_dim=st.integers(1, 16),
    mlp_size=st.integers(1, 50),
    gated_mlp=st.booleans(),
)
def test_decoder_flops_are_those_of_the_layers(
    lengths, num_layers, hidden_size, num_kv_heads, group_size, head_dim, mlp_size, gated_mlp
):
    heads = (num_kv_heads * group_size, head_dim, num_kv_heads)
    config = DecoderConfig(num_layers, hidden_size, *heads, mlp_size, gated_mlp)
    # In float32, norms of a width of two magnify rounding beyond any tolerance.
    decoder = Decoder(config).double()
    x = torch.randn(sum(lengths), hidden_size, dtype=torch.float64)

    def attention(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        samples = zip(*(tensor.split(lengths) for tensor in qkv), strict=True)
        return torch.cat([tiled_attention(*sample) for sample in samples])

    with FlopCounterMode(display=False) as counter:
        tiled = decoder(x, attention)
    torch.testing.assert_close(tiled, decoder(x, JaggedCausalAttention(lengths)), rtol=1e-4, atol=1e-5)
    flops = transformer_flops(transformer_config(config), torch.tensor(lengths))
    assert counter.get_total_flops() == int(flops.sum())
