"""The benchmark of models that pad: what it computes, and that its arms train on the same samples."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchrec import JaggedTensor

from benchmarks.padded import padded, plans
from benchmarks.padded.padded import BLOCKS, RANKS, WIDTH, PaddedModel, count_flops, make_batch
from benchmarks.padded.plans import KINDS, SHORT, load_rows
from benchmarks.partition.placements import ROWS_PER_RANK
from commons.extensions.padded.padded_plan import plan_padded

ROWS = plans.draw_rows(SHORT, 2, seed=0)


def test_padded_tokens_are_those_of_the_fullest_rank():
    plan = plan_padded(ROWS)
    for rank_of in (ROWS.home, plan.destination):
        tokens = [ROWS.tokens[rank_of == rank] for rank in range(2)]
        assert plans.fullest(plan, rank_of) == max(len(own) * own.max() for own in tokens)


@pytest.mark.parametrize("exchanges", [False, True])
def test_the_cap_is_the_largest_that_takes_so_many_micro_batches(exchanges):
    plan = plans.plan_in_parts(ROWS, 4, exchanges)
    cap = plan.rows.arguments["micro_batch_tokens"]
    higher = load_rows(ROWS.tokens, ROWS.workloads, micro_batch_tokens=cap + 1)
    assert plan.num_parts == 4 and plan_padded(higher, exchanges=exchanges).num_parts == 3
    assert plan.moves == exchanges


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_fit_the_model(kind):
    drawn = padded.draw_lengths(kind, 1000)
    assert drawn.min() >= 1 and padded.LONGEST / 2 < drawn.max() <= padded.LONGEST


def test_loading_by_length_uses_each_sample_once_and_pads_less():
    costs = plans.count_flops(KINDS[SHORT](np.random.default_rng(0), 16 * RANKS * ROWS_PER_RANK))
    steps = padded.load_by_length(costs)
    assert sorted(np.concatenate([part for step in steps for part in step])) == list(range(len(costs)))
    loaded = np.arange(len(costs)).reshape(16, RANKS, -1)
    by_length, before = (
        sum(max(len(part) * costs[part].max(initial=0) for part in step) for step in each)
        for each in (steps, loaded)
    )
    assert by_length < before


def test_a_model_computes_the_same_whether_it_pads_or_not():
    batch, losses = make_batch(np.array([3, 1, 7, 2]), np.array([2, 0, 3])), []
    embedded = JaggedTensor(torch.randn(12, WIDTH), lengths=batch.features.lengths())
    for pads in (True, False):
        torch.manual_seed(0)
        losses.append(PaddedModel(pads).encoder(embedded, batch.labels))
    torch.testing.assert_close(losses[0], losses[1])


def test_flops_are_those_that_torch_counts():
    """Here, torch computes both halves of a causal attention. It also counts the head."""
    length = 64
    embedded = JaggedTensor(torch.randn(length, WIDTH), lengths=torch.tensor([length]))
    labels = make_batch(np.array([length]), np.array([0])).labels
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        PaddedModel().encoder(embedded, labels)
    hidden_half, head = BLOCKS * 2 * length * (length - 1) * WIDTH, 2 * length * WIDTH
    assert counted.get_total_flops() == count_flops(np.array([length]))[0] + hidden_half + head


def _few(measure, steps):
    """Measures steps of four rows per rank, of two kinds of lengths."""
    kinds = {name: KINDS[name] for name in list(KINDS)[:2]}
    four = [mock.patch.object(module, "ROWS_PER_RANK", 4) for module in (padded, plans)]
    with mock.patch.dict(KINDS, kinds, clear=True), four[0], four[1]:
        return measure(torch.device("cpu"), steps)


def test_arms_train_alike_and_fill_their_tables(pools):
    records = pools(2).run(_few, padded.train, "3")[0]
    for record in records:
        differences = [arm["loss_difference"] for arm in record["arms"].values()]
        assert max(each for each in differences if each is not None) < 1e-5
        assert record["speedup_predicted"] > 1
    tables = padded.tabulate_training(records)
    assert "other steps" in tables["padded beside"] and "Yambda-like" in tables["padded training"]


def test_eight_ranks_are_replayed(pools):
    [records] = pools(1).run(_few, padded.replay, "2")
    for record in records:
        assert {np.shape(seconds) for seconds in record["seconds"].values()} == {(2, 8)}
    assert "Yambda-like" in padded.tabulate_replay(records)["padded replay"]
