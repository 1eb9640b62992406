"""Settings that are out of range, or have no effect, are refused."""

from __future__ import annotations

import pytest

from commons.distributed import BatchShufflerFactory, placement
from commons.distributed.row_table import RowTable
from commons.distributed.shuffler_settings import PARTITIONERS, ShufflerSettings
from tests.commons.distributed.shufflers import FieldShuffler


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"partitioner": "nothing"}, "unknown partitioner='nothing'; there are"),
        ({"exchange": "nothing"}, "unknown exchange='nothing'; there are"),
        ({"tolerance": -0.1}, "tolerance=-0.1: expected"),
        ({"tolerance": float("nan")}, "tolerance=nan: expected"),
        ({"token_tolerance": -0.1}, "token_tolerance=-0.1: expected"),
        ({"token_tolerance": float("inf")}, "token_tolerance=inf: expected"),
        (
            {"partitioner": "karmarkar_karp", "tolerance": 0.1},
            "tolerance=0.1 has no effect on partitioner='karmarkar_karp': leave it None",
        ),
        (
            {"partitioner": "karmarkar_karp", "max_tokens": 9},
            "max_tokens=9: partitioner='karmarkar_karp' has no argument max_tokens; choose another",
        ),
        ({"max_tokens": 0}, "max_tokens=0: expected an integer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises((KeyError, ValueError), match=message):
        ShufflerSettings(**setting)


def test_a_partitioner_without_equal_size_cannot_make_rows_equal(monkeypatch):
    monkeypatch.setitem(PARTITIONERS, "mine", lambda workloads, num_partitions: [])
    with pytest.raises(ValueError, match="equal_rows=True: partitioner='mine' has no argument equal_size"):
        ShufflerSettings("mine")
    assert not ShufflerSettings("mine", equal_rows=False).takes("equal_size")


@pytest.mark.parametrize("partitioner", sorted(PARTITIONERS))
@pytest.mark.parametrize("token_tolerance", [None, 0.1, 0.5])
def test_partitioners_without_a_token_tolerance_ignore_it(partitioner, token_tolerance):
    settings = ShufflerSettings(partitioner, token_tolerance=token_tolerance)
    heeded = token_tolerance if partitioner in ("rebalance", "refined") else None
    assert placement.token_tolerance(RowTable.empty(2), settings) == heeded


def test_every_shuffler_checks_its_settings():
    with pytest.raises(ValueError, match="tolerance=-0"):
        FieldShuffler(tolerance=-0.1)
    with pytest.raises(ValueError, match="max_tokens=0"):
        BatchShufflerFactory.create("identity", max_tokens=0)


def test_unknown_settings_are_refused_with_those_that_there_are():
    with pytest.raises(
        TypeError, match=r"FieldShuffler has no setting 'tolerence'; there are \[.*'tolerance'"
    ):
        FieldShuffler(tolerence=0.1)
