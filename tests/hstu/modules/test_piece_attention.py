"""Attention of samples cut into pieces: equal to that of whole samples, at no more FLOPs and memory."""

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

from hstu.modules import AttentionTiles, SampleMask, jagged_hstu_attention, piece_attention
from tests.hstu.modules.pieces import CPU, Piece, attention_in_pieces, cut, cut_samples

SCALING_SEQLEN = 7


def _qkv(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    drawn = torch.randn(num_tokens, 3, 2, 4, generator=generator, dtype=dtype)
    return list(drawn.requires_grad_().unbind(1))


@pytest.mark.usefixtures("chunk_sizes")
@given(samples=cut_samples())
def test_pieces_equal_whole_samples(samples):
    masks, ranks = samples
    qkv = _qkv(sum(mask.num_tokens for mask in masks))
    expected = jagged_hstu_attention(*qkv, AttentionTiles(masks, CPU), SCALING_SEQLEN)
    out = attention_in_pieces("pytorch", masks, ranks, qkv, SCALING_SEQLEN)
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(out)
    grads, expected_grads = (
        torch.autograd.grad(x, qkv, grad_out, materialize_grads=True) for x in (out, expected)
    )
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("num_candidates", [0, 5])
def test_pieces_of_whole_tiles_take_the_flops_of_the_sample(num_candidates):
    mask = SampleMask(300 + num_candidates, 3, 300, 1, True)
    whole = _flops([Piece(0, 0, mask.num_tokens, mask)])
    assert _flops(cut(0, mask, [32, 128, 288])) == whole
    # With other cuts, a row of up to 10 tiles may be counted in two pieces, of the sample's 55.
    assert _flops(cut(0, mask, [50, 177])) <= whole * (1 + 2 * 10 / 55)


def _flops(pieces: list[Piece]) -> int:
    """Returns the FLOPs of the pieces of one sample, forward and backward."""
    mask = pieces[-1].mask
    with FlopCounterMode(display=False) as counter:
        qkv = _qkv(mask.num_tokens)
        whole = SampleMask(mask.num_tokens, mask.num_contextual, mask.history_end, 1, True)
        attention_in_pieces("pytorch", [whole], [pieces], qkv, SCALING_SEQLEN).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("num_pieces", [0, 2])
def test_only_the_arguments_are_saved_and_fetched_ones_always_get_a_gradient(num_pieces):
    q, k, v = _qkv(100, torch.float32)
    fetched = torch.randn(60, 2, 2, 4, requires_grad=True)
    masks = [SampleMask(80, 0, 80, 1, True, 40, 40), SampleMask(90, 0, 90, 1, True, 60, 30)][:num_pieces]
    key_tokens = np.concatenate([np.arange(100, 140), np.arange(40), np.arange(100, 160), np.arange(70, 100)])
    attention = piece_attention(
        "pytorch", masks, [0, 70][:num_pieces], key_tokens[: 170 if num_pieces else 0], SCALING_SEQLEN, CPU
    )
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = attention(q, k, v, fetched)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (q, k, v, fetched)]
    assert len(out.grad_fn.next_functions) == 4 and all(
        function for function, _ in out.grad_fn.next_functions
    )
    *own_grads, fetched_grad = torch.autograd.grad(out.sum(), (q, k, v, fetched), allow_unused=True)
    assert bool(fetched_grad.any()) == (num_pieces > 0)
    assert not out[40:70].any()
    if num_pieces:
        assert all(grad.any() for grad in own_grads) and not own_grads[0][40:70].any()
    else:
        assert own_grads == [None] * 3


def test_wrong_pieces_are_named():
    q, k, v = _qkv(4)
    mask = SampleMask(6, 0, 6, 1, True, 2, 4)
    with pytest.raises(ValueError, match="key_tokens has 5 locations, but the masks have 6 keys"):
        piece_attention("pytorch", [mask], [0], np.arange(5), SCALING_SEQLEN, CPU)
    attention = piece_attention("pytorch", [mask], [0], np.arange(6), SCALING_SEQLEN, CPU)
    with pytest.raises(ValueError, match="location 5, but there are 4 tokens on this rank and 1 fetched"):
        attention(q, k, v, k.new_zeros(1, 2, 2, 4))
    with pytest.raises(ValueError, match=r"expected \[num_fetched, 2, 2, 4\] and torch.float64"):
        attention(q, k, v, k.new_zeros(2, 2, 2, 3))
    with pytest.raises(ValueError, match="queries 2 to 7, exclusive, are not within the sample's 6 tokens"):
        SampleMask(6, 0, 6, 1, True, 2, 5)
