"""Shows that a batch costs the sum of its samples, because no sample is padded to the longest one.

Times forward and backward of each model's layers on one long sample and many short ones: in one batch, and
each sample alone. Padded attention would cost rows × longest², many times the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Record, machine, spread, times_in_turn
from hstu.modules import HSTULayer, SampleMask, batch_attention
from sid_gr.modules import Decoder, DecoderConfig, JaggedCausalAttention

LONG, SHORT, NUM_SHORT = 2049, 65, 31
NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 2, 128, 2, 64
ROUNDS = 15

# Maps tokens `[total, HIDDEN_SIZE]` of concatenated samples with these lengths to their states.
Stack = Callable[[torch.Tensor, list[int]], torch.Tensor]


def measure() -> Record:
    """Returns the times of each model."""
    torch.manual_seed(0)
    return {
        "tokens_per_sample": {"long": LONG, "short": SHORT, "num_short": NUM_SHORT},
        "hstu": _measure(_hstu()),
        "sid_gr": _measure(_sid_gr()),
        "machine": machine(),
    }


def _hstu() -> Stack:
    layers = nn.ModuleList(
        HSTULayer(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, dropout=0.0, norm_epsilon=1e-5) for _ in range(NUM_LAYERS)
    )

    def run(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        masks = [SampleMask(length, 1, length, 2, is_causal=True) for length in lengths]
        attention = batch_attention("pytorch", masks, LONG, x.device)
        for layer in layers:
            x = layer(x, attention)
        return x

    return run


def _sid_gr() -> Stack:
    decoder = Decoder(DecoderConfig(NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM))
    return lambda x, lengths: decoder(x, JaggedCausalAttention(lengths))


def _measure(stack: Stack) -> Record:
    samples = [torch.randn(length, HIDDEN_SIZE) for length in [LONG] + [SHORT] * NUM_SHORT]

    def step(batch: list[torch.Tensor]) -> None:
        x = torch.cat(batch).requires_grad_()
        stack(x, [len(sample) for sample in batch]).sum().backward()

    calls = {
        "batch": lambda: step(samples),
        "alone": lambda: [step([sample]) for sample in samples],
    }
    times = times_in_turn(calls, ROUNDS, "batch and samples")
    return {
        "batch_ms": spread(times["batch"]),
        "sum_of_own_ms": spread(times["alone"]),
        "ratio": spread(np.divide(times["batch"], times["alone"]).tolist()),
        "rounds": ROUNDS,
    }
