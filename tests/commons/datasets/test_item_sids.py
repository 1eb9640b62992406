import gzip
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets.item_sids import ItemSIDs

SIZES = (4, 8, 16)
NO_IDS = ("-1", "a", "1.0", "1_0", " 1", "")


def write(directory, content):
    """Writes text to a JSON file, and bytes or what `torch.save` takes to another."""
    path = directory / ("sids.json" if isinstance(content, str) else "sids.pt")
    if isinstance(content, str | bytes):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_tensor_has_an_item_per_column(dtype, tmp_path):
    tensor = torch.tensor([[0, 3], [7, 1], [2, 15]], dtype=dtype)
    sids = ItemSIDs.load(write(tmp_path, tensor), SIZES)
    assert sids.items.tolist() == [0, 1]
    assert sids.codes.tolist() == [[0, 7, 2], [3, 1, 15]]
    assert sids.items.dtype == sids.codes.dtype == np.int64


@settings(max_examples=20)
@given(
    codes=st.dictionaries(
        st.integers(0, 10**18 - 1), st.tuples(*(st.integers(0, size - 1) for size in SIZES)), min_size=1
    )
)
def test_json_items_are_sorted_and_need_not_be_contiguous(codes, tmp_path_factory):
    text = json.dumps({f"{item:03}": item_codes for item, item_codes in codes.items()})
    sids = ItemSIDs.load(write(tmp_path_factory.mktemp("sids"), text), SIZES)
    assert sids.items.tolist() == sorted(codes)
    rows = sids.rows_of(np.array(list(codes)))
    assert sids.items[rows].tolist() == list(codes)
    assert [tuple(row) for row in sids.codes[rows].tolist()] == list(codes.values())
    assert sids.items.dtype == sids.codes.dtype == np.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            torch.zeros(2, 5, dtype=torch.int64),
            r" has a tensor \[2, 5\] of torch.int64: .* \[3, num_items\]$",
        ),
        (torch.zeros(5, 3, dtype=torch.int64), r" has a tensor \[5, 3\] of .*; transposed, it would fit$"),
        (torch.zeros(3, dtype=torch.int64), r" has a tensor \[3\] of torch.int64: expected an integer"),
        (torch.zeros(3, 5, 1, dtype=torch.int64), r" has a tensor \[3, 5, 1\] of torch.int64"),
        (torch.zeros(3, 5), r" has a tensor \[3, 5\] of torch.float32: .* integer tensor \[3, num_items\]$"),
        (torch.zeros(5, 3), r" has a tensor \[5, 3\] of torch.float32: .* integer tensor \[3, num_items\]$"),
        (torch.zeros(3, 5, dtype=torch.bool), r" has a tensor \[3, 5\] of torch.bool"),
        (torch.zeros(3, 0, dtype=torch.int64), " has no items"),
        ({"codes": torch.zeros(3, 5)}, " has a dict: expected an integer tensor"),
        (torch.tensor([[0, 3], [8, 1], [2, 15]]), ": item 0 has code 8 in hierarchy 1: expected 0 to 7, as"),
        (torch.tensor([[0, -1], [7, 1], [2, 15]]), ": item 1 has code -1 in hierarchy 0: expected 0 to 3"),
        ("{", r" is not JSON \(Expecting"),
        pytest.param("[" * 100_000, " is not JSON", id="deep"),
        ("[[0, 1, 2]]", " has a list: expected an object"),
        ("3", " has a int: expected an object"),
        ("{}", " has no items"),
        ('{"0": [0, 1, 2], "5": [0, 1]}', r": item 5 has \[0, 1\]: expected 3 integers"),
        ('{"5": [0, 1, 2, 3]}', r": item 5 has \[0, 1, 2, 3\]: expected 3 integers"),
        ('{"5": [0, 1, 2.0]}', r": item 5 has \[0, 1, 2.0\]: expected 3 integers"),
        ('{"5": [0, 1, true]}', r": item 5 has \[0, 1, True\]: expected 3 integers"),
        ('{"5": [0, 1, null]}', r": item 5 has \[0, 1, None\]: expected 3 integers"),
        ('{"5": [0, 1, 9223372036854775808]}', ": item 5 has .*: expected 3 integers"),
        ('{"5": 7}', ": item 5 has 7: expected 3 integers"),
        ('{"5": {"0": 1, "1": 1, "2": 1}}', ": item 5 has .*: expected 3 integers"),
        ('{"5": [0, 8, 2]}', ": item 5 has code 8 in hierarchy 1: expected 0 to 7, as its codebook has 8"),
        ('{"5": [-1, 7, 2]}', ": item 5 has code -1 in hierarchy 0: expected 0 to 3"),
        *((f'{{"{key}": [0, 1, 2]}}', f": item '{key}': expected an integer from 0") for key in NO_IDS),
        ('{"1000000000000000000": [0, 1, 2]}', ".* expected an integer from 0, of at most 18 digits"),
        ('{"1": [0, 1, 2], "01": [0, 1, 2]}', ": key '01': expected one key for item 1, it has two"),
        ('{"1": [0, 1, 2], "1": [0, 1, 2]}', ": key '1': expected one key for item 1, it has two"),
        *((damaged, ": expected a tensor that torch.save") for damaged in (b"", b"junk", b"{}")),
    ],
)
def test_a_file_that_is_no_mapping_is_named(content, message, tmp_path):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}{message}"):
        ItemSIDs.load(path, SIZES)


