"""Cutting samples into pieces changes nothing that a step learns."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from commons.distributed import BatchShufflerFactory
from tests.drawn_cuts import drawn_cuts
from tests.gradient_comparison import Comparison, check_equal, comparison, steps
from tests.gradient_models import CASES

MODELS = [
    *((name, pipeline) for name in ("ranking", "retrieval") for pipeline in ("none", "native")),
    ("ranking with candidates and tasks", "native"),
    ("ranking, not causal", "native"),
    ("sid_gr, last item", "none"),
    ("sid_gr, all items", "none"),
]


def compare(name: str, pipeline: str, num_real: tuple[int, ...], seeds: list[int]) -> list[Comparison]:
    """Returns comparisons of drawn cuts with a plain step; the last one of cuts that are worked out."""
    case = CASES[name]
    batch = case.batch(num_real, True)
    plain = steps(case.make_model(), pipeline, BatchShufflerFactory.create("identity"), [batch])
    results = []
    for seed in [*seeds, None]:
        config: dict[str, Any] = {**case.shuffler, "split": True, "equal_rows": False, "verify": seed == 0}
        shuffler = BatchShufflerFactory.create_from_config(config)
        if seed is not None:
            shuffler.planner.cuts = partial(drawn_cuts, seed=seed)
        results.append(comparison(plain, steps(case.make_model(), pipeline, shuffler, [batch])))
    return results


@pytest.mark.parametrize("num_real", [(6, 6), (6, 3, 0), (2, 6, 1, 4)])
@pytest.mark.parametrize(("name", "pipeline"), MODELS)
def test_gradients_of_pieces_are_those_of_whole_samples(pools, name, pipeline, num_real):
    ranks = pools(len(num_real)).run(compare, name, pipeline, num_real, list(range(6)))
    for results in zip(*ranks, strict=True):
        check_equal(results, has_loss=True)
