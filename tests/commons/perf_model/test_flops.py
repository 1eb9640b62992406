from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from commons.perf_model import HSTUFlops, TransformerConfig, transformer_flops
from tests.tiled_attention import tiled_attention

DENSE = TransformerConfig(num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=4, head_dim=6, mlp_size=40)
MIXTURE = replace(DENSE, num_experts=5, experts_per_token=2)
DECODERS = {
    "dense": DENSE,
    "grouped heads": replace(DENSE, num_kv_heads=2),
    "gated": replace(DENSE, gated_mlp=True),
    "experts": MIXTURE,
    "gated and shared experts": replace(MIXTURE, gated_mlp=True, num_shared_experts=2),
    "language-model head": replace(DENSE, vocab_size=101),
    "heads narrower than the token": replace(DENSE, head_dim=5),
    "everything": replace(
        MIXTURE, num_kv_heads=2, head_dim=7, gated_mlp=True, num_shared_experts=1, vocab_size=101
    ),
}
LENGTHS = [0, 1, 7, 32, 33, 100]


class _MLP(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gated = config.gated_mlp
        self.input = nn.Linear(config.hidden_size, config.mlp_size * (1 + self.gated))
        self.output = nn.Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(F.glu(self.input(x)) if self.gated else F.gelu(self.input(x)))


class _Mixture(nn.Module):
    """Each token through the experts that the router chooses for it, and through the shared ones."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(_MLP(config) for _ in range(config.num_experts))
        self.shared = nn.ModuleList(_MLP(config) for _ in range(config.num_shared_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.experts_per_token)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, choices = (chosen == index).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, weights[rows, choices, None] * expert(x[rows]))
        return sum((expert(x) for expert in self.shared), mixed)


class _Layer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        d, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q = nn.Linear(d, config.num_heads * head_dim)
        self.k = nn.Linear(d, config.num_kv_heads * head_dim)
        self.v = nn.Linear(d, config.num_kv_heads * head_dim)
        self.output = nn.Linear(config.num_heads * head_dim, d)
        self.mlp = _Mixture(config) if config.num_experts else _MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, self.head_dim)) for projection in (self.q, self.k, self.v)
        )
        x = x + self.output(tiled_attention(q, k, v).flatten(1))
        return x + self.mlp(self.mlp_norm(x))


def _decoder(config: TransformerConfig) -> nn.Module:
    """`[tokens, hidden_size]` of one sample to the same shape, or to logits."""
    head = [nn.Linear(config.hidden_size, config.vocab_size, bias=False)] if config.vocab_size else []
    layers = [_Layer(config) for _ in range(config.num_layers)]
    return nn.Sequential(*layers, nn.LayerNorm(config.hidden_size), *head)


@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS.keys())
def test_the_flops_are_those_of_a_decoder(config: TransformerConfig) -> None:
    torch.manual_seed(0)
    decoder = _decoder(config)
    counted = []
    for length in LENGTHS:
        x = torch.randn(length, config.hidden_size)
        with FlopCounterMode(display=False) as counter:
            assert decoder(x).shape == (length, config.vocab_size or config.hidden_size)
        counted.append(counter.get_total_flops())
    assert transformer_flops(config, torch.tensor(LENGTHS)).tolist() == counted


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"mlp_size": 0}, "at least 1"),
        ({"vocab_size": -1}, "at least 0"),
        ({"num_kv_heads": 3}, "a divisor of num_heads = 4"),
        ({"experts_per_token": 6, "num_experts": 5}, "1 to num_experts = 5"),
        ({"num_shared_experts": 1}, "0, as num_experts is 0"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, int], expected: str) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name} = {value}: expected {expected}"):
        replace(DENSE, **wrong)
    with pytest.raises(ValueError, match="head_dim = 0"):
        HSTUFlops(1, 1, 1, 0)


@pytest.mark.parametrize(
    "flops", [partial(transformer_flops, DECODERS["everything"]), HSTUFlops(8, 1024, 4, 256).per_sample]
)
def test_tokens_are_nonnegative_integers_of_any_type_and_flops_int64(flops) -> None:
    for dtype in (torch.int32, torch.int64):
        tokens = torch.tensor([0, 1, 100_000], dtype=dtype)  # beyond int32 in FLOPs
        of_tensor, of_array = flops(tokens), flops(tokens.numpy())
        assert (of_tensor.dtype, of_array.dtype) == (torch.int64, np.int64)
        assert of_tensor.tolist() == of_array.tolist() == [flops(t.view(1)).item() for t in tokens.long()]
    for wrong in (torch.tensor([1.0]), np.array([1.0]), torch.tensor([True])):
        with pytest.raises(TypeError, match="expected integers"):
            flops(wrong)
    with pytest.raises(ValueError, match="a sample has -2 tokens"):
        flops(torch.tensor([3, -2]))


def test_a_context_of_more_flops_than_int64_holds_is_refused() -> None:
    large = TransformerConfig(48, 5120, 40, 8, 128, 8192, gated_mlp=True, num_experts=16, experts_per_token=1)
    assert transformer_flops(large, torch.tensor([4_000_000])).item() > 2**62
    with pytest.raises(ValueError, match="9000000 tokens do not fit an int64: count in another unit"):
        transformer_flops(large, torch.tensor([1, 9_000_000]))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("contextual", "candidates"), [(0, 0), (5, 0), (70, 0), (3, 40)])
def test_prefixes_cost_more_from_token_to_token_until_the_sample_ends(is_causal, contextual, candidates):
    flops = HSTUFlops(num_layers=2, hidden_size=8, num_heads=2, head_dim=3, is_causal=is_causal)
    for tokens in (110, 128, 129):
        first = np.arange(tokens + 1)
        whole, head, kept = (np.full_like(first, count) for count in (tokens, contextual, candidates))
        work = flops.prefix_work(first, whole, head, kept)
        assert work.shape == (tokens + 1, 2) and (work[0] == 0).all()
        assert (np.diff(work, axis=0) >= 0).all() and (np.diff(work.sum(1)) > 0).all()
        assert (work[-1] == flops.work(whole, head, kept)[-1]).all()
        assert flops.work(whole, head, kept).sum(1).tolist() == flops.per_sample(whole, head, kept).tolist()
    lengths = np.array([0, 1, 100, 4096, 8191])
    for kind in (torch.from_numpy, np.array):
        tokens = kind(lengths.astype(np.int16))
        assert (flops.prefix_work(tokens, tokens) == flops.work(lengths)).all()
