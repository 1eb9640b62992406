"""Shows that a batch costs the sum of its samples: no sample is padded to the longest one.

Times forward and backward of an HSTU layer stack on one long sample and many short ones, once in one batch
and once each sample alone. A padded attention would cost rows × longest², many times the sum.

    python -m benchmarks.hstu_padding
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.machine import machine, spread
from hstu.models import full_sequence_length
from hstu.modules import HSTULayer, SampleMask

RESULT = Path(__file__).parent / "results" / "hstu_padding.json"
LONG_ITEMS, SHORT_ITEMS, NUM_SHORT = 1024, 32, 31
NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 2, 128, 2, 64
ROUNDS = 15
TARGET_RATIO = 1.25


def main() -> None:
    """Runs the benchmark, prints its figures and writes them to `RESULT`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = [full_sequence_length(1, items, 0) for items in [LONG_ITEMS] + [SHORT_ITEMS] * NUM_SHORT]
    layers = nn.ModuleList(
        HSTULayer(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, max(lengths), dropout=0.0, norm_epsilon=1e-5)
        for _ in range(NUM_LAYERS)
    )
    samples = [torch.randn(length, HIDDEN_SIZE) for length in lengths]
    in_batch, alone = [], []
    for round_ in range(ROUNDS + 1):
        batch_seconds = _seconds(layers, samples)
        alone_seconds = sum(_seconds(layers, [sample]) for sample in samples)
        if round_:  # the first round warms up
            in_batch.append(batch_seconds)
            alone.append(alone_seconds)
    figures = _figures(lengths, in_batch, alone)
    print(json.dumps(figures, indent=2))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(figures, indent=2) + "\n")


def _seconds(layers: nn.ModuleList, samples: list[torch.Tensor]) -> float:
    """One forward and backward of the layers on these samples as one batch."""
    layers.zero_grad()
    masks = [SampleMask(len(sample), 1, len(sample), 2, is_causal=True) for sample in samples]
    x = torch.cat(samples).requires_grad_()
    start = time.perf_counter()
    for layer in layers:
        x = layer(x, masks)
    x.sum().backward()
    return time.perf_counter() - start


def _figures(lengths: list[int], in_batch: list[float], alone: list[float]) -> dict[str, object]:
    ratios = [batch / own for batch, own in zip(in_batch, alone, strict=True)]
    padded = len(lengths) * max(lengths) ** 2
    return {
        "tokens_per_sample": {"long": lengths[0], "short": lengths[-1], "num_short": len(lengths) - 1},
        "model": {
            "num_layers": NUM_LAYERS,
            "hidden_size": HIDDEN_SIZE,
            "num_heads": NUM_HEADS,
            "head_dim": HEAD_DIM,
        },
        "batch_ms": spread([seconds * 1e3 for seconds in in_batch]),
        "sum_of_own_ms": spread([seconds * 1e3 for seconds in alone]),
        "ratio": spread(ratios),
        "target_ratio": TARGET_RATIO,
        "reached": statistics.median(ratios) <= TARGET_RATIO,
        "attention_flops_ratio_if_padded": round(padded / sum(length**2 for length in lengths), 1),
        "rounds": len(ratios),
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
