"""FLOPs are exact in any integers, or refused where int64 ends."""

import numpy as np
import pytest
import torch

from commons.perf_model import HSTUFlops, TransformerConfig, transformer_flops


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
@pytest.mark.parametrize("kind", [torch.from_numpy, np.array])
def test_the_work_of_all_first_tokens_is_that_of_the_sample(kind, dtype):
    model = HSTUFlops(num_layers=8, hidden_size=1024, num_heads=4, head_dim=256)
    lengths = np.array([0, 1, 100, 4096, 8191])
    tokens, expected = kind(lengths.astype(dtype)), model.work(lengths).tolist()
    assert model.work(tokens).tolist() == model.prefix_work(tokens, tokens).tolist() == expected


def test_a_context_of_more_flops_than_int64_holds_is_refused():
    scout = TransformerConfig(
        num_layers=48,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=8192,
        gated_mlp=True,
        num_experts=16,
        experts_per_token=1,
        num_shared_experts=1,
        vocab_size=202048,
    )
    lengths = [1_000_000, 2_000_000, 4_000_000]
    costs = transformer_flops(scout, torch.tensor(lengths)).tolist()
    assert 0 < costs[0] < costs[1] < costs[2]
    with pytest.raises(ValueError, match="9000000 tokens do not fit an int64: count in another unit"):
        transformer_flops(scout, torch.tensor([*lengths, 9_000_000]))
