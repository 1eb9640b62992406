import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hstu.modules import AttentionTiles, SampleMask, jagged_hstu_attention
from tests.hstu.modules.attention_cases import batches, dense_attention

SCALING_SEQLEN = 7.0


def draw_qkv(num_tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    drawn = torch.randn(3, num_tokens, *heads, dtype=torch.float64, generator=generator)
    return [x.to(dtype).requires_grad_() for x in drawn]


def tiles_of(sample_masks: Sequence[SampleMask]) -> AttentionTiles:
    return AttentionTiles(sample_masks, torch.device("cpu"))


@pytest.mark.usefixtures("chunk_sizes")
@given(sample_masks=batches(), heads=st.sampled_from([(2, 8), (4, 3)]))
@example([SampleMask(70, 33, 70, 2, True)], (2, 8))  # the prefix ends in a tile's first column
def test_matches_a_dense_masked_reference(sample_masks, heads):
    qkv = draw_qkv(sum(mask.num_tokens for mask in sample_masks), heads, torch.float64)
    out = jagged_hstu_attention(*qkv, tiles_of(sample_masks), SCALING_SEQLEN)
    expected = dense_attention(qkv, sample_masks, SCALING_SEQLEN)
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, qkv, grad_out)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, qkv, grad_out), strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_float16_sums_over_long_samples_stay_finite():
    num_tokens = 2000
    q, k, v = (torch.full((num_tokens, 1, 4), value, dtype=torch.float16) for value in (2, 4, 8))
    tiles = tiles_of([SampleMask(num_tokens, 0, num_tokens, 2, True)])
    out = jagged_hstu_attention(q, k, v, tiles, num_tokens)
    weight = 16 * torch.sigmoid(torch.tensor(16.0))  # one token's; the sum over all overflows float16
    torch.testing.assert_close(out[-1].float(), torch.full((1, 4), 8 * weight.item()), rtol=4e-3, atol=0)


def test_a_value_that_is_not_finite_stays_within_its_sample():
    sample_masks = [
        SampleMask(length, 1, length, 2, True) for length in (3, 20, 5)
    ]  # one chunk, with padding
    q, k, v = (x.detach().clone() for x in draw_qkv(28, (2, 8), torch.float32))
    expected = jagged_hstu_attention(q, k, v, tiles_of(sample_masks), SCALING_SEQLEN)
    v[0] = math.inf
    out = jagged_hstu_attention(q, k, v, tiles_of(sample_masks), SCALING_SEQLEN)
    assert not out[:3].isfinite().all()
    torch.testing.assert_close(out[3:], expected[3:])
