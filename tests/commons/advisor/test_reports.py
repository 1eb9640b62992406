from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from commons.advisor.__main__ import main
from tests.commons.advisor.command import MODEL, heavy_tailed, run_json, saved

STRATEGY_KEYS = {
    "name",
    "window",
    "changes_step_contents",
    "imbalance",
    "relative_time",
    "speedup",
    "speedup_standard_error",
    "speedup_exchange_not_hidden",
    "step_seconds",
    "exchange_seconds",
    "bytes_sent_per_rank",
    "bytes_of_slowest_rank",
    "share_of_bytes_across_nodes",
    "share_of_samples_moved",
    "largest_tokens_per_rank",
    "most_tokens_per_rank",
    "largest_step_ratio",
    "host_batches_per_rank",
    "host_bytes_per_rank",
    "planning_seconds_measured",
    "planning_hidden",
    "gin",
}


def test_json_keeps_its_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = run_json(capsys, saved(tmp_path, heavy_tailed(500)), *MODEL, "--ranks", "2,4")
    assert report.keys() == {"version", "data", "model", "assumptions", "cases"}
    assert report["version"] == 1
    assert report["data"].keys() == {"source", "samples", "tokens", "length"}
    assert report["data"]["length"].keys() == {"min", "mean", "median", "p99", "max"}
    assert [case["ranks"] for case in report["cases"]] == [2, 4]
    for case in report["cases"]:
        assert case.keys() == {
            "ranks",
            "rows_per_rank",
            "steps_drawn",
            "epochs_drawn",
            "lower_bound",
            "mean_tokens_per_rank",
            "bytes_loaded_per_rank",
            "all_gather_bytes_per_rank",
            "strategies",
            "recommendation",
        }
        assert case["recommendation"].keys() == {"strategy", "headline", "notes", "gin"}
        for strategy in case["strategies"]:
            assert strategy.keys() == STRATEGY_KEYS


def test_tables_name_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([saved(tmp_path, heavy_tailed(500)), *MODEL, "--ranks", "2", "--rows-per-rank", "8,16"]) == 0
    written = capsys.readouterr()
    assert "2 ranks × 8 rows: 16 steps drawn" in written.out
    assert "2 ranks × 16 rows" in written.out
    for text in (
        "as loaded",
        "Karmarkar–Karp",
        "refined (default)",
        "rebalance",
        "window of 4",
        "lower bound",
    ):
        assert text in written.out
    assert "TrainerArgs.enable_balanced_shuffler = True" in written.out
    assert "tokens = 2 × length + 1" in written.out
    assert "the smaller" in written.out
    assert written.err == ""


def test_the_page_stands_alone_and_has_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    arguments = [saved(tmp_path, heavy_tailed(500)), *MODEL, "--ranks", "2,8", "--html", str(page)]
    report = run_json(capsys, *arguments)
    text = page.read_text()
    assert not re.search(r"https?:|//|\bsrc=|<script|<link|@import|url\(", text)
    root = ElementTree.fromstring(text)
    assert root.attrib["lang"] == "en"
    charts = list(root.iter("svg"))
    # Lengths, speedup over the numbers of ranks that 500 samples allow, and the loads of two of them.
    assert len(charts) == 4
    assert all(chart.attrib["role"] == "img" and len(chart.attrib["aria-label"]) > 40 for chart in charts)
    cells = [_row(row) for row in root.iter("tr")]
    for case in report["cases"]:
        for strategy in case["strategies"]:
            imbalance = strategy["imbalance"]
            shown = f"{imbalance['mean']:.3f} ± {imbalance['std']:.3f}"
            assert any(shown in row for row in cells), shown
    assert [row[0] for row in cells if len(row) == 5][1:] == ["2", "4", "8"]


def test_lengths_may_be_equal_or_zero_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for number, lengths in enumerate(([0] * 40, [1] * 40, [7] * 40)):
        page = tmp_path / f"{number}.html"
        path = tmp_path / "lengths.csv"
        path.write_text("n\n" + "\n".join(map(str, lengths)))
        arguments = ["--ranks", "2", "--rows-per-rank", "8", "--extra-tokens", "0", "--html", str(page)]
        run_json(capsys, str(path), *MODEL, *arguments)
        assert "nan" not in page.read_text()
        ElementTree.fromstring(page.read_text())


def _row(row: Any) -> list[str]:
    return ["".join(cell.itertext()) for cell in row]
