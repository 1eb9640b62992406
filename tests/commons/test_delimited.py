import csv
import gzip
import io

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons import delimited
from commons.delimited import Column, integer, read_batches, read_table

FIELDS = st.text(st.sampled_from('ab1",;é '), max_size=6)


def text(name: str) -> Column:
    return Column(name, pl.col(name), "text")


@given(rows=st.lists(st.tuples(FIELDS, FIELDS, FIELDS), min_size=1, max_size=30), bytes_=st.integers(60, 90))
@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress)])
def test_fields_are_those_of_pythons_csv(rows, bytes_, suffix, compress, tmp_path_factory):
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([("x", "y", "z"), *rows])
    path = tmp_path_factory.mktemp("csv") / f"table.csv{suffix}"
    path.write_bytes(compress(written.getvalue().encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "_BLOCK_BYTES", bytes_)
        found = [row for batch in read_batches(path, [text("z"), text("x")]) for row in batch.rows()]
    assert found == [(z, x) for x, _, z in rows]


@pytest.mark.parametrize("row", [0, 1, 5, 6])
@pytest.mark.parametrize("wrong", ["x", "-1"])
def test_the_first_malformed_row_is_named_in_any_batch(row, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "_BLOCK_BYTES", 12)
    lines = [f"{number},0" for number in range(7)]
    lines[row] = f"{wrong},0"
    path = tmp_path / "table.csv"
    columns = [integer("n", 0), integer("m", 0)]
    for names, header, first in ((None, ["n,m"], 2), (("n", "m"), [], 1)):
        path.write_text("\n".join([*header, *lines]))
        with pytest.raises(ValueError, match=rf"table.csv, row {first + row}: n is '{wrong}'"):
            read_table(path, columns, ",", names)
