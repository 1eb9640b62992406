"""The figures are those of the library's own functions on the drawn steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commons.advisor.drawn_steps import DrawnSteps, draw_steps
from commons.distributed.placement import LoadedSamples, Placement
from commons.partition import balance_window, imbalance, lower_bound
from commons.perf_model import HSTUFlops
from commons.perf_model.measured_cost import MeasuredCost
from tests.commons.advisor.command import MODEL, by_name, heavy_tailed, run_json, saved

RANKS, ROWS, WINDOW = 8, 64, 4
LENGTHS = heavy_tailed(30_000)
RUN = ["--ranks", str(RANKS), "--rows-per-rank", str(ROWS)]


@pytest.fixture(scope="module")
def steps() -> DrawnSteps:
    tokens = 2 * LENGTHS + 1
    workloads = HSTUFlops(2, 64, 2, 32).per_sample(tokens)
    return draw_steps(workloads, tokens, 24 * LENGTHS, RANKS, ROWS, WINDOW)


@pytest.fixture
def case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return run_json(capsys, saved(tmp_path, LENGTHS), *MODEL, *RUN)["cases"][0]


def test_steps_are_drawn_without_replacement():
    numbers = np.arange(1000)
    drawn = draw_steps(numbers, numbers, numbers, 8, 10, 3)
    assert drawn.num_steps == 18  # at least 16, and a multiple of 3
    of_epoch = drawn.workloads[:12].ravel()
    assert len(np.unique(of_epoch)) == 960
    assert drawn.num_epochs == 2
    again = draw_steps(numbers, numbers, numbers, 8, 10, 3)
    np.testing.assert_array_equal(drawn.workloads, again.workloads)


def test_strategies_place_samples_as_the_shuffler_does(case: dict[str, Any], steps: DrawnSteps):
    figures = by_name(case)
    assert case["steps_drawn"] == steps.num_steps
    loaded_rows = np.full(RANKS, ROWS)
    home = np.repeat(np.arange(RANKS), ROWS)
    for name in ("karmarkar_karp", "refined", "rebalance"):
        placement = Placement(name, None, True, None, None)
        ratios, moved, largest = [], [], []
        for work, tokens, sizes in zip(steps.workloads, steps.tokens, steps.sizes, strict=True):
            loaded = LoadedSamples(work, tokens, sizes, loaded_rows, loaded_rows)
            partition = placement.place(loaded)
            ratios.append(imbalance(work, partition))
            largest.append(max(tokens[part].sum() for part in partition))
            moved.append(np.mean([home[i] != rank for rank, part in enumerate(partition) for i in part]))
        assert figures[name]["imbalance"]["mean"] == pytest.approx(np.mean(ratios), rel=1e-12)
        assert figures[name]["imbalance"]["std"] == pytest.approx(np.std(ratios, ddof=1), rel=1e-9, abs=1e-12)
        assert figures[name]["share_of_samples_moved"] == pytest.approx(np.mean(moved))
        assert figures[name]["largest_tokens_per_rank"] == pytest.approx(np.mean(largest))


def test_speedup_is_that_of_the_sums(case: dict[str, Any], steps: DrawnSteps):
    figures = by_name(case)
    loads = steps.workloads.reshape(-1, RANKS, ROWS).sum(-1)
    relative = loads.max(1).sum() / loads.mean(1).sum()
    assert figures["as_loaded"]["relative_time"] == pytest.approx(relative)
    speedup = figures["refined"]["speedup"]
    assert speedup == pytest.approx(relative / figures["refined"]["relative_time"])
    assert 0 < figures["refined"]["speedup_standard_error"] < 0.2 * speedup
    bounds = [lower_bound(work, RANKS) for work in steps.workloads]
    assert case["lower_bound"]["mean"] == pytest.approx(np.mean(bounds))
    assert figures["refined"]["step_seconds"] is None


def test_windows_are_those_of_balance_window(case: dict[str, Any], steps: DrawnSteps):
    window = by_name(case)["window"]
    largest = 0.0
    for group in steps.groups(WINDOW):
        for step in balance_window(group.workloads, RANKS, WINDOW):
            largest += max(group.workloads[part].sum() for part in step)
    ideal = steps.workloads.sum() / RANKS
    assert window["relative_time"] == pytest.approx(largest / ideal)
    assert window["changes_step_contents"]
    assert window["host_batches_per_rank"] == WINDOW + 1
    assert window["largest_step_ratio"] >= 1


def test_the_same_answer_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def answer() -> dict[str, Any]:
        report = copy.deepcopy(run_json(capsys, saved(tmp_path, heavy_tailed(900)), *MODEL, "--ranks", "2,4"))
        for case in report["cases"]:
            for strategy in case["strategies"]:
                del strategy["planning_seconds_measured"]
        return report

    assert answer() == answer()


def test_seconds_from_tflops_and_the_exchange(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lengths = heavy_tailed(2000)
    slow = ["--tflops", "2", "--bandwidth", "0.001", "--ranks", "4", "--window", "1"]
    (case,) = run_json(capsys, saved(tmp_path, lengths), *MODEL, *slow)["cases"]
    figures = by_name(case)
    assert "window" not in figures
    steps = _drawn(lengths, 4)
    loads = steps.workloads.reshape(-1, 4, 32).sum(-1).max(1)
    assert figures["as_loaded"]["step_seconds"] == pytest.approx(3 * loads.mean() / 2e12)
    refined = figures["refined"]
    assert refined["exchange_seconds"] == pytest.approx(refined["bytes_of_slowest_rank"] / 1e6)
    assert refined["bytes_of_slowest_rank"] >= refined["bytes_sent_per_rank"]
    assert refined["speedup_exchange_not_hidden"] < refined["speedup"]
    # The exchange takes longer than what it saves.
    assert refined["step_seconds"] == pytest.approx(refined["exchange_seconds"])
    assert refined["speedup"] < 1
    assert case["recommendation"]["strategy"] is None
    assert any("the network decides" in note for note in case["recommendation"]["notes"])


def test_few_moves_pay_where_the_exchange_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    slow = ["--tflops", "2", "--bandwidth", "0.02", "--ranks", "4"]
    (case,) = run_json(capsys, saved(tmp_path, heavy_tailed(2000)), *MODEL, *slow)["cases"]
    figures = by_name(case)
    assert figures["refined"]["speedup"] < figures["rebalance"]["speedup"]
    assert case["recommendation"]["strategy"] == "rebalance"
    assert "TrainerArgs.balance_partitioner = 'rebalance'" in case["recommendation"]["gin"]


def test_bytes_within_a_node_take_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = saved(tmp_path, heavy_tailed(2000))
    arguments = [path, *MODEL, "--ranks", "4", "--ranks-per-node"]
    (in_nodes,) = run_json(capsys, *arguments, "2")["cases"]
    (in_one,) = run_json(capsys, *arguments, "4")["cases"]
    refined = by_name(in_nodes)["refined"]
    assert 0 < refined["share_of_bytes_across_nodes"] < 1
    assert by_name(in_one)["refined"]["exchange_seconds"] == 0
    assert by_name(in_one)["refined"]["bytes_sent_per_rank"] == pytest.approx(refined["bytes_sent_per_rank"])


def test_a_measured_cost_has_a_part_that_does_not_shrink(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lengths = heavy_tailed(2000)
    seconds = {}
    for per_step in (0.0, 0.05):
        MeasuredCost(per_step, 1e-6, 2e-6, 1e-9).save(tmp_path / "cost.json")
        arguments = ["--cost", str(tmp_path / "cost.json"), "--ranks", "4", "--tokens-per-item", "2"]
        (case,) = run_json(capsys, saved(tmp_path, lengths), *arguments)["cases"]
        seconds[per_step] = by_name(case)
    for name in ("as_loaded", "refined"):
        step = seconds[0.0][name]["step_seconds"]
        assert seconds[0.05][name]["step_seconds"] == pytest.approx(step + 0.05)
    with_part = seconds[0.05]
    ratio = with_part["as_loaded"]["step_seconds"] / with_part["refined"]["step_seconds"]
    assert with_part["refined"]["speedup"] == pytest.approx(ratio)
    assert with_part["refined"]["speedup"] < seconds[0.0]["refined"]["speedup"]


def _drawn(lengths: np.ndarray, ranks: int) -> DrawnSteps:
    tokens = 2 * lengths + 1
    return draw_steps(HSTUFlops(2, 64, 2, 32).per_sample(tokens), tokens, 24 * lengths, ranks, 32, 1)
