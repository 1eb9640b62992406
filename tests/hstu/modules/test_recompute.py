"""Layers that recompute activations in backward: equal gradients, less memory, no product twice."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hstu.modules import HSTUConfig, HSTULayer, SampleMask, batch_attention
from tests.hstu.hstu_samples import ranking_model
from tests.hstu.internals import NetworkArgs

CPU = torch.device("cpu")
HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, NUM_LAYERS = 24, 2, 8, 3
MASKS = [SampleMask(tokens, 2, tokens - 4, 2, is_causal=True) for tokens in (40, 9, 6)]
NUM_TOKENS = sum(mask.num_tokens for mask in MASKS)
SETTINGS = {"none": (False, False), "norm": (True, False), "silu": (False, True), "both": (True, True)}


class _LiveBytes(TorchDispatchMode):
    """Records what operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **kwargs or {})
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def total(self) -> int:
        """Returns the bytes of all recorded storages that are still alive."""
        return sum(nbytes for storage, nbytes in self._storages.values() if not storage.expired())


def _layers(norm: bool, silu: bool) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    config = HSTUConfig(
        *(NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM),
        scaling_seqlen=20,
        hidden_dropout=0.3,
        recompute_input_layernorm=norm,
        recompute_input_silu=silu,
    )
    return torch.nn.ModuleList(HSTULayer(config) for _ in range(NUM_LAYERS))


def _run(layers: torch.nn.ModuleList, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    attention = batch_attention("pytorch", MASKS, 20, CPU)
    autocast = torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext()
    torch.manual_seed(1)  # dropout
    with autocast:
        for layer in layers:
            x = layer(x, attention)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputing_saves_memory_runs_no_product_again_and_changes_no_gradient(dtype):
    results, flops, saved, kept = {}, set(), {}, set()
    for name, setting in SETTINGS.items():
        with _LiveBytes() as live:
            layers = _layers(*setting)
            x, grad = torch.randn(2, NUM_TOKENS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
            out = _run(layers, x.requires_grad_(), dtype)
            saved[name], results[name] = live.total(), [out]
            inputs = [x, *layers.parameters()]
            for _ in range(2):
                with FlopCounterMode(display=False) as counter:
                    out.backward(grad, retain_graph=True)  # the counter does not support autograd.grad
                results[name] += [each.grad for each in inputs]
                for each in inputs:
                    each.grad = None
                flops.add(counter.get_total_flops())
            kept.add(live.total() - saved[name])
        with torch.no_grad():
            assert torch.equal(_run(layers, x, dtype), out)
    for name, found in results.items():
        assert all(torch.equal(*pair) for pair in zip(found, results["none"], strict=True)), name
    norm = NUM_LAYERS * NUM_TOKENS * (HIDDEN_SIZE * dtype.itemsize + 2 * 4)  # with the mean and deviation
    if dtype != torch.float32:  # autocast's copy of the weight is made again, too
        norm += NUM_LAYERS * HIDDEN_SIZE * 4 * NUM_HEADS * HEAD_DIM * dtype.itemsize
    silu = NUM_LAYERS * NUM_TOKENS * 4 * NUM_HEADS * HEAD_DIM * dtype.itemsize
    expected = {"none": 0, "norm": norm, "silu": silu, "both": norm + silu}
    assert {name: saved["none"] - of for name, of in saved.items()} == expected
    assert len(flops) == len(kept) == 1  # backward frees what it has recomputed


def test_a_model_passes_the_settings_on():
    settings = {"recompute_input_layernorm": True, "recompute_input_silu": True}
    layers = [each for each in ranking_model(**settings).modules() if isinstance(each, HSTULayer)]
    assert layers
    for each in layers:
        assert each.config.recompute_input_layernorm and each.config.recompute_input_silu
    args = NetworkArgs(1, 8, 1, 8, **settings)
    assert args.settings_without_effect() == []
    config = args.config(2, 10, "pytorch")
    assert config.recompute_input_layernorm and config.recompute_input_silu
