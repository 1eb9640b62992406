"""Settings that are out of range, or have no effect, are refused."""

from __future__ import annotations

import pytest

from commons.distributed import BatchShufflerFactory
from commons.distributed.exchange import EXCHANGES
from commons.distributed.shuffler_settings import EXCHANGE_NAMES, ShufflerSettings
from tests.commons.distributed.shufflers import FieldShuffler


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"partitioner": "nothing"}, "unknown partitioner 'nothing'; there are"),
        ({"exchange": "nothing"}, "unknown exchange 'nothing'; there are"),
        ({"tolerance": -0.1}, "tolerance=-0.1: expected"),
        ({"tolerance": float("nan")}, "tolerance=nan: expected"),
        ({"partitioner": "karmarkar_karp", "tolerance": 0.1}, "0.1 has no effect on 'karmarkar_karp'"),
        (
            {"partitioner": "karmarkar_karp", "max_tokens": 9},
            "9: 'karmarkar_karp' has no argument",
        ),
        ({"max_tokens": 0}, "max_tokens=0: expected an integer"),
        ({"max_rows": 9}, "max_rows=9 has no effect with equal_rows=True"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch=0: expected an integer"),
        ({"max_tokens_per_micro_batch": -3}, "max_tokens_per_micro_batch=-3: expected an integer"),
        ({"window": 0}, "window=0: expected an integer of at least 1"),
        ({"window": -2}, "window=-2: expected an integer of at least 1"),
        ({"window_max_step_ratio": 1.5}, "window_max_step_ratio=1.5 has no effect with window=1"),
        ({"window": 2, "window_max_step_ratio": 0.9}, "window_max_step_ratio=0.9: expected at least 1"),
        ({"window": 2, "window_max_step_ratio": float("nan")}, "window_max_step_ratio=nan: expected"),
        ({"window": 2, "tolerance": 0.1}, "tolerance=0.1 has no effect with window=2"),
        ({"window": 2, "max_tokens": 9}, "max_tokens=9 has no effect with window=2"),
        ({"window": 2, "equal_rows": False, "max_rows": 9}, "max_rows=9 has no effect with window=2"),
        ({"window": 2, "partitioner": "refined"}, "partitioner='refined' has no effect with window=2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises((KeyError, ValueError), match=message):
        ShufflerSettings(**setting)


def test_settings_name_every_exchange():
    assert sorted(EXCHANGE_NAMES) == sorted(EXCHANGES)


def test_every_shuffler_checks_its_settings():
    with pytest.raises(ValueError, match="window=0"):
        FieldShuffler(window=0)
    with pytest.raises(ValueError, match="window=0"):
        BatchShufflerFactory.create("identity", window=0)
