import json
import re

import numpy as np
import pytest

from commons.advisor.__main__ import main
from commons.advisor.public_data import ASSUMED_SPREAD, PUBLIC_DATA
from tests.commons.advisor.command import MODEL

USERS = 400_000


@pytest.mark.parametrize("name", PUBLIC_DATA)
def test_lengths_match_what_is_published(name):
    published = PUBLIC_DATA[name]
    lengths = published.draw(np.random.default_rng(1), USERS)
    assert lengths.dtype == np.int64 and len(lengths) == USERS
    assert lengths.mean() == pytest.approx(published.mean, rel=0.03)
    assert lengths.min() >= published.least
    if published.most is not None:
        assert lengths.max() == published.most
    if published.median is None:
        assert published.spread == ASSUMED_SPREAD
    else:
        assert np.median(lengths) == pytest.approx(published.median, rel=0.02)
    assert (published.cap is None) == (published.cap_source is None)


@pytest.mark.parametrize("name", PUBLIC_DATA)
def test_the_description_names_figures_and_sources(name):
    published = PUBLIC_DATA[name]
    described = published.describe()
    assert f"mean {published.mean:,.0f}" in described
    assert "https://" in described and re.search(r"read \d{4}-\d\d-\d\d", described)
    if published.median is None:
        assert "no median was found" in described
    else:
        assert f"median {published.median:,.0f}" in described


def test_every_output_says_that_lengths_are_drawn(tmp_path, capsys):
    page = tmp_path / "page.html"
    named = ["--lengths-of", "yambda-5b", "--max-length", "300", *MODEL, "--ranks", "4", "--html", str(page)]
    origin = PUBLIC_DATA["yambda-5b"].describe()
    assert main(named) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "as published of Yambda-5B, newest 300" in text and origin in text
    assert "as published of Yambda-5B, newest 300" in page.read_text()
    assert "median 2,695" in page.read_text()
    assert main([*named, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["data"]["length"]["max"] == 300
    assert report["data"]["source"] == "as published of Yambda-5B, newest 300"
    assert report["assumptions"][0] == origin


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths-of", "yamba"], f"--lengths-of yamba; expected one of {', '.join(PUBLIC_DATA)}"),
        (["lengths.npy", "--lengths-of", "taobao"], "both have lengths; expected one of them"),
        (["lengths.npy", "--max-length", "5"], "--max-length 5 has no effect without --lengths-of"),
        (["--lengths-of", "taobao", "--ids", "items"], "--ids items has no effect with --lengths-of"),
        (["--lengths-of", "taobao", "--max-length", "0"], "expected a whole number of at least 1"),
        ([], "no data; expected a file of lengths, or --lengths-of"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert main([*arguments, *MODEL]) == 2
    assert message in capsys.readouterr().err
