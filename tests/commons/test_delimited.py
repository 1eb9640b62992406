import csv
import gzip
import io

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons import delimited
from commons.delimited import Column, integer, read_blocks, read_lines, read_table

FIELDS = st.text(st.sampled_from('ab1",;é '), max_size=6)


def text(name: str) -> Column:
    return Column(name, pl.col(name), "text")


@given(rows=st.lists(st.tuples(FIELDS, FIELDS, FIELDS), min_size=1, max_size=30), bytes_=st.integers(1, 60))
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("split_lines", [1, 3, 1000])
def test_fields_are_those_of_pythons_csv(rows, bytes_, split_lines, compress, tmp_path_factory):
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([("x", "y", "z"), *rows])
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    path.write_bytes(compress(written.getvalue().encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "_BLOCK_BYTES", bytes_)
        patch.setattr(delimited, "_SPLIT_LINES", split_lines)
        blocks = list(read_blocks(path, [text("z"), text("x")]))
    found = [row for _, values in blocks for row in values.rows()]
    assert found == [(z, x) for x, _, z in rows]
    numbers = [block.first_line + row for block, _ in blocks for row in range(len(block.lines))]
    assert numbers == list(range(2, 2 + len(rows)))
    assert sum(block.num_bytes for block, _ in blocks) <= path.stat().st_size


@given(lines=st.lists(st.sampled_from(["a", "", " ", "b\r", "\t"]), max_size=12), bytes_=st.integers(1, 9))
def test_only_blank_lines_at_the_end_are_left_out(lines, bytes_, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    path.write_bytes("\n".join(lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "_BLOCK_BYTES", bytes_)
        texts = list(read_lines(path))
    while lines and not lines[-1].strip():
        lines.pop()
    assert [line for one in texts for line in one.lines] == [line.removesuffix("\r") for line in lines]
    assert [one.first_line for one in texts] == [
        1 + sum(len(before.lines) for before in texts[:number]) for number in range(len(texts))
    ]


@pytest.mark.parametrize(("row", "split_lines"), [(0, 1), (1, 2), (5, 1), (6, 1000)])
def test_the_first_malformed_line_is_named_in_any_block(row, split_lines, tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 8)
    monkeypatch.setattr(delimited, "_SPLIT_LINES", split_lines)
    lines = [f"{number},0" for number in range(7)]
    lines[row] = "x,0"
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["n,m", *lines]))
    with pytest.raises(ValueError, match=rf"table.csv, line {2 + row}: 'x,0': n is 'x', expected an integer"):
        read_table(path, [integer("n", 0), integer("m", 0)])
