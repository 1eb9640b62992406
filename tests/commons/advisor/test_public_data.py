import json

import numpy as np
import pytest

from tests.commons.advisor.command import MODEL
from tests.commons.advisor.internals import ASSUMED_SPREAD, PUBLIC_DATA, main

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


def test_every_output_says_that_lengths_are_drawn(capsys):
    named = ["--lengths-of", "yambda-5b", "--max-length", "300", *MODEL, "--ranks", "4"]
    origin = PUBLIC_DATA["yambda-5b"].describe()
    assert main(named) == 0
    assert origin in " ".join(capsys.readouterr().out.split())
    assert main([*named, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["data"]["length"]["max"] == 300
    assert report["assumptions"][0] == origin
