import re
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.commons.advisor.command import MODEL, advise, heavy_tailed
from tests.commons.advisor.internals import main

REPORT_KEYS = "version data model load_unit assumptions cases"
CASE_KEYS = (
    "ranks rows_per_rank steps_drawn epochs_drawn lower_bound mean_tokens_per_rank bytes_loaded_per_rank "
    "all_gather_bytes_per_rank padded_model strategies recommendation"
)
STRATEGY_KEYS = (
    "name imbalance speedup speedup_exchange_not_hidden step_seconds exchange_seconds bytes_sent_per_rank "
    "share_of_samples_moved largest_tokens_per_rank samples_cut pieces bytes_fetched_per_rank_and_layer "
    "fetch_seconds planning_seconds_measured gin python"
)


def test_json_keeps_its_form(tmp_path):
    report = advise(tmp_path, heavy_tailed(500), "--ranks", "2,4")
    assert report.keys() == set(REPORT_KEYS.split())
    assert report["version"] == 3
    assert report["data"].keys() == {"source", "samples", "tokens", "length"}
    assert report["data"]["length"].keys() == {"min", "mean", "median", "p99", "max"}
    assert [case["ranks"] for case in report["cases"]] == [2, 4]
    for case in report["cases"]:
        assert case.keys() == set(CASE_KEYS.split())
        assert case["recommendation"].keys() == {"strategy", "headline", "notes", "gin", "python"}
        for strategy in case["strategies"]:
            assert strategy.keys() == set(STRATEGY_KEYS.split())


@pytest.mark.parametrize("model", ["hstu", "transformer"])
@pytest.mark.parametrize("tflops", [[], ["--tflops", "2"]])
def test_tables_name_what_is_predicted_and_what_to_set(tflops, model, tmp_path, capsys):
    path = tmp_path / "lengths.npy"
    np.save(path, heavy_tailed(500))
    options = ["--model", model, *tflops, "--ranks", "2", "--rows-per-rank", "8,16"]
    assert main([str(path), *MODEL, *options]) == 0
    out = capsys.readouterr().out
    for text in ("2 ranks × 8 rows", "2 ranks × 16 rows", "as loaded", "rebalance (default)", "MyShuffler("):
        assert text in out
    assert ("TrainerArgs.enable_balanced_shuffler = True" in out) == (model == "hstu")
    # Columns without a value are left out.
    assert bool(re.search(r"^strategy.* step ", out, re.MULTILINE)) == bool(tflops)


def test_the_page_stands_alone_and_has_the_figures(tmp_path):
    page = tmp_path / "page.html"
    report = advise(tmp_path, heavy_tailed(500), "--ranks", "2,8", "--html", str(page))
    text = page.read_text()
    assert not re.search(r"https?:|//|\bsrc=|<script|<link|@import|url\(", text)
    root = ElementTree.fromstring(text)
    # Lengths, speedup over the numbers of ranks that 500 samples allow, and the loads of two of them.
    assert len(list(root.iter("svg"))) == 4
    cells = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    for case in report["cases"]:
        for strategy in case["strategies"]:
            shown = f"{strategy['imbalance']:.3f}"
            assert any(shown in row for row in cells), shown
    assert [row[0] for row in cells if len(row) == 5][1:] == ["2", "4", "8"]


@pytest.mark.parametrize("length", [0, 7])
def test_lengths_may_be_equal_or_zero_on_the_page(length, tmp_path):
    folder = tmp_path / "<&>"  # its name is on the page
    folder.mkdir()
    page = folder / "page.html"
    arguments = ["--ranks", "2", "--rows-per-rank", "8", "--extra-tokens", "0", "--html", str(page)]
    advise(folder, [length] * 40, *arguments)
    assert "nan" not in page.read_text()
    ElementTree.fromstring(page.read_text())
