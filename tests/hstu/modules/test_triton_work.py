"""The lists of tiles that the Triton kernels work off."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hstu.modules import SampleMask
from tests.hstu.modules.attention_cases import batches, mask, visible
from tests.hstu.modules.internals import TileShape, TritonWork

CPU = torch.device("cpu")


@st.composite
def pieces(draw: st.DrawFn) -> list[SampleMask]:
    """Draws whole samples, pieces that end theirs, and pieces that see all of the history."""
    masks = []
    for whole in draw(batches()):
        first = draw(st.integers(0, min(9, whole.num_tokens)))
        is_last = whole.is_causal or whole.num_tokens > whole.history_end
        num_rows = -1 if is_last else draw(st.integers(0, whole.num_tokens - first))
        masks.append(replace(whole, first_row=first, num_rows=num_rows))
    return masks


@given(masks=pieces(), rows=st.sampled_from([4, 8]), columns=st.sampled_from([4, 16]))
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
    """Returns first key, row and column of tiles where any row sees any column, and where all do."""
    some, whole, start = [], set(), 0
    for one in masks:
        seen = visible(one)[one.first_row : one.end_row]
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
