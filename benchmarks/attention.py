"""Measures the speed of HSTU attention, without and with backward, relative to a matrix product's speed.

Useful FLOPs count two products over the visible half of all pairs, and seven with backward. A matrix product,
1,024³ on a CPU and 8,192³ on a GPU, takes turns with attention in the same run, so that a slow moment of the
machine affects both. On a GPU, the installed kernels run beside the PyTorch path, and TorchRec is not needed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from benchmarks.gpu_check.stand_in import install_where_missing
from benchmarks.harness import Record, read_result, show_progress, summarize, time_in_turns
from benchmarks.markdown import pivot

# (number of heads, head width), then (number of samples, length): one long sample, or many short samples.
CPU_HEADS = ((4, 32), (2, 64), (4, 64), (1, 128))
CPU_SAMPLES = ((1, 16384), (1, 4097), (1, 1025), (4, 257), (16, 257), (32, 128), (64, 64), (128, 32))
GPU_HEADS = ((4, 32), (4, 64), (4, 128), (4, 256))
GPU_SAMPLES = (
    *((1, 16384), (8, 16384), (32, 4097), (64, 2048)),
    *((128, 1025), (512, 257), (1024, 128), (2048, 64)),
)
ROUNDS = 7
CALLS_ON_GPU = 5  # per round, so that the host's wait for the device hardly counts
PRODUCTS = {"forward": 2, "both": 7}
SCALING_SEQLEN = 1000

Kernel = Callable[..., torch.Tensor]


def measure() -> Record:
    """Returns the shares of each kernel. On a GPU, adds them to the committed figures of the CPU."""
    install_where_missing()
    is_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if is_gpu else (torch.device("cpu"), torch.float32)
    cases = list(product(*((GPU_HEADS, GPU_SAMPLES) if is_gpu else (CPU_HEADS, CPU_SAMPLES))))
    figures = {
        "dtype": str(dtype),
        "device": torch.cuda.get_device_name() if is_gpu else "one core",
        "records": [
            record
            for heads, samples in show_progress(cases, "attention")
            for record in _measure(*heads, *samples, device, dtype)
        ],
    }
    return read_result("attention") | {"gpu": figures} if is_gpu else figures


def _make_kernels(
    num_samples: int, length: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Kernel]:
    """Returns the kernels that run on the device, for samples of one contextual token and a history."""
    from hstu.modules import SampleMask
    from hstu.modules.attention_backend import BACKENDS, batch_attention, running_backend

    masks = [SampleMask(length, 1, length, 2, True)] * num_samples
    runs = [name for name in BACKENDS if running_backend(name, device, head_dim=head_dim).name == name]
    return {BACKENDS[name]: batch_attention(name, masks, SCALING_SEQLEN, device) for name in runs}


def _measure(
    num_heads: int, head_dim: int, num_samples: int, length: int, device: torch.device, dtype: torch.dtype
) -> list[Record]:
    """Returns a record for each kernel, with its shares for forward, and for forward and backward."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    *qkv, grad = (randn(num_samples * length, num_heads, head_dim) for _ in range(4))
    size = 8192 if device.type == "cuda" else 1024
    left, right = randn(size, size), randn(size, size)
    num_calls = CALLS_ON_GPU if device.type == "cuda" else 1
    kernels = _make_kernels(num_samples, length, head_dim, device, dtype)
    calls = {("", "product"): partial(_run, torch.matmul, [left, right], None, num_calls, device)}
    for name, kernel in kernels.items():
        for what, given in (("forward", None), ("both", grad)):
            calls[name, what] = partial(_run, kernel, qkv, given, num_calls, device)
    times = time_in_turns(calls, ROUNDS, clock=time.perf_counter)
    per_ms = 2 * size**3 / statistics.median(times["", "product"])
    useful = 2 * num_heads * head_dim * num_samples * length * (length + 1) / 2
    shared = {"heads": num_heads, "head_dim": head_dim, "samples": num_samples, "length": length}

    def share(name: str, what: str) -> list[float]:
        took = summarize(times[name, what]).values()
        return [round(PRODUCTS[what] * useful / each / per_ms, 3) for each in took]

    return [{"kernel": name, **shared, **{what: share(name, what) for what in PRODUCTS}} for name in kernels]


def _run(
    kernel: Kernel, qkv: list[torch.Tensor], grad: torch.Tensor | None, num_calls: int, device: torch.device
) -> None:
    """Runs forward passes, and backward passes if there is `grad`, the gradient of the output."""
    for _ in range(num_calls):
        leaves = [tensor.detach().requires_grad_(grad is not None) for tensor in qkv]
        output = kernel(*leaves)
        if grad is not None:
            torch.autograd.grad(output, leaves, grad)
    if device.type == "cuda":
        torch.cuda.synchronize()


def tables(figures: Record) -> dict[str, str]:
    """Returns the Markdown for each marker. The GPU's is empty if no GPU was measured."""
    return {
        "attention shares": _tabulate(figures["records"]),
        "attention_gpu shares": _tabulate(figures["gpu"]["records"]) if "gpu" in figures else "",
    }


def _tabulate(records: list[Record]) -> str:
    several = len({record["kernel"] for record in records}) > 1
    return pivot(
        records,
        {"samples × tokens": ("{kernel}, " if several else "") + "{samples} × {length:,}"},
        lambda record: "{heads} head{s} of {head_dim}".format(s="s" * (record["heads"] > 1), **record),
        "{forward[0]:.2f} / {both[0]:.2f}",
    )
