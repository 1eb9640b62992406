from __future__ import annotations

from pathlib import Path
from typing import Any

import gin
import numpy as np
import pytest

from commons.gin_values import from_gin
from commons.perf_model import MeasuredCost
from commons.training.training_args import TrainerArgs
from tests.commons.advisor.command import MODEL, by_name, heavy_tailed, run_json, saved


def recommended(
    lengths: np.ndarray, folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    (case,) = run_json(capsys, saved(folder, lengths), *MODEL, *arguments)["cases"]
    return case


def test_nothing_to_gain_on_one_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    case = recommended(np.full(600, 50), tmp_path, capsys, "--ranks", "4")
    assert case["recommendation"]["strategy"] is None
    assert case["recommendation"]["headline"].startswith("Nothing to gain here")
    assert case["recommendation"]["gin"] == case["recommendation"]["notes"] == []
    assert by_name(case)["refined"]["share_of_samples_moved"] == 0
    assert by_name(case)["refined"]["speedup"] == 1


def test_nothing_to_gain_where_nothing_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (case,) = run_json(
        capsys, saved(tmp_path, np.zeros(600, dtype=np.int64)), *MODEL, "--ranks", "4", "--extra-tokens", "0"
    )["cases"]
    assert case["recommendation"]["strategy"] is None
    assert by_name(case)["window"]["imbalance"]["mean"] == 1


def test_one_rank_waits_for_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    case = recommended(heavy_tailed(600), tmp_path, capsys, "--ranks", "1")
    assert case["recommendation"]["strategy"] is None
    assert "single rank" in case["recommendation"]["headline"]
    assert by_name(case).keys() == {"as_loaded"}


def test_the_default_where_karmarkar_karp_is_not_as_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    case = recommended(heavy_tailed(6000), tmp_path, capsys, "--rows-per-rank", "64")
    assert case["recommendation"]["strategy"] == "refined"
    assert by_name(case)["refined"]["speedup"] > by_name(case)["karmarkar_karp"]["speedup"] + 0.05
    assert not any("Karmarkar" in note for note in case["recommendation"]["notes"])


def test_karmarkar_karp_is_as_good_on_capped_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lengths = np.random.default_rng(0).integers(1, 201, 3000)
    case = recommended(lengths, tmp_path, capsys)
    assert case["recommendation"]["strategy"] == "refined"
    assert any("Karmarkar–Karp" in note and "no less" in note for note in case["recommendation"]["notes"])


def test_giants_need_more_than_a_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lengths = np.full(3000, 20)
    lengths[::100] = 4000
    case = recommended(lengths, tmp_path, capsys, "--rows-per-rank", "8")
    notes = " ".join(case["recommendation"]["notes"])
    assert case["lower_bound"]["mean"] > 1.5
    assert "No placement of whole samples within a step" in notes
    assert "window of 4 steps would give" in notes and "changes training" in notes
    assert "shorter histories" in notes


def test_what_is_to_be_pasted_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    case = recommended(heavy_tailed(1000), tmp_path, capsys, "--ranks", "4", "--window", "3")
    expected = {
        "as_loaded": {},
        "karmarkar_karp": {"partitioner": "karmarkar_karp"},
        "refined": {},
        "rebalance": {"partitioner": "rebalance"},
        "window": {"window": 3},
    }
    assert by_name(case).keys() == expected.keys()
    for name, strategy in by_name(case).items():
        gin.clear_config()
        try:
            gin.parse_config("\n".join(strategy["gin"]))
            trainer = from_gin(TrainerArgs)
        finally:
            gin.clear_config()
        assert trainer.enable_balanced_shuffler == (name != "as_loaded")
        assert trainer.balance_settings == expected[name]
        assert trainer.train_batch_size == 32


def test_what_is_balanced_by_measured_times_is_to_be_trained_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cost = MeasuredCost(0.01, 1e-4, 1e-6, 1e-9)
    cost.save(tmp_path / "cost.json")
    lengths = saved(tmp_path, heavy_tailed(1000))
    (case,) = run_json(capsys, lengths, "--cost", str(tmp_path / "cost.json"), "--ranks", "4")["cases"]
    gin.clear_config()
    try:
        gin.parse_config("\n".join(by_name(case)["refined"]["gin"]))
        assert from_gin(TrainerArgs).balance_settings == {"cost": cost}
    finally:
        gin.clear_config()
