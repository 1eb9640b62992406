"""Memory and time of HSTU layers that recompute activations in backward.

Forward and backward of the layers on one batch, for four settings in turns, so that a slow moment of the
machine meets all of them. Memory is that of activations and gradients, without parameters.
"""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Record, machine, quartiles, step_memory, times_in_turn
from benchmarks.markdown import table
from hstu.modules import HSTULayer, SampleMask, batch_attention
from hstu.modules.attention_backend import Attention, running_backend

SETTINGS = {
    "neither": {},
    "recompute_input_layernorm": {"recompute_input_layernorm": True},
    "recompute_input_silu": {"recompute_input_silu": True},
    "both": {"recompute_input_layernorm": True, "recompute_input_silu": True},
}
NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 4, 256, 4, 64
LENGTHS = (513, *[257] * 4, *[65] * 8)
ROUNDS = 30


def measure() -> Record:
    """Returns a record for each setting."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = running_backend(
        "triton", device, head_dim=HEAD_DIM, dtype=dtype, is_causal=True, num_contextual=1
    ).name
    masks = [SampleMask(length, 1, length, 2, is_causal=True) for length in LENGTHS]
    attention = batch_attention(backend, masks, max(LENGTHS), device)
    steps = {name: partial(_step, _layers(device, **of), attention, dtype) for name, of in SETTINGS.items()}
    times = times_in_turn(steps, ROUNDS, "recompute")
    records = []
    for name, step in steps.items():
        kept, peak = step_memory(step, device)
        records.append(
            {
                "setting": name,
                "kept_bytes": kept,
                "peak_bytes": peak,
                "seconds": round(statistics.median(times[name]) / 1e3, 4),
                "time_ratio": quartiles(np.divide(times[name], times["neither"])),
            }
        )
    return {
        "model": {"layers": NUM_LAYERS, "width": HIDDEN_SIZE, "heads": NUM_HEADS, "head_dim": HEAD_DIM},
        "tokens": sum(LENGTHS),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "one core",
        "dtype": str(dtype),
        "attention": backend,
        "records": records,
        "machine": machine(),
    }


def _layers(device: torch.device, **settings: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        HSTULayer(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, 0.2, 1e-5, **settings, device=device)
        for _ in range(NUM_LAYERS)
    )


def _step(layers: nn.ModuleList, attention: Attention, dtype: torch.dtype) -> None:
    """Runs forward and backward."""
    device = next(layers.parameters()).device
    x = torch.randn(sum(LENGTHS), HIDDEN_SIZE, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for layer in layers:
            x = layer(x, attention)
    with torch.profiler.record_function("## backward ##"):  # for `step_memory`
        x.sum().backward()
    layers.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()


def tables(figures: Record) -> dict[str, str]:
    """Returns Markdown by marker."""
    neither = figures["records"][0]

    def name(record: Record) -> str:
        return f"`{record['setting']}`" if "_" in record["setting"] else record["setting"]

    def megabytes(key: str, record: Record) -> str:
        return f"{record[key] / 1e6:.1f} ({record[key] / neither[key]:.2f})"

    columns = {
        "recomputed": name,
        "kept for backward, MB": partial(megabytes, "kept_bytes"),
        "peak, MB": partial(megabytes, "peak_bytes"),
        "time": "{time_ratio[median]:.2f} ({time_ratio[lower]:.2f} to {time_ratio[upper]:.2f})",
    }
    return {"recompute memory and time": table(figures["records"], columns)}
