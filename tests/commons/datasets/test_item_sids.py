import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets import ItemSIDs
from tests.commons.datasets.raw_files import write_file
from tests.few_examples import few_examples

SIZES = (4, 8, 16)


def write(directory, content):
    """Writes text to a JSON file, and a tensor to another."""
    if isinstance(content, str):
        return write_file(directory / "sids.json", content.encode())
    torch.save(content, directory / "sids.pt")
    return directory / "sids.pt"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_tensor_has_an_item_per_column(dtype, tmp_path):
    tensor = torch.tensor([[0, 3], [7, 1], [2, 15]], dtype=dtype)
    sids = ItemSIDs.load(write(tmp_path, tensor), SIZES)
    assert sids.items.tolist() == [0, 1]
    assert sids.codes.tolist() == [[0, 7, 2], [3, 1, 15]]
    assert sids.items.dtype == sids.codes.dtype == np.int64


@few_examples  # each writes a file
@given(
    codes=st.dictionaries(
        st.integers(0, 10**18 - 1), st.tuples(*(st.integers(0, size - 1) for size in SIZES)), min_size=1
    ),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"]),
)
def test_json_items_are_sorted_and_need_not_be_contiguous(codes, encoding, tmp_path_factory):
    text = json.dumps({f"{item:03}": item_codes for item, item_codes in codes.items()})
    path = write_file(tmp_path_factory.mktemp("sids") / "sids.json", text.encode(encoding))
    sids = ItemSIDs.load(path, SIZES)
    assert sids.items.tolist() == sorted(codes)
    rows = sids.rows_of(np.array(list(codes)))
    assert sids.items[rows].tolist() == list(codes)
    assert [tuple(row) for row in sids.codes[rows].tolist()] == list(codes.values())
    assert sids.items.dtype == sids.codes.dtype == rows.dtype == np.int64


LONG = torch.int64
# What a file has, and what the error shows of it.
REFUSED = {
    "other number of hierarchies": (torch.zeros(2, 5, dtype=LONG), "[2, 5]", "[3, num_items]"),
    "transposed": (torch.zeros(5, 3, dtype=LONG), "[5, 3]", "transposed"),
    "floats": (torch.zeros(3, 5), "torch.float32", "integer"),
    "code too large": (torch.tensor([[0, 3], [8, 1], [2, 15]]), "item 0", "code 8", "0 to 7"),
    "negative code": (torch.tensor([[0, -1], [7, 1], [2, 15]]), "item 1", "code -1", "0 to 3"),
    "no JSON": ("{", "not JSON"),
    "too deep": ("[" * 100_000, "not JSON"),
    "no item": ("{}", "no items"),
    "too few codes": ('{"0": [0, 1, 2], "5": [0, 1]}', "item 5", "[0, 1]", "3 integers"),
    "code beyond int64": (f'{{"5": [0, 1, {2**63}]}}', "item 5", "3 integers"),
    "no list": ('{"5": 7}', "item 5", "7", "3 integers"),
    **{
        f"item {key!r}": (f'{{"{key}": [0, 1, 2]}}', f"'{key}'", "integer from 0")
        for key in ("-1", "1_0", "1" + 18 * "0")
    },
    "item twice": ('{"1": [0, 1, 2], "01": [0, 1, 2]}', "'01'", "item 1"),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_no_mapping_is_named(refused, tmp_path):
    content, *expected = refused
    path = write(tmp_path, content)
    with pytest.raises(ValueError) as raised:
        ItemSIDs.load(path, SIZES)
    assert all(text in str(raised.value) for text in (str(path), *expected)), raised.value


def test_a_file_that_is_damaged_or_of_another_kind_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"sids.csv: expected a .pt or a .json file"):
        ItemSIDs.load(tmp_path / "sids.csv", SIZES)
    path = write(tmp_path, torch.zeros(3, 1000, dtype=LONG))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=f"{path}: expected a tensor that torch.save"):
        ItemSIDs.load(path, SIZES)


def test_the_first_item_without_codes_is_named():
    sids = ItemSIDs(np.array([2, 5, 9]), np.zeros((3, 1), dtype=np.int64))
    for item in (-1, 3, 10):
        with pytest.raises(ValueError, match=f"item {item} has no semantic ID"):
            sids.rows_of(np.array([5, item, 11]))


def test_arrays_that_are_no_mapping_are_named():
    for items, codes_shape, message in (
        ([], (0, 3), "number of items = 0"),
        ([1, 2], (2,), r"\(2,\): expected \[2, num_hierarchies\]"),
        ([1, 3, 3], (3, 3), "item 3 follows item 3: expected strictly ascending ids"),
    ):
        with pytest.raises(ValueError, match=message):
            ItemSIDs(np.array(items, dtype=np.int64), np.zeros(codes_shape, dtype=np.int64))
