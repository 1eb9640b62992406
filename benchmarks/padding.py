"""Shows that a batch costs the sum of its samples, because no sample is padded to the longest one.

Times forward and backward of each model's layers on one long sample and many short ones: in one batch, and
each sample alone. Padded attention would cost rows × longest², many times the sum.

    python -m benchmarks.padding
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine, spread
from hstu.modules import HSTULayer, SampleMask, batch_attention
from sid_gr.modules import Decoder, DecoderConfig, JaggedCausalAttention

RESULT = Path(__file__).parent / "results" / "padding.json"
LONG, SHORT, NUM_SHORT = 2049, 65, 31
NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 2, 128, 2, 64
ROUNDS = 15
TARGET_RATIO = 1.25

# Maps tokens `[total, HIDDEN_SIZE]` of concatenated samples with these lengths to their states.
Stack = Callable[[torch.Tensor, list[int]], torch.Tensor]


def main() -> None:
    """Runs the benchmark, prints its figures and writes them to `RESULT`."""
    parse_arguments(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = [LONG] + [SHORT] * NUM_SHORT
    figures = {
        "tokens_per_sample": {"long": LONG, "short": SHORT, "num_short": NUM_SHORT},
        "model": {
            "num_layers": NUM_LAYERS,
            "hidden_size": HIDDEN_SIZE,
            "num_heads": NUM_HEADS,
            "head_dim": HEAD_DIM,
        },
        "attention_flops_ratio_if_padded": round(
            len(lengths) * LONG**2 / sum(length**2 for length in lengths), 1
        ),
        "hstu": _measure(_hstu(), lengths),
        "sid_gr": _measure(_sid_gr(), lengths),
        "machine": machine(),
    }
    print(json.dumps(figures, indent=2))
    RESULT.write_text(json.dumps(figures, indent=2) + "\n")


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


def _measure(stack: Stack, lengths: list[int]) -> dict[str, object]:
    samples = [torch.randn(length, HIDDEN_SIZE) for length in lengths]
    in_batch, alone = [], []
    for round_ in range(ROUNDS + 1):
        batch_seconds = _seconds(stack, samples)
        alone_seconds = sum(_seconds(stack, [sample]) for sample in samples)
        if round_:  # the first round warms up
            in_batch.append(batch_seconds)
            alone.append(alone_seconds)
    ratios = [batch / own for batch, own in zip(in_batch, alone, strict=True)]
    return {
        "batch_ms": spread([seconds * 1e3 for seconds in in_batch]),
        "sum_of_own_ms": spread([seconds * 1e3 for seconds in alone]),
        "ratio": spread(ratios),
        "target_ratio": TARGET_RATIO,
        "reached": statistics.median(ratios) <= TARGET_RATIO,
        "rounds": ROUNDS,
    }


def _seconds(stack: Stack, samples: list[torch.Tensor]) -> float:
    """Times one forward and backward pass on these samples as one batch."""
    x = torch.cat(samples).requires_grad_()
    start = time.perf_counter()
    stack(x, [len(sample) for sample in samples]).sum().backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