@pytest.mark.parametrize("size", [100, 2000])
def test_a_cut_off_tensor_is_named(size, tmp_path):
    path = write(tmp_path, torch.zeros(3, 1000, dtype=torch.int64))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=re.escape(f"{path}: expected a tensor that torch.save")):
        ItemSIDs.load(path, SIZES)


def test_the_text_of_a_mapping_may_have_a_mark_and_is_shown_if_it_is_compressed(tmp_path):
    path, text = tmp_path / "sids.json", '{"5": [0, 7, 2]}'
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"):
        path.write_text(text, encoding=encoding)
        assert ItemSIDs.load(path, SIZES).codes.tolist() == [[0, 7, 2]]
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(
        ValueError, match=r"sids.json is not JSON \(.* 0x8b .*\): expected an object, .* UTF-8"
    ):
        ItemSIDs.load(path, SIZES)


def test_a_file_that_is_absent_or_of_another_kind_is_named(tmp_path):
    for name in ("sids.pt", "sids.json"):
        with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / name))):
            ItemSIDs.load(tmp_path / name, SIZES)
    with pytest.raises(ValueError, match=r"sids.csv: expected a .pt or a .json file"):
        ItemSIDs.load(tmp_path / "sids.csv", SIZES)


def test_rows_of_finds_ids_in_any_order_and_names_the_first_without_codes():
    sids = ItemSIDs(np.array([2, 5, 9]), np.zeros((3, 1), dtype=np.int64))
    rows = sids.rows_of(np.array([9, 2, 2, 5]))
    assert rows.tolist() == [2, 0, 0, 1] and rows.dtype == np.int64
    assert sids.rows_of(np.array([], dtype=np.int64)).tolist() == []
    for item in (-1, 0, 3, 10):
        with pytest.raises(ValueError, match=rf"item {item} has no semantic ID in the mapping \(3 items\)"):
            sids.rows_of(np.array([5, item, 11]))


def test_the_codebooks_are_checked():
    sids = ItemSIDs(np.array([2, 5]), np.array([[0, 1], [3, 2]]))
    sids.check_codebooks((4, 3))
    with pytest.raises(ValueError, match=r"codebook_sizes = \(4, 3, 2\): expected 2, as items have 2 codes"):
        sids.check_codebooks((4, 3, 2))
    with pytest.raises(ValueError, match="item 5 has code 2 in hierarchy 1: expected 0 to 1"):
        sids.check_codebooks((4, 2))


@pytest.mark.parametrize(
    ("items", "codes_shape", "message"),
    [
        ([], (0, 3), "number of items = 0: expected at least one"),
        ([1, 2], (3, 3), r"shape of codes = \(3, 3\): expected \[2, num_hierarchies\]"),
        ([1, 2], (2,), r"shape of codes = \(2,\): expected \[2, num_hierarchies\]"),
        ([1, 3, 3], (3, 3), "item 3 follows item 3: expected strictly ascending ids"),
        ([4, 1, 3], (3, 3), "item 1 follows item 4: expected strictly ascending ids"),
    ],
)
def test_arrays_that_are_no_mapping_are_named(items, codes_shape, message):
    with pytest.raises(ValueError, match=message):
        ItemSIDs(np.array(items, dtype=np.int64), np.zeros(codes_shape, dtype=np.int64))
