"""Compiles the Triton attention kernels for several GPUs, and needs none of them: `make check-kernels`.

Prints the faults, and exits with 1, if a variant needs more shared memory than the chip has, multiplies
without tensor cores, or spills registers with 16-bit inputs. Float32 at head_dim 256 is only compiled.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hstu.modules import triton_kernels
from hstu.modules.triton_tiles import TileShape, tiles_of

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TENSOR_MEMORY_COLUMNS = 512  # of sm_100, per program
INSTRUCTIONS = {"mma": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma"}
# Types of the kernels' arguments by the ends of their names. Other arguments point to numbers of the dtype.
TYPES = {"work": "*i32", "num_heads": "i32", "stride": "i32", "scale": "fp32"}


class Chip(NamedTuple):
    """A chip and its limits.

    Attributes:
        number: compute capability as one number, such as 90 for sm_90.
        shared_bytes: largest shared memory of a program.
        instruction: tensor-core instruction that 16-bit inputs must use.
    """

    number: int
    shared_bytes: int
    instruction: str


CHIPS = (Chip(80, 166_912, "mma"), Chip(90, 232_448, "wgmma"), Chip(100, 232_448, "tcgen05"))


class Variant(NamedTuple):
    """A kernel for one chip, dtype, and head width."""

    kernel: str
    chip: Chip
    dtype: torch.dtype
    head_dim: int
    tile: TileShape
    flags: dict[str, bool]

    @property
    def name(self) -> str:
        """The kernel's name, or the gradient's name if a launch of grad_kv computes only one gradient."""
        if self.flags and not all(self.flags.values()):
            return "grad_k" if self.flags["GRAD_K"] else "grad_v"
        return self.kernel


def main() -> int:
    """Prints any faults. Returns the exit status."""
    every = variants()
    with ProcessPoolExecutor(2) as processes:
        found = list(processes.map(find_faults, every))
    faults = [
        f"{variant.name} sm_{variant.chip.number} {variant.dtype} head_dim {variant.head_dim}: {fault}"
        for variant, its_faults in zip(every, found, strict=True)
        if variant.dtype != torch.float32 or variant.head_dim < 256
        for fault in its_faults
    ]
    print("\n".join(faults) or f"{len(every)} variants are within limits")
    return bool(faults)


def variants() -> list[Variant]:
    """Returns every variant that `triton_hstu_attention` launches on these chips."""
    found = []
    for chip, dtype, head_dim in itertools.product(CHIPS, DTYPES, HEAD_DIMS):
        tiles = tiles_of(head_dim, dtype, divmod(chip.number, 10))
        kernels = [("forward", tiles.forward, {}), ("grad_q", tiles.grad_q, {})]
        kernels += [("grad_kv", tiles.grad_kv, flags) for flags in tiles.grad_kv_passes]
        found += [Variant(name, chip, dtype, head_dim, tile, flags) for name, tile, flags in kernels]
    return found


def _compile(variant: Variant) -> Any:
    """Returns a variant as compiled by Triton."""
    kernel, dtype, tile = (
        getattr(triton_kernels, f"{variant.kernel}_kernel"),
        DTYPES[variant.dtype],
        variant.tile,
    )
    constants = tile.constants(variant.head_dim) | variant.flags
    types = {
        name: next((kind for end, kind in TYPES.items() if name.endswith(end)), f"*{dtype}")
        for name in kernel.arg_names
        if name not in constants
    }
    # At run time, Triton finds that pointers and strides are multiples of 16, and loads 16 bytes at a time.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in types and (types[name].startswith("*") or name.endswith("stride"))
    }
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", variant.chip.number, 32)
    return triton.compile(source, target=target, options=tile.options())


def _read_resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}


def find_faults(variant: Variant) -> list[str]:
    """Compiles a variant, and returns the limits that it exceeds."""
    faults, chip, is_16_bit, compiled = [], variant.chip, variant.dtype.itemsize == 2, _compile(variant)
    resources, shared_bytes = _read_resources(compiled.asm["cubin"]), compiled.metadata.shared
    spilled_bytes = resources["STACK"] + resources["LOCAL"]
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    used = {name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, compiled.asm["ptx"])}
    if is_16_bit and spilled_bytes:
        faults.append(f"spills {spilled_bytes} bytes of registers")
    if shared_bytes > chip.shared_bytes:
        faults.append(f"takes {shared_bytes:,} of {chip.shared_bytes:,} bytes of shared memory")
    if tensor_memory > TENSOR_MEMORY_COLUMNS:
        faults.append(f"takes {tensor_memory} of {TENSOR_MEMORY_COLUMNS} columns of tensor memory")
    if not used or re.search(r"= tt\.dot .*-> tensor<[^>]*#blocked", compiled.asm["ttgir"]):
        faults.append("has a product without tensor cores")
    if is_16_bit and chip.instruction not in used:
        faults.append(f"does not use {chip.instruction}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
