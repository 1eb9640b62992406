"""Both models in 16-bit types, and on batches without anything to learn."""

from dataclasses import replace

import pytest
import torch

from tests.hstu import retrieval_samples
from tests.hstu.hstu_samples import EMPTY, SAMPLE, hstu_batch, ranking_model
from tests.hstu.retrieval_samples import retrieval_batch, retrieval_model

RETRIEVED = retrieval_samples.Sample([5, 9, 13, 2, 9], [1, 0, 3, 2, 4], [7, 9, 30, 31, 2, 44, 9], [3])


@pytest.mark.parametrize(
    ("make_model", "batch"),
    [
        (ranking_model, hstu_batch([EMPTY] * 2)),
        (ranking_model, hstu_batch([replace(SAMPLE, labels=[])])),
        (retrieval_model, retrieval_batch([retrieval_samples.Sample()] * 2)),
        (retrieval_model, retrieval_batch([retrieval_samples.Sample([3], [1], [4, 5], [1])])),
        (retrieval_model, retrieval_batch([replace(RETRIEVED, num_labels=0)])),
        (retrieval_model, retrieval_batch([retrieval_samples.Sample([8, 21], [2, 1], [21, 21], [4])])),
    ],
    ids=["no tokens", "no labels", "no tokens", "one item", "no labels", "only the target as negative"],
)
def test_nothing_to_learn_gives_zero_gradients(make_model, batch):
    model = make_model()
    loss, output = model(batch)
    loss.backward()
    assert loss.item() == 0
    num_labels = int(batch.num_loss_tokens().sum())
    assert len(output.logits if make_model is ranking_model else output.queries) == num_labels
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize(
    ("make_model", "batch"),
    [
        (ranking_model, hstu_batch([SAMPLE, replace(SAMPLE, num_candidates=0, labels=SAMPLE.actions)])),
        (
            retrieval_model,
            retrieval_batch([RETRIEVED, replace(RETRIEVED, items=[8, 4, 21], actions=[2, 2, 1])]),
        ),
    ],
    ids=["ranking", "retrieval"],
)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_16_bit_types_are_close_to_float32(make_model, batch, dtype, rtol):
    (exact, exact_output), (loss, output) = make_model()(batch), make_model(dtype=dtype)(batch)
    loss.backward()
    found, expected = (
        each.logits if make_model is ranking_model else each.queries for each in (output, exact_output)
    )
    assert loss.dtype == found.dtype == torch.float32
    assert (found - expected).norm() <= rtol * expected.norm()
    torch.testing.assert_close(loss, exact, rtol=rtol, atol=0)
