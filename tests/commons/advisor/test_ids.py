"""Unique ids per rank, and groups that stay together, where samples of a user stand next to one another."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from commons.distributed import ShufflerSettings
from commons.extensions.sample_groups import rebalance_groups
from commons.perf_model import HSTUFlops
from tests.commons.advisor.command import MODEL, advise_on, by_name
from tests.commons.advisor.internals import draw_steps, main
from tests.commons.distributed.internals import RowTable, place

RANKS, ROWS, PER_USER = 4, 16, 4
RUN = ["--ranks", str(RANKS), "--rows-per-rank", str(ROWS)]
SETTINGS = {
    "as_loaded": None,
    "refined": ShufflerSettings(partitioner="refined"),
    "rebalance": ShufflerSettings(),
    "rebalance_groups": ShufflerSettings(),
}


@pytest.fixture(scope="module")
def ids() -> list[list[int]]:
    """The ids of 1,600 samples: four of each user have the same."""
    lengths = np.random.default_rng(0).integers(20, 200, 400)
    ids_by_user = [
        list(range(end - length, end)) for end, length in zip(lengths.cumsum(), lengths, strict=True)
    ]
    return [user_ids for user_ids in ids_by_user for _ in range(PER_USER)]


@pytest.fixture(scope="module")
def path(ids: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "histories.parquet"
    pl.DataFrame({"user": np.arange(len(ids)) // PER_USER, "ids": ids}).write_parquet(path)
    return path


@pytest.mark.parametrize("num_samples", [90, 50_000])
def test_steps_in_order_are_those_of_a_loader_that_does_not_shuffle(num_samples):
    numbers = np.arange(num_samples)
    steps = draw_steps(numbers, numbers, numbers, 4, 10, in_order=True)
    epoch = numbers[: num_samples // 40 * 40].reshape(-1, 4, 10)
    step = steps.numbers[:, 0, 0] // 40
    np.testing.assert_array_equal(steps.numbers, epoch[step])
    assert len(np.unique(step)) == len(step)
    assert steps.num_epochs == 1
    assert step.max() - step.min() == len(epoch) - 1  # spread over the file


def test_unique_ids_are_those_of_training(path, ids):
    (case,) = advise_on(path, "--ids", "ids", "--groups", "user", *RUN)["cases"]
    figures = by_name(case)
    lengths = np.array(list(map(len, ids)))
    tokens = 2 * lengths + 1
    work = HSTUFlops(2, 64, 2, 32).per_sample(tokens)
    user = np.arange(len(ids)) // PER_USER
    steps = draw_steps(work, tokens, 24 * lengths, RANKS, ROWS, in_order=True)
    loaded = None
    for name, settings in SETTINGS.items():
        unique = []
        for numbers in steps.numbers.reshape(-1, RANKS * ROWS):
            rows = np.full(RANKS, ROWS)
            row_tokens = tokens[numbers]
            counts = (work[numbers], row_tokens, row_tokens, row_tokens[:, None], 24 * lengths[numbers])
            columns = {"groups": user[numbers]} if name == "rebalance_groups" else {}
            samples = RowTable(rows, rows, *counts, row_tokens[:, None], columns=columns)
            if columns:
                samples = replace(samples, partitioner=rebalance_groups)
            rank = samples.home if settings is None else place(samples, settings).destination
            on_ranks = [numbers[rank == held] for held in range(RANKS)]
            unique.append([len({i for sample in held for i in ids[sample]}) for held in on_ranks])
        per_rank, most = np.mean(unique), np.max(unique, axis=1).mean()
        loaded = loaded or (per_rank, most)
        assert figures[name]["unique_ids"] == {
            "steps": case["steps_drawn"],
            "per_rank": pytest.approx(per_rank),
            "of_rank_with_most": pytest.approx(most),
            "per_rank_relative": pytest.approx(per_rank / loaded[0]),
            "of_rank_with_most_relative": pytest.approx(most / loaded[1]),
        }
    assert "TrainerArgs.balance_group_feature = 'user'" in figures["rebalance_groups"]["gin"]
    assert "unique_ids" not in figures["pieces"]  # pieces share them out
    (note,) = [note for note in case["recommendation"]["notes"] if "unique ids" in note]
    assert "balance_group_feature = 'user'" in note


@pytest.mark.parametrize("options", [[], ["--ids", "ids"], ["--groups", "user"]])
def test_what_is_not_given_is_not_shown(options, path, capsys):
    page = path.with_suffix(".html")
    assert main([str(path), "--column", "ids", *options, *MODEL, *RUN, "--html", str(page)]) == 0
    out, written = capsys.readouterr().out, page.read_text()
    for shown in (out, written):
        assert ("unique ids" in shown) == ("--ids" in options)
        assert ("rebalance, groups" in shown) == ("--groups" in options)
    assert ("keeps the file" in written) == bool(options)
    assert ("random order" in written) == (not options)
