"""The benchmark of plans: it times what the shuffler calls, and counts what ranks send."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.partition.pieces import load_histories
from benchmarks.partition.placements import RANKS_PER_NODE, ROWS_PER_RANK, draw_lognormal
from benchmarks.partition.plans_at_size import (
    DEFAULT_NODES,
    HIDDEN_SIZE,
    PARTITIONERS,
    GatheredStep,
    call_partitioner,
    count_sent,
)
from commons.distributed import ShufflerSettings
from tests.commons.distributed.internals import place_rows

RANKS = 16
LENGTHS = draw_lognormal(np.random.default_rng(0), ROWS_PER_RANK * RANKS)


@pytest.mark.parametrize("title", PARTITIONERS)
def test_placements_are_those_of_the_shuffler(title):
    settings, has_nodes = PARTITIONERS[title]
    rows = load_histories(LENGTHS, HIDDEN_SIZE, RANKS)[0]
    expected = place_rows(replace(rows, ranks_per_node=RANKS_PER_NODE if has_nodes else None), settings)
    assert np.array_equal(call_partitioner(title, rows), expected)


def test_a_gathered_step_is_decoded_and_planned_as_it_was_loaded():
    rows, _ = load_histories(LENGTHS, HIDDEN_SIZE, RANKS)
    step = GatheredStep.of(LENGTHS, RANKS)
    for name in ("batch_sizes", "workloads", "tokens", "key_lengths", "sample_bytes"):
        assert np.array_equal(getattr(step.decode(), name), getattr(rows, name)), name
    plan = step.plan(ShufflerSettings())
    assert np.array_equal(plan.destination, call_partitioner(DEFAULT_NODES, step.rows))
    assert plan.rows.ranks_per_node == RANKS_PER_NODE


def test_bytes_and_messages_are_those_of_the_moved_samples():
    """Rank 0 sends 450 kB within its node and 100 kB to others, which takes 2 µs; rank 9 sends less."""
    sender, receiver = np.array([0, 0, 0, 0, 9]), np.array([1, 1, 8, 9, 0])
    sizes = np.array([300_000, 150_000, 60_000, 40_000, 50_000])
    figures = count_sent(sender, receiver, sizes, RANKS)
    assert figures["kb_within_node"] == 450 and figures["kb_to_others"] == 100
    assert figures["us"] == pytest.approx(2)
    assert figures["dense_us"] == pytest.approx(6)  # two samples of 100 kB more to other nodes
    assert figures["messages"] == 3 and figures["messages_across"] == 2
    assert figures["mean_messages"] == 4 / RANKS and figures["mean_messages_across"] == 3 / RANKS
    nothing = np.empty(0, dtype=np.int64)
    assert set(count_sent(nothing, nothing, nothing, RANKS).values()) == {0}
