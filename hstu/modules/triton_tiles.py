"""Tile shapes of the Triton kernels by head width, dtype, and chip.

`make check-kernels` compiles all of them. They are chosen so that 16-bit variants do not spill registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_HEAD_DIM = 256
INTERPRETER = (0, 0)  # in place of a compute capability


@dataclass(frozen=True)
class TileShape:
    """The tile of scores that a program computes at a time, and compiler options of the program.

    Attributes:
        rows, columns: numbers of queries and of keys; powers of two, at least 16.
        num_warps: number of warps of a program.
        num_stages: number of stages of the pipeline that loads tiles ahead.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int

    def constants(self, head_dim: int) -> dict[str, int]:
        """Returns the constants with which all kernels are compiled."""
        padded = padded_head_dim(head_dim)
        return {"HEAD_DIM": head_dim, "DIM": padded, "ROWS": self.rows, "COLUMNS": self.columns}

    def options(self) -> dict[str, int | bool]:
        """Returns the compiler's options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


TOGETHER = ({"GRAD_K": True, "GRAD_V": True},)
# For wide heads, the sums of both gradients do not fit into registers at once.
APART = ({"GRAD_K": True, "GRAD_V": False}, {"GRAD_K": False, "GRAD_V": True})


@dataclass(frozen=True)
class KernelTiles:
    """The tile shapes of the three kernels.

    Attributes:
        forward, grad_q, grad_kv: tile shape of each kernel.
        grad_kv_passes: constants of each launch of the kernel for the gradients of k and v.
    """

    forward: TileShape
    grad_q: TileShape
    grad_kv: TileShape
    grad_kv_passes: tuple[dict[str, bool], ...] = TOGETHER


_T = TileShape
# Keys are padded head widths. These shapes fit into the 99 KiB of shared memory of sm_86, sm_89, and sm_120.
MMA_16_BIT = {
    32: KernelTiles(_T(128, 64, 4, 3), _T(64, 64, 4, 3), _T(64, 64, 4, 3)),
    64: KernelTiles(_T(128, 64, 8, 3), _T(128, 64, 8, 3), _T(32, 128, 8, 2)),
    128: KernelTiles(_T(128, 64, 8, 3), _T(128, 32, 8, 2), _T(64, 64, 8, 2)),
    256: KernelTiles(_T(64, 32, 4, 2), _T(32, 32, 4, 2), _T(32, 32, 4, 2), APART),
}
HOPPER_16_BIT = {
    32: KernelTiles(_T(128, 64, 4, 3), _T(64, 64, 4, 3), _T(64, 64, 4, 3)),
    64: KernelTiles(_T(64, 64, 4, 3), _T(64, 64, 4, 3), _T(64, 64, 4, 2)),
    128: KernelTiles(_T(128, 64, 8, 3), _T(128, 64, 8, 2), _T(32, 128, 8, 2)),
    256: KernelTiles(_T(128, 32, 8, 3), _T(128, 32, 8, 2), _T(32, 128, 8, 2), APART),
}
BLACKWELL_16_BIT = {
    32: KernelTiles(_T(128, 64, 8, 3), _T(64, 64, 4, 3), _T(64, 64, 4, 3)),
    64: KernelTiles(_T(128, 64, 4, 3), _T(128, 64, 8, 3), _T(64, 128, 8, 2)),
    128: KernelTiles(_T(128, 128, 8, 2), _T(128, 64, 8, 2), _T(64, 128, 8, 2)),
    256: KernelTiles(_T(128, 64, 8, 2), _T(128, 32, 8, 2), _T(32, 128, 8, 2), APART),
}
ANY_32_BIT = {
    32: KernelTiles(_T(64, 32, 4, 2), _T(64, 32, 4, 2), _T(32, 64, 4, 2)),
    64: KernelTiles(_T(64, 32, 4, 2), _T(32, 32, 4, 2), _T(32, 32, 4, 2)),
    128: KernelTiles(_T(32, 32, 8, 1), _T(32, 32, 8, 1), _T(32, 32, 8, 1), APART),
    256: KernelTiles(_T(32, 16, 8, 1), _T(16, 16, 8, 1), _T(16, 16, 8, 1), APART),
}
INTERPRETED = {
    width: KernelTiles(_T(32, 16, 4, 1), _T(16, 32, 4, 1), _T(16, 32, 4, 1), passes)
    for width, passes in {32: TOGETHER, 64: TOGETHER, 128: TOGETHER, 256: APART}.items()
}


def padded_head_dim(head_dim: int) -> int:
    """Returns the power of two that the kernels pad a head to, at least 32."""
    return max(32, 1 << (head_dim - 1).bit_length())


def tiles_of(head_dim: int, dtype: torch.dtype, chip: tuple[int, int]) -> KernelTiles:
    """Returns the tile shapes for a chip's compute capability, such as (9, 0)."""
    if chip == INTERPRETER:
        table = INTERPRETED
    elif dtype == torch.float32:
        table = ANY_32_BIT
    else:
        table = {9: HOPPER_16_BIT, 10: BLACKWELL_16_BIT}.get(chip[0], MMA_16_BIT)
    return table[padded_head_dim(head_dim)]
