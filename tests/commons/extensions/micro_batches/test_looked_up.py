"""Gradients of looked-up rows come to their places, also past parts that run copies of a row."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from commons.extensions.micro_batches.looked_up import LookedUp

# The third part has no samples, and runs copies of the first row, whose loss counts for nothing.
PARTS = [torch.tensor(rows) for rows in ([0, 3], [2, 1], [0, 0, 0])]
WEIGHTS = (1.0, 1.0, 0.0)


def jagged(values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values, lengths=torch.tensor([2, 0, 3, 1]))


RESULTS = {
    "tensor": (lambda values: values[:4], lambda part: part),
    "keyed": (
        lambda values: KeyedTensor(["a", "b"], [1, 2], values[:4]),
        lambda part: part.values(),
    ),
    "jagged": (lambda values: {"a": jagged(values)}, lambda part: part["a"].values()),
}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("result", RESULTS)
def test_gradients_are_those_of_the_whole_batch(result, order):
    make, values_of = RESULTS[result]
    given = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole = make(given)
    values_of(whole).square().sum().backward()
    expected, given.grad = given.grad, None
    looked_up = LookedUp(make(given), PARTS)
    for number in order:
        part = values_of(looked_up.part(number))
        (WEIGHTS[number] * part.square().sum()).backward()
        looked_up.collect_gradients()
    (tensor,) = looked_up.tensors
    torch.autograd.backward(tensor.values, tensor.gradient)
    torch.testing.assert_close(given.grad, expected)
