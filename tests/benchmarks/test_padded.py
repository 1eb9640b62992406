"""The benchmark of models that pad: what it computes, and that its arms train on the same samples."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchrec import JaggedTensor

from benchmarks import padded
from benchmarks.padded import BLOCKS, KINDS, SHORT, WIDTH, PaddedModel, count_flops, make_batch
from commons.extensions.padded.padded_plan import plan_padded

ROWS = padded.draw_rows(SHORT, 2, seed=0)


def test_padded_tokens_are_those_of_the_fullest_rank():
    plan = plan_padded(ROWS)
    for rank_of in (ROWS.home, plan.destination):
        tokens = [ROWS.tokens[rank_of == rank] for rank in range(2)]
        assert padded.fullest(plan, rank_of) == max(len(own) * own.max() for own in tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_fit_the_model(kind):
    drawn = padded.draw_lengths(kind, 1000)
    assert drawn.min() >= 1 and padded.LONGEST / 2 < drawn.max() <= padded.LONGEST


def test_padding_changes_no_loss():
    batch = make_batch(np.array([3, 1, 7, 2]), np.array([2, 0, 3]))
    embedded = JaggedTensor(torch.randn(12, WIDTH), lengths=batch.features.lengths())
    encoder, sizes = PaddedModel().encoder, batch.features.lengths().tolist()
    alone = [
        encoder(JaggedTensor(row, lengths=torch.tensor([len(row)])), labels)
        for row, labels in zip(embedded.values().split(sizes), _labels_of_rows(batch), strict=True)
    ]
    torch.testing.assert_close(encoder(embedded, batch.labels), sum(alone))


def _labels_of_rows(batch):
    return [batch.index_select(np.array([row])).labels for row in range(batch.batch_size)]


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
    with mock.patch.dict(KINDS, kinds, clear=True), mock.patch.object(padded, "ROWS_PER_RANK", 4):
        return measure(torch.device("cpu"), steps)


def test_arms_train_alike_and_fill_their_tables(pools):
    records = pools(2).run(_few, padded.train, "3")[0]
    for record in records:
        assert max(arm["loss_difference"] for arm in record["arms"].values()) < 1e-5
        assert record["speedup_predicted"] > 1
    assert "Yambda-like" in padded.tabulate_training(records)["padded gains"]
