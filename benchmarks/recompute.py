"""Measures the memory and time of HSTU layers that recompute activations in the backward pass.

Four settings take turns with forward and backward on one batch, so that a slow moment of the machine affects
all of them. The memory includes activations and gradients, but no parameters.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Record, find_quartiles, machine, measure_step_memory, time_in_turns
from benchmarks.markdown import make_table
from hstu.modules import HSTULayer, SampleMask, batch_attention
from hstu.modules.attention_backend import Attention

SETTINGS = {
    "neither": {},
    "recompute_input_layernorm": {"recompute_input_layernorm": True},
    "recompute_input_silu": {"recompute_input_silu": True},
    "both": {"recompute_input_layernorm": True, "recompute_input_silu": True},
}
NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 4, 256, 4, 64
LENGTHS = (513, *[257] * 4, *[65] * 8)
ROUNDS = 30
CPU = torch.device("cpu")


def measure() -> Record:
    """Returns a record for each setting."""
    masks = [SampleMask(length, 1, length, 2, is_causal=True) for length in LENGTHS]
    attention = batch_attention("pytorch", masks, max(LENGTHS), CPU)
    steps = {name: partial(_step, _make_layers(settings), attention) for name, settings in SETTINGS.items()}
    times = time_in_turns(steps, ROUNDS, "recompute")
    records = []
    for name, step in steps.items():
        kept, peak = measure_step_memory(step, CPU)
        ratio = find_quartiles(np.divide(times[name], times["neither"]))
        records.append({"setting": name, "kept_bytes": kept, "peak_bytes": peak, "time_ratio": ratio})
    return {"records": records, "machine": machine()}


def _make_layers(settings: dict[str, bool]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        HSTULayer(HIDDEN_SIZE, NUM_HEADS, HEAD_DIM, 0.2, 1e-5, **settings) for _ in range(NUM_LAYERS)
    )


def _step(layers: nn.ModuleList, attention: Attention) -> None:
    """Runs one forward and backward pass."""
    x = torch.randn(sum(LENGTHS), HIDDEN_SIZE, requires_grad=True)
    for layer in layers:
        x = layer(x, attention)
    with torch.profiler.record_function("## backward ##"):  # for `measure_step_memory`
        x.sum().backward()
    layers.zero_grad()


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker."""
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
    return {"recompute memory and time": make_table(figures["records"], columns)}
