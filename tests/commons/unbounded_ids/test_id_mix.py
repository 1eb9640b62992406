import pytest
import torch

from commons.unbounded_ids import NO_ID
from tests.commons.unbounded_ids.internals import MARK_OF_FREE_ROW, fresh_rows, mixed, owners, unmixed

LARGEST = torch.iinfo(torch.int64).max
GENERATOR = torch.Generator().manual_seed(1)
IDS = {
    "dense": torch.arange(3000),
    "multiples": torch.arange(3000) * 64,
    "high bits": torch.arange(3000) << 44,
    "negative": -torch.arange(1, 3001),
    "hashes": torch.randint(NO_ID, LARGEST, (3000,), generator=GENERATOR),
    "largest": LARGEST - torch.arange(3000),
}


@pytest.mark.parametrize("kind", IDS)
def test_ids_come_back_and_spread_evenly(kind):
    values = mixed(IDS[kind])
    assert torch.equal(unmixed(values), IDS[kind])
    for num_ranks in (2, 3, 8):
        numbers = torch.bincount(owners(values, num_ranks), minlength=num_ranks)
        assert (numbers * num_ranks / 3000 - 1).abs().max() < 0.2, numbers


def test_the_owner_is_the_remainder_of_an_unsigned_number():
    values = mixed(IDS["dense"])
    for num_ranks in (2, 3, 7):
        assert owners(values, num_ranks).tolist() == [value % 2**64 % num_ranks for value in values.tolist()]


def test_no_id_is_the_only_one_that_marks_a_free_row():
    assert int(mixed(torch.tensor(NO_ID))) == MARK_OF_FREE_ROW
    assert all((mixed(ids) != MARK_OF_FREE_ROW).all() for ids in IDS.values())


def test_fresh_rows_are_uniform_and_of_the_id_and_salt_alone():
    values = mixed(torch.arange(20000))
    rows = fresh_rows(values, 6, 0.5, salt=3)
    assert torch.equal(fresh_rows(values[7:9], 6, 0.5, salt=3), rows[7:9])
    assert rows.abs().max() <= 0.5
    assert rows.mean(0).abs().max() < 0.01
    assert (rows.std(0) - 0.5 / 3**0.5).abs().max() < 0.01
    together = torch.cat([rows, fresh_rows(values, 6, 0.5, salt=4), rows.roll(1, 0)], 1)
    assert (torch.corrcoef(together.T) - torch.eye(18)).abs().max() < 0.03
