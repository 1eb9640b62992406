"""Speed of HSTU attention, forward alone and with backward, as a share of the device's matrix product.

Useful FLOPs are those of two products of the visible half, and seven with backward. The device's product, of
1,024³ on a CPU and 8,192³ on a GPU, is timed in the same run, in turns, so that a slow moment of the machine
meets both. On a GPU the kernels that are installed run next to the PyTorch path; TorchRec need not be
installed there.

    python -m benchmarks.attention
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.command_line import parse_arguments
from benchmarks.gpu_check.stand_in import install_where_missing
from benchmarks.machine import machine
from benchmarks.markdown import markdown_table, write_tables

BENCHMARKS = Path(__file__).parent
README = BENCHMARKS / "README.md"
# Heads, and width of each. Then samples of each length: one long, or many short ones.
CPU_HEADS = ((4, 32), (2, 64), (4, 64), (1, 128))
CPU_SAMPLES = ((1, 16384), (1, 4097), (1, 1025), (4, 257), (16, 257), (32, 128), (64, 64), (128, 32))
GPU_HEADS = ((4, 32), (4, 64), (4, 128), (4, 256))
GPU_SAMPLES = (
    (1, 16384),
    (8, 16384),
    (32, 4097),
    (64, 2048),
    (128, 1025),
    (512, 257),
    (1024, 128),
    (2048, 64),
)
ROUNDS = 7
CALLS_ON_GPU = 5  # per round, so that the host's wait for the device hardly counts
PRODUCTS = {"forward": 2, "both": 7}
SCALING_SEQLEN = 1000

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Prints a table for each kernel; writes them to `README`, and the figures to `results`."""
    parse_arguments(__doc__)
    install_where_missing()
    torch.set_num_threads(1)
    is_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if is_gpu else (torch.device("cpu"), torch.float32)
    all_heads, all_samples = (GPU_HEADS, GPU_SAMPLES) if is_gpu else (CPU_HEADS, CPU_SAMPLES)
    cases = [(heads, samples) for heads in all_heads for samples in all_samples]
    records: list[dict[str, Any]] = []
    for heads, samples in tqdm(cases, desc="attention"):
        records += _measure(*heads, *samples, device, dtype)
    name = torch.cuda.get_device_name() if is_gpu else "one core"
    figures = {"dtype": str(dtype), "device": name, "records": records, "machine": machine()}
    table = make_table(records)
    print(f"\n{table}")
    result = "attention_gpu" if is_gpu else "attention"
    (BENCHMARKS / "results" / f"{result}.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_tables(README, result, {"shares": table})


def _kernels(
    num_samples: int, length: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Kernel]:
    """Returns what there is to measure on the device, for samples of one contextual token and a history."""
    from hstu.modules import SampleMask
    from hstu.modules.attention_backend import BACKENDS, batch_attention, running_backend

    masks = [SampleMask(length, 1, length, 2, True)] * num_samples
    kernels = {}
    for name, title in BACKENDS.items():
        model: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype, "is_causal": True, "num_contextual": 1}
        if running_backend(name, device, **model).name == name:
            kernels[title] = batch_attention(name, masks, SCALING_SEQLEN, device)
    return kernels


def _measure(
    num_heads: int, head_dim: int, num_samples: int, length: int, device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Returns a record for each kernel, with the shares forward and with backward."""
    generator = torch.Generator().manual_seed(0)
    *qkv, grad = (
        torch.randn(num_samples * length, num_heads, head_dim, generator=generator).to(device, dtype)
        for _ in range(4)
    )
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    calls: dict[tuple[str, str], Callable[[], Any]] = {("", "product"): lambda: left @ right}
    kernels = _kernels(num_samples, length, head_dim, device, dtype)
    for name, kernel in kernels.items():
        calls[name, "forward"] = partial(_forward, kernel, qkv)
        calls[name, "both"] = partial(_forward_backward, kernel, qkv, grad)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for turn in range(ROUNDS + 1):
        for key, call in calls.items():
            passed = _seconds(call, device)
            if turn:  # the first warms up
                seconds[key].append(passed)
    of_product = 2 * size**3 / statistics.median(seconds["", "product"])
    useful = 2 * num_heads * head_dim * num_samples * length * (length + 1) / 2
    records = []
    for name in kernels:
        record: dict[str, Any] = {
            "kernel": name,
            "heads": num_heads,
            "head_dim": head_dim,
            "samples": num_samples,
            "length": length,
            "product_gflops": round(of_product / 1e9, 1),
        }
        for what, products in PRODUCTS.items():
            shares = [products * useful / took / of_product for took in seconds[name, what]]
            record[what] = [
                round(share, 3) for share in (statistics.median(shares), min(shares), max(shares))
            ]
        records.append(record)
    return records


@torch.no_grad()
def _forward(kernel: Kernel, qkv: list[torch.Tensor]) -> None:
    kernel(*qkv)


def _forward_backward(kernel: Kernel, qkv: list[torch.Tensor], grad: torch.Tensor) -> None:
    qkv = [tensor.detach().requires_grad_() for tensor in qkv]
    torch.autograd.grad(kernel(*qkv), qkv, grad)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the time of one call."""
    num_calls = CALLS_ON_GPU if device.type == "cuda" else 1
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_calls


def make_table(records: list[dict[str, Any]]) -> str:
    """Returns a row for each number and length of samples and each kernel, a column for each head size."""
    columns = list(dict.fromkeys((record["heads"], record["head_dim"]) for record in records))
    rows: dict[str, list[str]] = {}
    several = len({record["kernel"] for record in records}) > 1
    for record in records:  # head sizes come in the columns' order
        kernel = f"{record['kernel']}, " if several else ""
        median, least, most = record["both"]
        cell = f"{record['forward'][0]:.2f} / {median:.2f} ({least:.2f} to {most:.2f})"
        rows.setdefault(f"{kernel}{record['samples']} × {record['length']:,}", []).append(cell)
    titles = [f"{heads} head{'s' * (heads > 1)} of {width}" for heads, width in columns]
    return markdown_table(["samples × tokens", *titles], [[label, *cells] for label, cells in rows.items()])


if __name__ == "__main__":
    main()
