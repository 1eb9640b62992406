"""Pieces put together again are the sample."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.extensions.pieces.cut_rules import CutRules, FieldRule, ItemGroup
from tests.commons.extensions.pieces.internals import PIECE, check_cut, cut_rows, own_spans, spans
from tests.commons.sequence_batch.drawn_fields import bytes_of_rows, draw_fields
from tests.commons.sequence_batch.internals import Rows, Schema


def drawn_pieces(rng: np.random.Generator, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row of each piece, and the pieces; tokens are left out."""
    row_of, pieces = [], []
    for row, num_items in enumerate(rng.integers(0, 7, num_rows).tolist()):
        inner = rng.permutation(np.arange(1, num_items))[: rng.integers(0, 4)]
        bounds = [0, *np.sort(inner).tolist(), num_items]
        for first, last in itertools.pairwise(bounds):
            row_of.append(row)
            pieces.append((first, last, num_items, 0, 0, 0))
    return np.array(row_of, dtype=np.int64), np.array(pieces, dtype=PIECE)


def drawn_rule(rng: np.random.Generator, is_dense: bool) -> FieldRule:
    if is_dense or rng.random() < 0.4:
        return FieldRule(str(rng.choice(["first", "last", "every"])))
    before = int(rng.integers(-1, 3))
    after = int(rng.integers(-before, 3))
    return FieldRule(str(rng.choice(["items", "items_from_end"])), int(rng.integers(1, 3)), before, after)


def rows_by_key(value, num_rows: int) -> list[list[list[bytes]]]:
    """Returns for each key and row the bytes of each element, weights included; of a dense row one."""
    if isinstance(value, torch.Tensor):
        return [[[b"".join(row)] for row in bytes_of_rows({"": value}, num_rows)]]
    num_keys = len(value.keys()) if isinstance(value, KeyedJaggedTensor) else 1
    total = value.values().shape[0]
    parts = [part for part in (value.values(), value.weights_or_none()) if part is not None]
    columns = [bytes_of_rows({"": part}, total) for part in parts]
    elements = [b"".join(part[0] for part in of_element) for of_element in zip(*columns, strict=True)]
    ends = value.lengths().view(-1).cumsum(0).tolist()
    rows = [elements[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [rows[key * num_rows : (key + 1) * num_rows] for key in range(num_keys)]


@given(seed=st.integers(0, 10**6), num_rows=st.integers(1, 5))
def test_pieces_put_together_again_are_the_sample_to_the_bit(seed, num_rows):
    rng = np.random.default_rng(seed)
    drawn = draw_fields(seed, rng, num_rows)
    fields = Rows({name.replace(" ", "_"): value for name, value in drawn.items()}).fields
    schema = Schema.of(fields)
    names = [
        f"{field.name}.{key}" if field.kind == "keyed" else field.name
        for field in schema.fields
        for key in field.keys
    ]
    dense = {field.name for field in schema.fields if field.is_dense}
    rules = {name: drawn_rule(rng, name in dense) for name in names}
    row_of, pieces = drawn_pieces(rng, num_rows)
    loaded, cut_rules = Rows(fields), CutRules((ItemGroup("items"),), rules)
    cut_batch = cut_rows(loaded, pieces, cut_rules)
    check_cut(loaded, cut_batch, pieces, cut_rules)
    cut = cut_batch.fields
    assert Schema.of(cut) == schema
    is_first, is_last = pieces["first_item"] == 0, pieces["last_item"] == pieces["num_items"]
    for field in schema.fields:
        whole, parts = rows_by_key(fields[field.name], num_rows), rows_by_key(cut[field.name], len(row_of))
        for key, of_whole, of_pieces in zip(field.keys, whole, parts, strict=True):
            rule = rules[f"{field.name}.{key}" if field.kind == "keyed" else field.name]
            if field.is_dense:
                has_value = is_last if rule.place == "last" else is_first
                assert [of_pieces[piece] for piece in np.flatnonzero(has_value)] == of_whole
                others = [] if rule.place == "every" else np.flatnonzero(~has_value)
                assert not any(any(of_pieces[piece][0]) for piece in others)
                continue
            lengths = np.array([[len(row)] for row in of_whole], dtype=np.int64)[row_of]
            begins, ends = (of_rules[:, 0] for of_rules in spans([rule], lengths, pieces))
            own_begins, own_ends = (of_rules[:, 0] for of_rules in own_spans([rule], lengths, pieces))
            together: list[list[bytes]] = [[] for _ in range(num_rows)]
            for piece, elements in enumerate(of_pieces):
                assert elements == of_whole[row_of[piece]][begins[piece] : ends[piece]]
                begin = own_begins[piece] - begins[piece]
                together[row_of[piece]] += elements[begin : begin + own_ends[piece] - own_begins[piece]]
            assert together == of_whole


def test_rules_that_lose_elements_are_refused():
    for rule, message in (
        (("items", 1, -1), "before = -1 and after = 0"),
        (("middle", 1, 0), "place is 'middle'"),
        (("items", 0, 0), "unit is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            FieldRule(*rule)


def test_a_cut_that_changes_an_element_is_found():
    loaded = Rows({"a": KeyedJaggedTensor(["x"], torch.arange(5.0), lengths=torch.tensor([2, 3]))})
    rules = CutRules((ItemGroup("a"),), {"a": FieldRule("items", before=1)})
    pieces = np.array([(0, 2, 2, 0, 0, 0), (0, 1, 3, 0, 0, 0), (1, 3, 3, 0, 0, 0)], dtype=PIECE)
    cut = cut_rows(loaded, pieces, rules)
    assert cut.fields["a"].values().tolist() == [0, 1, 2, 2, 3, 4]
    cut.fields["a"].values()[3] = 9  # another piece's own
    check_cut(loaded, cut, pieces, rules)
    cut.fields["a"].values()[4] = 9
    with pytest.raises(RuntimeError, match="the pieces of row 1 do not make up"):
        check_cut(loaded, cut, pieces, rules)
