"""The figures are those of training's placement on the drawn steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commons.distributed import ShufflePlan, ShufflerSettings
from commons.partition import lower_bound
from commons.perf_model import Cost, HSTUFlops
from tests.commons.advisor.command import MODEL, advise, by_name, heavy_tailed
from tests.commons.advisor.internals import DrawnSteps, PieceCosts, bytes_of_rows, draw_steps, pieces_of
from tests.commons.distributed.internals import RowTable, make_plan, place
from tests.commons.extensions.pieces.internals import Cutting, cut_and_place
from tests.commons.histories import TokenShuffler, histories
from tests.commons.sequence_batch.internals import Schema

RANKS, ROWS = 8, 64
LENGTHS = heavy_tailed(30_000)
SETTINGS = {
    "as_loaded": None,
    "karmarkar_karp": ShufflerSettings(partitioner="karmarkar_karp"),
    "refined": ShufflerSettings(partitioner="refined"),
    "rebalance": ShufflerSettings(),
}


def drawn(lengths: np.ndarray, ranks: int, rows: int = 32) -> DrawnSteps:
    tokens = 2 * lengths + 1
    workloads = HSTUFlops(2, 64, 2, 32).per_sample(tokens)
    return draw_steps(workloads, tokens, 24 * lengths, ranks, rows)


@pytest.fixture(scope="module")
def steps() -> DrawnSteps:
    return drawn(LENGTHS, RANKS, ROWS)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = ["--ranks", str(RANKS), "--rows-per-rank", str(ROWS)]
    return advise(tmp_path_factory.mktemp("lengths"), LENGTHS, *run)["cases"][0]


def predict(folder: Path, *arguments: str, model: list[str] = MODEL) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the figures by strategy, and the recommendation."""
    (case,) = advise(folder, heavy_tailed(2000), *arguments, model=model)["cases"]
    return by_name(case), case["recommendation"]


def test_a_rank_of_a_padded_model_costs_its_rows_times_the_longest(case, steps):
    figures = case["padded_model"]
    largest, mean = ROWS * steps.workloads.max((1, 2)), steps.workloads.sum(2).mean(1)
    assert figures["as_loaded"] == pytest.approx(largest.sum() / mean.sum())
    assert 1 < figures["padded"] < figures["rebalance"] / 2
    assert figures["speedup"] == pytest.approx(figures["as_loaded"] / figures["padded"])


def test_steps_are_drawn_without_replacement():
    numbers = np.arange(1000)
    steps = draw_steps(numbers, numbers, numbers, 8, 10)
    assert steps.workloads.shape == (16, 8, 10)
    assert len(np.unique(steps.workloads[:12])) == 960
    assert steps.num_epochs == 2
    again = draw_steps(numbers, numbers, numbers, 8, 10)
    np.testing.assert_array_equal(steps.workloads, again.workloads)


@pytest.mark.parametrize("name", SETTINGS)
def test_strategies_place_samples_as_training_does(name, case, steps):
    settings, figures = SETTINGS[name], by_name(case)[name]
    assert case["steps_drawn"] == len(steps.workloads)
    num_loaded, home = np.full(RANKS, ROWS), np.repeat(np.arange(RANKS), ROWS)
    loads, tokens_of, sent, slowest, moved = [], [], [], [], []
    columns = (of.reshape(len(of), -1) for of in (steps.workloads, steps.tokens, steps.sizes))
    for work, tokens, sizes in zip(*columns, strict=True):
        column = tokens[:, None]
        loaded = RowTable(num_loaded, num_loaded, work, tokens, tokens, column, sizes, column)
        rank = home if settings is None else place(loaded, settings).destination
        loads.append(np.bincount(rank, work))
        tokens_of.append(np.bincount(rank, tokens))
        moving = sizes * (rank != home)
        sent.append(moving.sum() / RANKS)
        slowest.append(max(np.bincount(ranks, moving).max() for ranks in (home, rank)))
        moved.append(np.mean(rank != home))
    largest, mean = np.max(loads, axis=1), np.mean(loads, axis=1)
    ratios = largest / mean
    assert figures["imbalance"] == pytest.approx(ratios.mean(), rel=1e-12)
    assert figures["share_of_samples_moved"] == pytest.approx(np.mean(moved))
    assert figures["bytes_sent_per_rank"] == pytest.approx(np.mean(sent))
    assert figures["exchange_seconds"] == pytest.approx(np.mean(slowest) / 12.5e9)
    assert figures["largest_tokens_per_rank"] == pytest.approx(np.mean(np.max(tokens_of, axis=1)))
    as_loaded = steps.workloads.sum(-1).max(1).sum()
    assert figures["speedup"] == pytest.approx(as_loaded / largest.sum())
    assert figures["step_seconds"] is None
    bounds = [lower_bound(work.ravel(), RANKS) for work in steps.workloads]
    assert case["lower_bound"] == pytest.approx(np.mean(bounds))


