"""Choice of the attention backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from hstu.modules.attention import jagged_hstu_attention
from hstu.modules.attention_mask import SampleMask
from hstu.modules.attention_tiles import AttentionTiles
from hstu.modules.cutlass_attention import (
    CutlassSamples,
    cutlass_hstu_attention,
    disagreement,
    unsupported,
)
from hstu.modules.triton_attention import triton_hstu_attention
from hstu.modules.triton_tiles import MAX_HEAD_DIM
from hstu.modules.triton_work import TritonWork

BACKENDS = {"pytorch": "PyTorch", "triton": "Triton", "cutlass": "CUTLASS"}


class Attention(Protocol):
    """Attention of one batch; all layers share it."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Maps three `[total_tokens, num_heads, head_dim]` to the same shape."""


def batch_attention(
    backend: str, masks: Sequence[SampleMask], scaling_seqlen: int, device: torch.device
) -> Attention:
    """Returns the attention of a batch.

    Args:
        backend: "pytorch", "triton" or "cutlass".
        masks: one per sample.
        scaling_seqlen: constant divisor of the attention weights.
        device: device of the tokens.

    Raises:
        ImportError: the backend's package is missing.
        ValueError: the backend cannot compute these masks.
    """
    if backend == "cutlass":
        samples = CutlassSamples(masks, device)
        return partial(cutlass_hstu_attention, samples=samples, scaling_seqlen=scaling_seqlen)
    if backend == "triton":
        return partial(triton_hstu_attention, work=TritonWork.of(masks), scaling_seqlen=scaling_seqlen)
    tiles = AttentionTiles(masks, device)
    return partial(jagged_hstu_attention, tiles=tiles, scaling_seqlen=scaling_seqlen)


@dataclass(frozen=True)
class RunningBackend:
    """Backend that runs.

    Attributes:
        name: "pytorch", "triton" or "cutlass".
        reason: why another backend than the requested one runs; empty if the requested one does.
    """

    name: str
    reason: str = ""


def running_backend(
    requested: str,
    device: torch.device,
    *,
    head_dim: int,
    dtype: torch.dtype,
    is_causal: bool,
    num_contextual: int,
) -> RunningBackend:
    """Chooses "cutlass", then "triton", then "pytorch", starting at the requested backend.

    "cutlass" runs if it gives the results of "pytorch" for every batch of the model: the masks are ones that
    its kernels know, and a small batch that is tried here on the GPU agrees.

    Args:
        requested: name of a backend.
        device: device of the model.
        head_dim, dtype: width and dtype of heads.
        is_causal: whether attention is causal.
        num_contextual: most contextual tokens of a sample that all see each other.
    """
    if requested == "pytorch":
        return RunningBackend("pytorch")
    if requested not in BACKENDS:
        return RunningBackend("pytorch", f"it is none of {', '.join(BACKENDS)}")
    if device.type != "cuda":
        return RunningBackend("pytorch", "there is no GPU")
    reasons = []
    if requested == "cutlass":
        reason = unsupported(head_dim, dtype, is_causal, num_contextual)
        reason = reason or disagreement(head_dim, dtype, device)
        if not reason:
            return RunningBackend("cutlass")
        reasons.append(reason)
    if head_dim > MAX_HEAD_DIM:
        reasons.append(f"Triton kernels have heads of width up to {MAX_HEAD_DIM}, not {head_dim}")
    elif importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed")
    else:
        return RunningBackend("triton", "; ".join(reasons))
    return RunningBackend("pytorch", "; ".join(reasons))
