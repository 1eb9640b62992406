"""Memory and time of HSTU layers that recompute activations in backward.

Forward and backward of the layers on one batch, for four settings in turns, so that a slow moment of the
machine meets all of them. Memory is that of activations and gradients, without parameters.

    python -m benchmarks.recompute
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.machine import machine
from benchmarks.markdown import markdown_table, write_tables
from hstu.modules import HSTULayer, SampleMask, batch_attention
from hstu.modules.attention_backend import Attention, running_backend

BENCHMARKS = Path(__file__).parent
RESULT, README = BENCHMARKS / "results" / "recompute.json", BENCHMARKS / "README.md"
SETTINGS = {
    "neither": {},
    "`recompute_input_layernorm`": {"recompute_input_layernorm": True},
    "`recompute_input_silu`": {"recompute_input_silu": True},
    "both": {"recompute_input_layernorm": True, "recompute_input_silu": True},
}
NUM_LAYERS, HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 4, 256, 4, 64
LENGTHS = (513, *[257] * 4, *[65] * 8)
ROUNDS = 30


def main() -> None:
    """Prints the table and writes it to `README`, with `RESULT`."""
    parse_arguments(__doc__)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = running_backend(
        "triton", device, head_dim=HEAD_DIM, dtype=dtype, is_causal=True, num_contextual=1
    ).name
    masks = [SampleMask(length, 1, length, 2, is_causal=True) for length in LENGTHS]
    attention = batch_attention(backend, masks, max(LENGTHS), device)
    steps = {name: partial(_step, _layers(device, **of), attention, dtype) for name, of in SETTINGS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in tqdm(range(ROUNDS + 1), desc="recompute"):
        for name, step in steps.items():
            passed = _seconds(step, device)
            if turn:  # the first warms up
                seconds[name].append(passed)
    records = [_record(name, _memory(step, device), seconds) for name, step in steps.items()]
    table = make_table(records)
    print(f"\n{table}")
    figures = {
        "model": {"layers": NUM_LAYERS, "width": HIDDEN_SIZE, "heads": NUM_HEADS, "head_dim": HEAD_DIM},
        "tokens": sum(LENGTHS),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "one core",
        "dtype": str(dtype),
        "attention": backend,
        "records": records,
        "machine": machine(),
    }
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    write_tables(README, "recompute", {"memory and time": table})


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
    with record_function("backward"):
        x.sum().backward()
    layers.zero_grad()


def _seconds(step: partial[None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _memory(step: partial[None], device: torch.device) -> tuple[int, int]:
    """Returns the bytes that forward keeps for backward, and the largest number allocated at a time."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = peak = kept = 0
    for event in events:
        if event.name() == "backward" and not kept:
            kept = allocated
        elif event.name() == "[memory]" and (event.device_type().name == "CUDA") == (device.type == "cuda"):
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return kept, peak


def _record(name: str, memory: tuple[int, int], seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [ours / base for ours, base in zip(seconds[name], seconds["neither"], strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return {
        "setting": name.strip("`"),
        "kept_bytes": memory[0],
        "peak_bytes": memory[1],
        "seconds": round(statistics.median(seconds[name]), 4),
        "time_ratio": {"lower": round(lower, 3), "median": round(median, 3), "upper": round(upper, 3)},
    }


def make_table(records: list[dict[str, Any]]) -> str:
    """Returns a table with a row for each setting."""

    def megabytes(record: dict[str, Any], name: str) -> str:
        return f"{record[name] / 1e6:.1f} ({record[name] / records[0][name]:.2f})"

    rows = [
        [
            name,
            megabytes(record, "kept_bytes"),
            megabytes(record, "peak_bytes"),
            "{median:.2f} ({lower:.2f} to {upper:.2f})".format(**record["time_ratio"]),
        ]
        for name, record in zip(SETTINGS, records, strict=True)
    ]
    return markdown_table(["recomputed", "kept for backward, MB", "peak, MB", "time"], rows)


if __name__ == "__main__":
    main()