def history_cutting(flops: HSTUFlops) -> Cutting:
    """The cutting of histories with one user token."""
    batch = histories([1])
    return Cutting(
        TokenShuffler.cut_rules(batch),
        Schema.of(batch.per_sample_fields()),
        tuple(batch.row_counts()),
        lambda first, counts: flops.prefix_work(first, counts["tokens"]).sum(1),
    )


def fetched(plan: ShufflePlan, is_causal: bool) -> np.ndarray:
    """Tokens that each rank, in rows, sends to each other, in columns."""
    rows = list(zip(plan.rows.sample_of, plan.destination, pieces_of(plan), strict=True))
    holder = {(s, token): rank for s, rank, p in rows for token in range(p["first_token"], p["last_token"])}
    end = "last_token" if is_causal else "num_tokens"
    wanted = {(s, token, rank) for s, rank, p in rows for token in range(p[end])}
    counts = np.zeros((plan.num_ranks, plan.num_ranks), dtype=np.int64)
    for sample, token, rank in wanted:
        counts[holder[sample, token], rank] += holder[sample, token] != rank
    return counts


def test_pieces_are_those_of_training(tmp_path):
    ranks, rows = 4, 8
    flops = HSTUFlops(2, 64, 2, 32)
    lengths = heavy_tailed(500)
    # A device that is slow enough for no step to wait for planning.
    run = ["--ranks", str(ranks), "--rows-per-rank", str(rows), "--tflops", "0.002"]
    (case,) = advise(tmp_path, lengths, *run)["cases"]
    steps = drawn(lengths, ranks, rows)
    loaded, settings = np.full(ranks, rows), ShufflerSettings("refined", equal_rows=False)
    imbalance, cut, pieces, tokens, slowest = [], [], [], [], []
    for work, num_tokens in zip(steps.workloads.reshape(-1, 32), steps.tokens.reshape(-1, 32), strict=True):
        items, one = num_tokens // 2, np.ones_like(num_tokens)
        counts = np.stack([one, items, items, items], 1)  # user, item, action, label
        samples = RowTable(loaded, loaded, work, num_tokens, items, counts, 8 * num_tokens, counts)
        plan = make_plan(*cut_and_place(samples, settings, history_cutting(flops)))
        loads = np.bincount(plan.destination, plan.rows.workloads, minlength=ranks)
        imbalance.append(loads.max() / loads.mean())
        per_sample = np.bincount(plan.rows.sample_of)
        cut.append((per_sample > 1).sum())
        pieces.append(per_sample[per_sample > 1].sum())
        is_cut = not plan.rows.starts_sample.all()
        moved = fetched(plan, is_causal=True) if is_cut else np.zeros((ranks, ranks))
        tokens.append(moved.sum() / ranks)
        slowest.append(max(moved.sum(0).max(), moved.sum(1).max()))
    split = by_name(case)["pieces"]
    # Training cuts between items of two tokens, the prediction between any two tokens.
    assert split["imbalance"] == pytest.approx(np.mean(imbalance), abs=2e-3)
    assert split["samples_cut"] == pytest.approx(np.mean(cut), abs=0.1)
    assert split["pieces"] == pytest.approx(np.mean(pieces), abs=0.2)
    bytes_per_token = 2 * 64 * 2  # bfloat16
    bytes_per_layer = split["bytes_fetched_per_rank_and_layer"]
    assert bytes_per_layer == pytest.approx(bytes_per_token * np.mean(tokens), rel=0.1)
    # Two layers; keys and values in forward, gradients in backward.
    seconds = 2 * 2 * bytes_per_token * np.mean(slowest) / 12.5e9
    assert split["fetch_seconds"] == pytest.approx(seconds, rel=0.1)
    largest = 3 * (np.array(imbalance) * steps.workloads.sum((1, 2)) / ranks).mean() / 2e9
    assert split["step_seconds"] == pytest.approx(largest + split["fetch_seconds"], rel=5e-3)


