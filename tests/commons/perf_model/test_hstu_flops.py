from __future__ import annotations

import numpy as np
import pytest
import torch

from commons.perf_model import HSTUFlops


def test_the_formula() -> None:
    T, L, d, H, dh = 7, 3, 16, 2, 5
    per_layer = 2 * T * d * 4 * H * dh + 4 * T**2 * H * dh + 2 * T * H * dh * d
    assert HSTUFlops(L, d, H, dh).per_sample(torch.tensor([T, 0])).tolist() == [L * per_layer, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kind_and_type_of_the_result(dtype: torch.dtype) -> None:
    flops = HSTUFlops(8, 1024, 4, 256)
    tokens = torch.tensor([0, 1, 100_000], dtype=dtype)  # beyond int32 in FLOPs
    of_tensor, of_array = flops.per_sample(tokens), flops.per_sample(tokens.numpy())
    assert of_tensor.dtype == torch.int64
    assert of_array.dtype == np.int64
    assert (
        of_tensor.tolist() == of_array.tolist() == [flops.per_sample(t.view(1)).item() for t in tokens.long()]
    )


@pytest.mark.parametrize("tokens", [torch.tensor([1.0]), np.array([1.0]), torch.tensor([True])])
def test_tokens_must_be_integers(tokens: torch.Tensor | np.ndarray) -> None:
    with pytest.raises(TypeError, match="expected integers"):
        HSTUFlops(1, 1, 1, 1).per_sample(tokens)


def test_wrong_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="head_dim is 0"):
        HSTUFlops(1, 1, 1, 0)
    with pytest.raises(ValueError, match="a sample has -2 tokens"):
        HSTUFlops(1, 1, 1, 1).per_sample(torch.tensor([3, -2]))
