"""The programs learn the same as a single process that has the batches of all ranks."""

import re

import pytest
import torch
import torch.distributed as dist

from commons.distributed import BalanceReport, BatchShuffler
from tests.examples.programs import (
    BATCH_SIZE,
    EXAMPLES,
    FOLDER,
    PROGRAMS,
    Shards,
    load,
    printed_lines,
    printed_losses,
    rows_of,
    source,
    source_before,
    trained,
    trained_alone,
)
from tests.on_ranks import on_ranks

STEPS = 6


def check_equal(results: list[tuple[list[float], Shards]], losses: list[float], parameters: dict) -> None:
    """Checks losses and parameters to 1e-5, and that the ranks together hold each whole parameter."""
    for rank_values, shards in results:
        assert rank_values == pytest.approx(losses, rel=1e-5)
        assert shards.keys() <= parameters.keys()
    for name, expected in parameters.items():
        seen = torch.zeros_like(expected, dtype=torch.bool)
        for _, shards in results:
            for offsets, values in shards.get(name, []):
                ends = (begin + size for begin, size in zip(offsets, values.shape, strict=True))
                place = tuple(map(slice, offsets, ends))
                seen[place] = True
                assert (values - expected[place]).norm() <= 1e-5 * expected[place].norm(), name
        assert seen.all(), name


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("loader_bookkeeping", [5, 2]),  # which two ranks do not divide
        ("stream_loop", [5, 2]),
        ("stream_loop", [5, 0]),
        ("nested_batch", [1, 0]),  # a rank without a sample
        ("pooled_dlrm", [1, 0]),  # which runs a copied row
        ("gradient_accumulation", [0, 1]),
        ("padded_sasrec", [5, 2]),
        ("padded_sasrec", [1, 0]),
        ("bert4rec", [2, 1]),  # two samples without a masked item, and their rank without a loss token
        ("bert4rec", [5, 2, 0]),
    ],
)
def test_a_program_learns_what_a_single_process_does(pools, name, last):
    data = rows_of(name, last, STEPS)
    losses, parameters = trained_alone(name, data)
    assert len(losses) == STEPS
    check_equal(pools(len(last)).run(trained, name, data), losses, parameters)


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_the_marked_lines_a_program_learns_the_same(pools, name):
    assert "workload_balancer" in source(name)
    assert not re.search("workload_balancer|shuffler", source_before(name), re.IGNORECASE)
    rows = rows_of(name, [BATCH_SIZE], 1)[0][:BATCH_SIZE]
    # Averages of ranks are right for equal loss tokens.
    data = 2 * [rows * STEPS * PROGRAMS[name].accumulated]
    check_equal(pools(2).run(trained, name, data, True), *trained_alone(name, data))


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_a_program_is_balanced(name):
    module = load(name)
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    [shuffler] = [value for value in classes if BatchShuffler in value.__bases__]
    made = shuffler(**PROGRAMS[name].settings())
    data = rows_of(name, [BATCH_SIZE] * 2)[dist.get_rank()]
    report = BalanceReport.of(made.plan(module.collate(data[:BATCH_SIZE])), made.settings.equal_rows)
    before, after = report.imbalance_before, report.imbalance_after
    assert before > 1.01
    assert after < 1 + (before - 1) / 2


def test_every_example_is_tried():
    others = {"own_torchrec_model", "stream_sampler", "budget_batches"}
    assert {path.stem for path in FOLDER.glob("*.py")} == {*EXAMPLES, *others}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_program_prints_the_losses_of_a_single_process(tmp_path, name):
    losses, _ = trained_alone(name, rows_of(name, [5, 2]))
    assert printed_losses(name, tmp_path) == pytest.approx(losses, abs=1e-4)


def test_padded_sasrec_shows_what_it_gains(tmp_path):
    lines = printed_lines("padded_sasrec", tmp_path)[:4]
    figures = {name: float(value) for name, value in map(str.split, lines)}
    assert 1 < figures["imbalance_after"] < 0.5 * figures["imbalance_before"]
    assert 1 < figures["padding_after"] < 0.7 * figures["padding_before"]
    assert "\n".join(lines) in (FOLDER.parent / "docs" / "padded-models.md").read_text()


def test_own_torchrec_model_trains_and_balances(tmp_path):
    lines = printed_lines("own_torchrec_model", tmp_path)
    steps = [re.fullmatch(r"loss ([\d.]+)  imbalance ([\d.]+) -> ([\d.]+)", line) for line in lines]
    assert len(steps) == 10 and all(steps), f"expected ten lines of figures and nothing else:\n{lines}"
    losses, before, after = zip(*(map(float, step.groups()) for step in steps if step), strict=True)
    assert losses[-1] < losses[0]
    assert sum(after) < sum(before) - 1