@pytest.mark.parametrize("is_causal", [True, False])
def test_ranks_fetch_what_their_pieces_see_and_they_do_not_hold(is_causal):
    rng = np.random.default_rng(0)
    flops = HSTUFlops(1, 8, 1, 8, is_causal=is_causal)
    costs = PieceCosts(flops.prefix_work, 1, 1, 8, is_causal=is_causal)
    tokens = np.array([70, 400, 30, 500, 90, 300])
    loaded = np.full(3, 2)
    samples = RowTable(
        *(loaded, loaded, flops.per_sample(tokens), tokens, tokens),
        key_lengths=np.zeros((6, 0), dtype=np.int64),
        sample_bytes=8 * tokens,
    )
    numbers, cuts = np.array([1, 1, 3, 3, 3, 5]), np.array([50, 300, 1, 2, 400, 299])
    for _ in range(5):
        plan = make_plan(costs.cutting.cut(samples, numbers, cuts), rng.integers(0, 3, 12))
        num_bytes = np.zeros((3, 3))
        np.add.at(num_bytes, costs.fetched(plan)[:2], costs.fetched(plan)[2])
        np.testing.assert_array_equal(num_bytes, 2 * 8 * 2 * fetched(plan, is_causal))
        sample_bytes = np.bincount(plan.rows.sample_of, bytes_of_rows(plan))
        np.testing.assert_allclose(sample_bytes, 8 * tokens)


def test_seconds_from_tflops_and_the_exchange(tmp_path):
    slow = ("--tflops", "0.002", "--ranks", "4", "--bandwidth")
    figures, advice = predict(tmp_path, *slow, "0.000001")
    loads = drawn(heavy_tailed(2000), 4).workloads.sum(-1).max(1)
    assert figures["as_loaded"]["step_seconds"] == pytest.approx(3 * loads.mean() / 2e9)
    refined = figures["refined"]
    assert refined["exchange_seconds"] >= refined["bytes_sent_per_rank"] / 1e3
    assert refined["speedup_exchange_not_hidden"] < refined["speedup"] < 1
    # The exchange takes longer than what it saves.
    assert refined["step_seconds"] == pytest.approx(refined["exchange_seconds"])
    assert advice["strategy"] is None
    assert any("the network decides" in note for note in advice["notes"])
    figures, advice = predict(tmp_path, *slow, "0.00002")  # where few moves pay
    assert figures["refined"]["speedup"] < figures["rebalance"]["speedup"]
    assert advice["strategy"] == "rebalance"


def test_a_step_waits_for_planning_that_takes_longer(tmp_path):
    figures, advice = predict(tmp_path, "--tflops", "1000000", "--ranks", "8", "--bandwidth", "1000000")
    loaded = figures["as_loaded"]["step_seconds"]
    for name in ("karmarkar_karp", "refined", "rebalance"):
        planning = figures[name]["planning_seconds_measured"]
        assert loaded < planning
        assert figures[name]["step_seconds"] == pytest.approx(planning)
        assert figures[name]["speedup"] == pytest.approx(loaded / planning)
    assert advice["strategy"] is None
    assert "training would wait for planning" in advice["headline"]
    assert any("takes longer than a step" in note for note in advice["notes"])


def test_bytes_within_a_node_take_no_time(tmp_path):
    in_nodes, in_one = (predict(tmp_path, "--ranks", "4", "--ranks-per-node", size)[0] for size in "24")
    without = predict(tmp_path, "--ranks", "4")[0]
    rebalance, refined = (
        in_nodes[name]["exchange_seconds"] / without[name]["exchange_seconds"]
        for name in ("rebalance", "refined")
    )
    assert 0 < rebalance < refined < 1  # rebalancing prefers moves within a node
    assert in_one["refined"]["exchange_seconds"] == 0
    sent = in_nodes["refined"]["bytes_sent_per_rank"]
    assert in_one["refined"]["bytes_sent_per_rank"] == pytest.approx(sent)


def test_a_measured_cost_has_a_part_that_does_not_shrink(tmp_path):
    seconds = []
    for per_step in (0.0, 0.05):
        Cost((1e3, 2e3, 0.1, 0.1), per_step * 1e9).save(tmp_path / "cost.json")
        model = [*MODEL, "--cost", str(tmp_path / "cost.json")]
        seconds.append(predict(tmp_path, "--ranks", "4", model=model)[0])
    without, with_part = seconds
    for name in ("as_loaded", "refined"):
        step = without[name]["step_seconds"]
        assert with_part[name]["step_seconds"] == pytest.approx(step + 0.05)
    ratio = with_part["as_loaded"]["step_seconds"] / with_part["refined"]["step_seconds"]
    assert with_part["refined"]["speedup"] == pytest.approx(ratio)
    assert with_part["refined"]["speedup"] < without["refined"]["speedup"]
