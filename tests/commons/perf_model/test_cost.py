"""Costs: sums over counts, and their files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model import Cost

# Of a sample, a token, and two columns, in nanoseconds.
COST = Cost((1e5, 1e3, 0.5, 2.0), per_step=2e6)


@given(
    st.lists(st.floats(0, 1e6), min_size=3, max_size=5).filter(any),
    st.lists(st.tuples(*[st.integers(0, 10**6)] * 5), min_size=1, max_size=9),
)
def test_a_row_costs_the_sum_of_its_counts_and_more_counts_never_cost_less(coefficients, rows):
    cost, counts = Cost(tuple(coefficients)), np.array(rows)[:, : len(coefficients)]

    def of(counts: np.ndarray) -> np.ndarray:
        return cost.of(counts[:, 0], counts[:, 1], counts[:, 2:])

    np.testing.assert_allclose(of(counts), counts @ np.array(coefficients), rtol=1e-12, atol=0.5)
    assert (of(counts + 1) >= of(counts)).all()
    np.testing.assert_allclose(cost.step_seconds(counts), of(counts) * 1e-9, rtol=1e-9, atol=1e-9)


def test_the_sum_of_columns_is_exact_and_ends_where_integers_do():
    work = np.array([[2**53 - 1, 0], [3, 4], [2**62, 2**62], [2**63 - 1, 0]])
    cost = Cost.sum_of_columns(2).of(1, np.ones(4, dtype=np.int64), work)
    assert cost.dtype == np.int64 and cost[:2].tolist() == [2**53 - 1, 7]
    assert (cost[2:] > 2**63 - 2**12).all()
    of_integers = Cost((0, 0, 10**6))  # their products exceed int64
    assert of_integers.of(1, np.ones(1), np.array([[10**13]])) > 2**62


def test_written_and_read_it_is_the_same_and_other_files_are_named(tmp_path):
    path = tmp_path / "made" / "cost.json"
    COST.save(path)
    assert Cost.load(path) == COST
    kind = '"kind": "cost of samples, tokens and workloads"'
    for content in ("", "[]", '{"kind": "other"}', f'{{{kind}, "coefficients": [1, -1, 0]}}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"cost\.json is not a cost written by a calibration"):
            Cost.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        Cost.load(tmp_path / "none.json")


def test_a_cost_that_cannot_be_is_refused():
    for coefficients, message in (
        ((0.0, -1.0, 0.0, 1.0), "has -1.0; expected finite numbers of at least 0"),
        ((float("nan"), 1.0, 1.0, 1.0), "has nan"),
        ((0.0, 0.0, 0.0), "no sample costs anything"),
        ((1.0, 1.0), "has no coefficient of a column"),
    ):
        with pytest.raises(ValueError, match=message):
            Cost(coefficients)
