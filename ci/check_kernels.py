"""Compiles the Triton attention kernels for several GPUs, and needs none of them: `make check-kernels`.

Prints the resources of each variant. Exits with 1 if a variant needs more shared memory than the chip has,
multiplies without tensor cores, or spills registers with 16-bit inputs. Float32 at head_dim 256 is printed
but not checked.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.markdown import markdown_table
from hstu.modules import triton_kernels
from hstu.modules.triton_tiles import TileShape, tiles_of

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TENSOR_MEMORY_COLUMNS = 512  # of sm_100, per program
TITLES = [
    *("kernel", "chip", "dtype", "head_dim", "rows×columns", "warps", "stages"),
    *("registers", "spilled bytes", "shared bytes", "tensor-core instructions"),
]
INSTRUCTIONS = {"mma": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma"}


@dataclass(frozen=True)
class Chip:
    """A chip and its limits.

    Attributes:
        capability: compute capability.
        shared_bytes: largest shared memory of a program.
        instruction: tensor-core instruction that 16-bit inputs must use.
    """

    capability: tuple[int, int]
    shared_bytes: int
    instruction: str

    @property
    def number(self) -> int:
        """The compute capability as one number, such as 90 for sm_90."""
        return 10 * self.capability[0] + self.capability[1]


CHIPS = (Chip((8, 0), 166_912, "mma"), Chip((9, 0), 232_448, "wgmma"), Chip((10, 0), 232_448, "tcgen05"))


@dataclass(frozen=True)
class Variant:
    """A kernel for one chip, dtype, and head width."""

    kernel: str
    chip: Chip
    dtype: torch.dtype
    head_dim: int
    tile: TileShape
    flags: dict[str, bool]

    def __str__(self) -> str:
        return f"{self.name} sm_{self.chip.number} {DTYPES[self.dtype]} head_dim {self.head_dim}"

    @property
    def name(self) -> str:
        """The kernel's name, or the gradient's name if a launch of grad_kv computes only one gradient."""
        if self.flags and not all(self.flags.values()):
            return "grad_k" if self.flags["GRAD_K"] else "grad_v"
        return self.kernel


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled variant.

    Attributes:
        registers: registers of a thread.
        spilled_bytes: local memory of a thread.
        shared_bytes: shared memory of a program.
        tensor_memory: columns of tensor memory of a program.
        instructions: number of tensor-core instructions in the PTX, by name.
        other_products: number of products without tensor cores.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_memory: int
    instructions: dict[str, int]
    other_products: int


def main() -> int:
    """Prints the table and any faults. Returns the exit status."""
    every = variants()
    with ProcessPoolExecutor(2) as processes:
        usages = list(processes.map(usage, every))
    print(markdown_table(TITLES, [_row(*pair) for pair in zip(every, usages, strict=True)]))
    faults = [
        f"{variant}: {fault}"
        for variant, used in zip(every, usages, strict=True)
        if variant.dtype != torch.float32 or variant.head_dim < 256
        for fault in _faults(variant, used)
    ]
    print("\n".join(["", *faults]) if faults else f"\n{len(every)} variants are within limits")
    return bool(faults)


def variants() -> list[Variant]:
    """Returns every variant that `triton_hstu_attention` launches on these chips."""
    found = []
    for chip, dtype, head_dim in itertools.product(CHIPS, DTYPES, HEAD_DIMS):
        tiles = tiles_of(head_dim, dtype, chip.capability)
        found += [
            Variant("forward", chip, dtype, head_dim, tiles.forward, {}),
            Variant("grad_q", chip, dtype, head_dim, tiles.grad_q, {}),
        ]
        for flags in tiles.grad_kv_passes:
            found.append(Variant("grad_kv", chip, dtype, head_dim, tiles.grad_kv, flags))
    return found


def usage(variant: Variant) -> Usage:
    """Compiles a variant and returns its resources."""
    kernel = getattr(triton_kernels, f"{variant.kernel}_kernel")
    constants = variant.tile.constants(variant.head_dim) | variant.flags
    types = {name: _type(name, DTYPES[variant.dtype]) for name in kernel.arg_names if name not in constants}
    # At run time, Triton finds that pointers and strides are multiples of 16, and loads 16 bytes at a time.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in types and (types[name].startswith("*") or name.endswith("stride"))
    }
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs=aligned,
        ),
        target=GPUTarget("cuda", variant.chip.number, 32),
        options=variant.tile.options(),
    )
    resources = _resources(compiled.asm["cubin"])
    return Usage(
        registers=resources["REG"],
        spilled_bytes=resources["STACK"] + resources["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        instructions={
            name: len(re.findall(pattern, compiled.asm["ptx"])) for name, pattern in INSTRUCTIONS.items()
        },
        other_products=len(re.findall(r"= tt\.dot .*-> tensor<[^>]*#blocked", compiled.asm["ttgir"])),
    )


def _type(name: str, dtype: str) -> str:
    if name == "work":
        return "*i32"
    if name.endswith("scale"):
        return "fp32"
    if name.endswith("stride") or name == "num_heads":
        return "i32"
    return f"*{dtype}"


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}


def _row(variant: Variant, used: Usage) -> list[str]:
    tile = variant.tile
    return [
        variant.name,
        f"sm_{variant.chip.number}",
        DTYPES[variant.dtype],
        str(variant.head_dim),
        f"{tile.rows}×{tile.columns}",
        str(tile.num_warps),
        str(tile.num_stages),
        str(used.registers),
        str(used.spilled_bytes),
        f"{used.shared_bytes:,}",
        ", ".join(f"{name} {count}" for name, count in used.instructions.items() if count),
    ]


def _faults(variant: Variant, used: Usage) -> list[str]:
    faults = []
    if variant.dtype != torch.float32 and used.spilled_bytes:
        faults.append(f"spills {used.spilled_bytes} bytes of registers")
    if used.shared_bytes > variant.chip.shared_bytes:
        faults.append(f"takes {used.shared_bytes:,} of {variant.chip.shared_bytes:,} bytes of shared memory")
    if used.tensor_memory > TENSOR_MEMORY_COLUMNS:
        faults.append(f"takes {used.tensor_memory} of {TENSOR_MEMORY_COLUMNS} columns of tensor memory")
    if used.other_products or not any(used.instructions.values()):
        faults.append("has a product without tensor cores")
    if variant.dtype != torch.float32 and not used.instructions[variant.chip.instruction]:
        faults.append(f"does not use {variant.chip.instruction}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
