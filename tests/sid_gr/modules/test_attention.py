import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from sid_gr.modules import JaggedCausalAttention
from tests.sid_gr.internals import attention

HEADS, HEAD_DIM = 4, 8


def _inputs(num_tokens: int, num_kv_heads: int) -> list[torch.Tensor]:
    """Queries, keys and values as the decoder makes them: views of one projection."""
    generator = torch.Generator().manual_seed(num_tokens)
    qkv = torch.randn(num_tokens, HEADS + 2 * num_kv_heads, HEAD_DIM, generator=generator).requires_grad_()
    return [qkv, *qkv.split([HEADS, num_kv_heads, num_kv_heads], 1)]


def _one_by_one(lengths: list[int], *qkv: torch.Tensor) -> torch.Tensor:
    outputs = []
    for sample in zip(*(x.split(lengths) for x in qkv), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in sample)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


# Short samples share a call if enough of them are equally long.
LENGTHS = st.lists(st.sampled_from([0, 1, 3, 8, 9, 31, 32, 33, 70]), min_size=1, max_size=8)


@given(few=LENGTHS, equal=st.integers(1, 33), seed=st.randoms())
@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("with_equal", [False, True])
def test_samples_attend_as_if_each_were_alone(num_kv_heads, with_equal, few, equal, seed):
    lengths = few + [equal] * 5 + [2] * 4 if with_equal else few
    seed.shuffle(lengths)
    x, *qkv = _inputs(sum(lengths), num_kv_heads)
    jagged = JaggedCausalAttention(lengths, keep=True)
    for layer in range(2):
        out, expected = jagged(layer, *qkv), _one_by_one(lengths, *qkv)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(layer))
        got, wanted = (
            torch.autograd.grad((y * weights).sum(), x, retain_graph=True) for y in (out, expected)
        )
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert [list(map(id, kept)) for kept in jagged.keys_values] == [list(map(id, qkv[1:]))] * 2


@given(
    samples=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=4), block=st.integers(1, 50)
)
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_last_queries_attend_as_if_all_tokens_had_queries(num_kv_heads, samples, block):
    lengths, num_keys = [last for last, _ in samples], [sum(sample) for sample in samples]
    x, q, k, v = _inputs(sum(num_keys), num_kv_heads)
    is_last = [number >= before for last, before in samples for number in range(last + before)]
    is_last = torch.tensor(is_last, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERIES_PER_BLOCK", block)
        out = attention.LastQueriesAttention(lengths, num_keys, x.device)(q[is_last], k, v)
    expected = JaggedCausalAttention(num_keys)(0, q, k, v)[is_last]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(block))
    got, wanted = (torch.autograd.grad((y * weights).sum(), x) for y in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_non_finite_values_stay_in_their_sample():
    lengths = [5, 9, 9, 9, 9, 40]
    x, *qkv = _inputs(sum(lengths), HEADS)
    x.data[5:14] = torch.inf
    out = JaggedCausalAttention(lengths)(0, *qkv)
    (grad,) = torch.autograd.grad(out[14:].sum() + out[:5].sum(), x)
    for values in (out, grad):
        assert values[:5].isfinite().all() and values[14:].isfinite().all()
    assert out[5:14].isnan().all()


@pytest.mark.skipif(attention.varlen is None, reason="PyTorch before 2.10")
@pytest.mark.parametrize("num_kv_heads", [2, HEADS])
def test_varlen_attention_accepts_our_arguments(num_kv_heads):
    """On the meta device, which checks arguments and shapes; the kernel itself needs CUDA."""
    x = torch.empty(7, HEADS + 2 * num_kv_heads, HEAD_DIM, device="meta", dtype=torch.bfloat16)
    q, k, v = x.requires_grad_().split([HEADS, num_kv_heads, num_kv_heads], 1)
    offsets = torch.empty(3, device="meta", dtype=torch.int32)
    for queries in (q, q[2:]):  # of whole samples, and of pieces
        out = attention.varlen_causal_attention(queries, k, v, offsets, 4, offsets, 6)
        assert out.shape == queries.shape
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.shape == x.shape
