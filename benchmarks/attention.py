"""Speed of HSTU attention, forward and backward, as a share of the device's matrix product.

Useful FLOPs are those of seven products of the visible half. The product, of 1,024³ on a CPU and 8,192³ on a
GPU, is timed in the same run, in turns, so that a slow moment of the machine meets both.

    python -m benchmarks.attention
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.machine import machine
from benchmarks.markdown import markdown_table, write_tables
from hstu.modules import AttentionTiles, SampleMask, jagged_hstu_attention

BENCHMARKS = Path(__file__).parent
RESULT, README = BENCHMARKS / "results" / "attention.json", BENCHMARKS / "README.md"
HEADS = ((4, 32), (2, 64), (4, 64), (1, 128))  # heads, and width of each
# Samples of each length: one long, or many short ones.
SAMPLES = ((1, 16384), (1, 4097), (1, 1025), (4, 257), (16, 257), (32, 128), (64, 64), (128, 32))
ROUNDS = 7
PRODUCTS = 7  # two forward, five backward


def main() -> None:
    """Prints the table and writes it to `README`, with `RESULT`."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = [(heads, samples) for heads in HEADS for samples in SAMPLES]
    records = [_measure(*heads, *samples, device, dtype) for heads, samples in tqdm(cases, desc="attention")]
    figures = {"dtype": str(dtype), "device": _name(device), "records": records, "machine": machine()}
    table = _table(records)
    print(f"\n{table}")
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    write_tables(README, "attention", {"shares": table})


def _measure(
    num_heads: int, head_dim: int, num_samples: int, length: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    shape = num_samples * length, num_heads, head_dim
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(4)
    )
    tiles = AttentionTiles([SampleMask(length, 1, length, 2, True)] * num_samples, device)
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: torch.autograd.grad(
            jagged_hstu_attention(q, k, v, tiles, 1000.0), (q, k, v), grad
        ),
        "product": lambda: left @ right,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            passed = _seconds(call, device)
            if turn:  # the first warms up
                seconds[name].append(passed)
    useful = PRODUCTS * 2 * num_heads * head_dim * num_samples * length * (length + 1) / 2
    speeds = [useful / of for of in seconds["attention"]]
    of_product = 2 * size**3 / statistics.median(seconds["product"])
    return {
        "heads": num_heads,
        "head_dim": head_dim,
        "samples": num_samples,
        "length": length,
        "share": round(statistics.median(speeds) / of_product, 3),
        "least": round(min(speeds) / of_product, 3),
        "most": round(max(speeds) / of_product, 3),
        "product_gflops": round(of_product / 1e9, 1),
    }


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "one core"


def _table(records: list[dict[str, Any]]) -> str:
    def cell(samples: int, length: int, heads: tuple[int, int]) -> str:
        key = {"samples": samples, "length": length, "heads": heads[0], "head_dim": heads[1]}
        (record,) = (r for r in records if key.items() <= r.items())
        return f"{record['share']:.2f} ({record['least']:.2f} to {record['most']:.2f})"

    rows = [
        [f"{samples} × {length:,}", *(cell(samples, length, of) for of in HEADS)]
        for samples, length in SAMPLES
    ]
    titles = [f"{heads} heads of {width}" for heads, width in HEADS]
    return markdown_table(["samples × tokens", *titles], rows)


if __name__ == "__main__":
    main()
