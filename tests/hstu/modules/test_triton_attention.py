import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hstu.modules
from hstu.modules import AttentionTiles, SampleMask, jagged_hstu_attention
from hstu.modules.triton_attention import triton_hstu_attention
from hstu.modules.triton_tiles import TileShape
from hstu.modules.triton_work import TritonWork
from tests.hstu.modules.interpreted_attention import (
    CASES,
    IN_PIECES,
    MAX_TOKENS,
    SCALING_SEQLEN,
    Case,
    interpret,
    mask,
    run_kernels,
)
from tests.hstu.modules.mask_rule import sees

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed; the extra kernels installs it",
)
# Norm of the error relative to the result's. Triton's interpreter truncates to bfloat16 instead of rounding.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    return interpret(tmp_path_factory.mktemp("interpreted") / "results.pt")


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_pytorch_path(name, interpreted):
    assert sum(mask.num_tokens for mask in CASES[name].masks) <= MAX_TOKENS
    _check(interpreted[name], CASES[name])


@needs_triton
@pytest.mark.parametrize("backend", IN_PIECES)
def test_pieces_match_whole_samples(backend, interpreted):
    masks, _ = IN_PIECES[backend]
    _check(interpreted[backend], Case(tuple(masks)))


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_match_too_and_do_not_synchronize(name):
    masks, inputs = CASES[name].masks, [x.cuda() for x in CASES[name].inputs()]
    run_kernels(masks, inputs)  # compiles them, which may synchronize
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run_kernels(masks, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _check([x.cpu() for x in results], CASES[name])


def _check(results: list[torch.Tensor], case: Case) -> None:
    for got, expected in zip(results, _expected(case), strict=True):
        assert got.shape == expected.shape
        assert got.dtype == case.dtype
        error = got.float() - expected
        assert error.norm() <= TOLERANCE[case.dtype] * expected.norm()
        if case.dtype == torch.float32:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def _expected(case: Case) -> list[torch.Tensor]:
    *qkv, grad_out = (x.detach().float() for x in case.inputs())
    qkv = [x.requires_grad_() for x in qkv]
    tiles = AttentionTiles(case.masks, qkv[0].device)
    out = jagged_hstu_attention(*qkv, tiles, SCALING_SEQLEN)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out)]


@st.composite
def batches(draw: st.DrawFn) -> list[SampleMask]:
    """Draws whole samples, pieces that end theirs, and pieces that see all of the history."""
    masks = []
    numbers = st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(0, 12), st.integers(1, 2))
    for drawn in draw(st.lists(numbers, max_size=3)):
        whole = mask(*drawn, draw(st.booleans()))
        first = draw(st.sampled_from([0, 1, 9]))
        first = first if first <= whole.num_tokens else 0
        num_rows = -1
        if not whole.is_causal and whole.num_tokens == whole.history_end:
            num_rows = draw(st.integers(0, whole.num_tokens - first))
        masks.append(replace(whole, first_row=first, num_rows=num_rows))
    return masks


@given(masks=batches(), rows=st.sampled_from([4, 8]), columns=st.sampled_from([4, 16]))
@settings(max_examples=60)
def test_work_lists_hold_each_visible_tile_once_longest_first(masks, rows, columns):
    shape = TileShape(rows, columns, 4, 1)
    key_tokens = np.arange(sum(mask.num_tokens for mask in masks))
    by_rows, by_columns = TritonWork(masks, range(len(masks)), key_tokens).lists(CPU, [shape], [shape])
    visible, whole = _visible_tiles(masks, rows, columns)
    for items, by_row in ((by_rows.tolist(), True), (by_columns.tolist(), False)):
        blocks = [(item[8] - item[2]) // rows if by_row else item[8] // columns for item in items]
        found = [
            [
                (item[1], block, tile) if by_row else (item[1], tile, block)
                for item, block in zip(items, blocks, strict=True)
                for at in places
                for tile in range(item[at], item[at] + item[at + 1])
            ]
            for places in ((9,), (11, 13))
        ]
        assert sorted(found[0] + found[1]) == visible
        assert set(found[0]) <= whole
        num_tiles = [item[10] + item[12] + item[14] for item in items]
        assert num_tiles == sorted(num_tiles, reverse=True)


def _visible_tiles(
    masks: list[SampleMask], rows: int, columns: int
) -> tuple[list[tuple[int, int, int]], set[tuple[int, int, int]]]:
    """Returns the tiles where any row sees any column, and those where all rows see all columns.

    Each is the first key of the sample, and the tile's row and column.
    """
    some, whole, start = [], set(), 0
    for one in masks:
        seen = torch.tensor(
            [
                [sees(one, row, column) for column in range(one.num_tokens)]
                for row in range(one.first_row, one.end_row)
            ]
        ).view(one.num_rows, one.num_tokens)
        for row in range(0, one.num_rows, rows):
            for column in range(0, one.num_tokens, columns):
                tile = seen[row : row + rows, column : column + columns]
                if tile.any():
                    some.append((start, row // rows, column // columns))
                if tile.all():
                    whole.add((start, row // rows, column // columns))
        start += one.num_tokens
    return sorted(some), whole


def test_layers_share_the_work_lists_of_a_batch():
    work, shape = TritonWork([mask(1, 2, 1), mask(0, 0), mask(0, 0, 2)]), TileShape(16, 16, 4, 1)
    first, second = (work.lists(CPU, [shape, shape], [shape]) for _ in range(2))
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert len({items.untyped_storage().data_ptr() for items in first}) == 1  # one copy to the device


@needs_triton
@pytest.mark.parametrize(
    ("shapes", "dtype", "scaling_seqlen", "message"),
    [
        ([(3, 2, 4), (3, 2, 4), (2, 2, 4)], torch.float32, 1.0, r"one shape \[total_tokens, num_heads, head"),
        ([(4, 2, 4)] * 3, torch.float32, 1.0, "the masks have 3 tokens, but q, k and v have 4"),
        ([(3, 2, 257)] * 3, torch.float32, 1.0, "head_dim is 257; expected 1 to 256"),
        ([(3, 2, 4)] * 3, torch.float64, 1.0, "bfloat16, float16 or float32; got torch.float64 on cpu"),
        ([(3, 2, 4)] * 3, torch.float32, 0.0, "scaling_seqlen is 0.0"),
        ([(3, 2, 4)] * 3, torch.float32, 1.0, "q, k and v are on cpu; the Triton kernels need CUDA"),
    ],
)
def test_wrong_arguments_are_named(shapes, dtype, scaling_seqlen, message):
    qkv = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        triton_hstu_attention(*qkv, TritonWork([mask(0, 3)]), scaling_seqlen)


def test_without_triton_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delattr(hstu.modules, "triton_kernels", raising=False)
    monkeypatch.delitem(sys.modules, "hstu.modules.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    qkv = [torch.zeros(3, 2, 4) for _ in range(3)]
    with pytest.raises(ImportError, match="pip install triton"):
        triton_hstu_attention(*qkv, TritonWork([mask(0, 3)]), 1.0)
