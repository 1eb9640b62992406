from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.commons.partition.drawn_workloads import PARTS, WORKLOADS
from tests.commons.partition.every_function import PARTITIONS, partition_with

REPOSITORY = Path(__file__).parents[3]
PROGRAM = (
    "from tests.commons.partition.test_determinism import partitions_with_ties; print(partitions_with_ties())"
)
every_function = pytest.mark.parametrize("name", PARTITIONS)


def partitions_with_ties():
    workloads = np.random.default_rng(1).integers(0, 40, 200)
    return {
        (name, equal_size): partition_with(name, workloads, 7, equal_size)
        for name in PARTITIONS
        for equal_size in (True, False)
    }


def test_other_processes_and_hash_seeds_reach_the_same_partition():
    expected = str(partitions_with_ties())
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout
        assert output.strip() == expected


@every_function
@settings(max_examples=50, deadline=None)
@given(workloads=WORKLOADS, parts=PARTS, equal_size=st.booleans())
def test_equal_input_gives_equal_output(name, workloads, parts, equal_size):
    partition = partition_with(name, workloads, parts, equal_size)
    assert partition_with(name, list(workloads), parts, equal_size) == partition


@every_function
def test_a_power_of_two_in_the_unit_of_the_workloads_does_not_matter(name):
    rng = np.random.default_rng(0)
    for _ in range(100):
        workloads = rng.lognormal(4, 1, rng.integers(0, 100)).astype(np.int64)
        parts, equal_size, doublings = int(rng.integers(1, 10)), bool(rng.integers(0, 2)), rng.integers(1, 30)
        partition = partition_with(name, workloads, parts, equal_size)
        scaled = partition_with(name, workloads << doublings, parts, equal_size)
        assert scaled == partition, (workloads.tolist(), parts, equal_size, doublings)
