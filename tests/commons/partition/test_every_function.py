from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.partition import imbalance, lower_bound
from tests.commons.partition.checks import SLACK, check_partition
from tests.commons.partition.drawn_workloads import ARRAYS, PARTS, WORKLOADS
from tests.commons.partition.every_function import (
    NUM_STEPS,
    ONE_STEP,
    PARTITIONS,
    WITH_WINDOWS,
    partition_with,
    partitions_with_ties,
)

REPOSITORY = Path(__file__).parents[3]
PROGRAM = (
    "from tests.commons.partition.every_function import partitions_with_ties; print(partitions_with_ties())"
)
every_function = pytest.mark.parametrize("name", PARTITIONS)


@every_function
@settings(max_examples=80, deadline=None)
@given(workloads=WORKLOADS, parts=PARTS, equal_size=st.booleans(), doublings=st.integers(1, 40))
def test_every_sample_is_in_one_part_whatever_the_unit(name, workloads, parts, equal_size, doublings):
    partition = PARTITIONS[name](workloads, parts, equal_size)
    num_parts, is_equal = parts, equal_size
    if name in WITH_WINDOWS and name not in ONE_STEP:
        num_parts = parts * NUM_STEPS
    elif name not in WITH_WINDOWS:
        num_parts, is_equal = len(partition), False
    check_partition(partition, len(workloads), num_parts, is_equal)
    assert imbalance(workloads, partition) * SLACK >= lower_bound(workloads, num_parts, is_equal)
    expected = [part.tolist() for part in partition]
    assert partition_with(name, list(workloads), parts, equal_size) == expected
    scaled = [value * 2.0**doublings for value in workloads]
    assert partition_with(name, scaled, parts, equal_size) == expected


@every_function
@pytest.mark.parametrize("kind", ARRAYS)
def test_kind_and_type_of_the_workloads_do_not_matter(name, kind):
    workloads = [5, 0, 17, 3, 3, 8, 1, 2, 40]
    expected = partition_with(name, np.array(workloads, np.float64), 3, True)
    assert partition_with(name, kind(workloads), 3, True) == expected


@pytest.mark.parametrize("name", ["refined", "rebalance", "balance_window"])
def test_many_workloads_of_1e15_do_not_overflow(name):
    workloads = 1e15 * (1 + 0.1 * np.random.default_rng(0).random(100_000))
    for equal_size in (True, False):
        partition = PARTITIONS[name](workloads, 64, equal_size)
        check_partition(partition, len(workloads), len(partition), equal_size)
        assert imbalance(workloads, partition) <= 1.01 * lower_bound(workloads, len(partition), equal_size)


def test_other_processes_and_hash_seeds_reach_the_same_partition():
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    process = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(
        process, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True, timeout=240
    ).stdout
    assert output.strip() == str(partitions_with_ties())
