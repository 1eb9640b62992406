from __future__ import annotations

import importlib.util
import sys

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
def test_kernels_match_the_pytorch_path(name: str, interpreted: dict[str, list[torch.Tensor]]) -> None:
    assert sum(mask.num_tokens for mask in CASES[name].masks) <= MAX_TOKENS
    _check(interpreted[name], CASES[name])


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_match_too_and_do_not_synchronize(name: str) -> None:
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
    tokens, is_causal = draw(st.integers(1, 2)), draw(st.booleans())
    numbers = st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(0, 12))
    return [mask(*drawn, tokens, is_causal) for drawn in draw(st.lists(numbers, max_size=3))]


@given(masks=batches(), rows=st.sampled_from([4, 8]), columns=st.sampled_from([4, 16]))
@settings(max_examples=60)
def test_work_lists_hold_each_visible_tile_once_longest_first(
    masks: list[SampleMask], rows: int, columns: int
) -> None:
    shape = TileShape(rows, columns, 4, 1)
    by_rows, by_columns = TritonWork.of(masks).lists(CPU, [shape], [shape])
    visible, whole = _visible_tiles(masks, rows, columns)
    for items, by_row in ((by_rows.tolist(), True), (by_columns.tolist(), False)):
        full = [_tile(item, tile, by_row) for item in items for tile in _range(item, 6)]
        edge = [_tile(item, tile, by_row) for item in items for at in (8, 10) for tile in _range(item, at)]
        assert sorted(full + edge) == visible
        assert set(full) <= whole
        num_tiles = [item[7] + item[9] + item[11] for item in items]
        assert num_tiles == sorted(num_tiles, reverse=True)


def _range(item: list[int], at: int) -> range:
    return range(item[at], item[at] + item[at + 1])


def _tile(item: list[int], tile: int, by_row: bool) -> tuple[int, int, int]:
    """Returns the first token of the sample, and the tile's row and column."""
    return (item[0], item[2], tile) if by_row else (item[0], tile, item[2])


def _visible_tiles(
    masks: list[SampleMask], rows: int, columns: int
) -> tuple[list[tuple[int, int, int]], set[tuple[int, int, int]]]:
    """Returns the tiles where any row sees any column, and those where all rows see all columns."""
    some, whole, start = [], set(), 0
    for one in masks:
        tokens = range(one.num_tokens)
        seen = torch.tensor([[sees(one, row, column) for column in tokens] for row in tokens])
        for row in range(0, one.num_tokens, rows):
            for column in range(0, one.num_tokens, columns):
                tile = seen[row : row + rows, column : column + columns]
                if tile.any():
                    some.append((start, row // rows, column // columns))
                if tile.all():
                    whole.add((start, row // rows, column // columns))
        start += one.num_tokens
    return sorted(some), whole


def test_layers_share_the_work_lists_of_a_batch() -> None:
    work, shape = TritonWork([0, 5, 5, 9], [1, 0, 0], [1, 0, 2], 2, True), TileShape(16, 16, 4, 1)
    first, second = (work.lists(CPU, [shape, shape], [shape]) for _ in range(2))
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert len({items.untyped_storage().data_ptr() for items in first}) == 1  # one copy to the device


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 3], [0], [0, 0]), "seq_offsets has 2 numbers, num_contextuals 1 and num_targets 2"),
        (([1, 3], [0], [0]), "seq_offsets begins with 1"),
        (
            ([0, 9, 13], [0, 3], [1, 1]),
            "sample 1 has 4 tokens; expected at least its 3 contextual ones and 2",
        ),
    ],
)
def test_wrong_host_numbers_are_named(arguments: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TritonWork(*arguments, tokens_per_target=2, is_causal=True)


def test_samples_of_a_batch_have_one_kind_of_target() -> None:
    with pytest.raises(ValueError, match="2 pairs of tokens_per_candidate and is_causal"):
        TritonWork.of([mask(0, 3, tokens=1), mask(0, 3, tokens=2)])


@needs_triton
@pytest.mark.parametrize(
    ("shapes", "dtype", "scaling_seqlen", "message"),
    [
        (
            [(3, 2, 4), (3, 2, 4), (2, 2, 4)],
            torch.float32,
            1.0,
            r"one shape \[total_tokens, num_heads, head_dim\]",
        ),
        ([(4, 2, 4)] * 3, torch.float32, 1.0, "the masks have 3 tokens, but q, k and v have 4"),
        ([(3, 2, 257)] * 3, torch.float32, 1.0, "head_dim is 257; expected 1 to 256"),
        ([(3, 2, 4)] * 3, torch.float64, 1.0, "bfloat16, float16 or float32; got torch.float64 on cpu"),
        ([(3, 2, 4)] * 3, torch.float32, 0.0, "scaling_seqlen is 0.0"),
        ([(3, 2, 4)] * 3, torch.float32, 1.0, "q, k and v are on cpu; the Triton kernels need CUDA"),
    ],
)
def test_wrong_arguments_are_named(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, scaling_seqlen: float, message: str
) -> None:
    qkv = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        triton_hstu_attention(*qkv, TritonWork([0, 3], [0], [0], 1, True), scaling_seqlen)


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hstu.modules, "triton_kernels", raising=False)
    monkeypatch.delitem(sys.modules, "hstu.modules.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    qkv = [torch.zeros(3, 2, 4) for _ in range(3)]
    with pytest.raises(ImportError, match="pip install triton"):
        triton_hstu_attention(*qkv, TritonWork([0, 3], [0], [0], 1, True), 1.0)
