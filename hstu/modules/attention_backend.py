"""Choice of the attention backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
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


class PieceAttention(Protocol):
    """Attention of the pieces of samples on this rank; all layers share it."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor
    ) -> torch.Tensor:
        """Returns the results of the pieces' queries, `[total_tokens, num_heads, head_dim]`.

        They are zero for all other tokens. Without pieces, too, the result is one node of the graph that
        depends on all arguments. Backward gathers the keys again; only the arguments are saved.

        Args:
            q, k, v: `[total_tokens, num_heads, head_dim]` each, of this rank's tokens.
            fetched: `[num_fetched, 2, num_heads, head_dim]`, keys and values of other ranks' tokens.
        """


def batch_attention(
    backend: str,
    masks: Sequence[SampleMask],
    scaling_seqlen: int,
    device: torch.device,
    starts: Sequence[int] | None = None,
) -> Attention:
    """Returns the attention of whole samples.

    Args:
        backend: "pytorch", "triton" or "cutlass". CUTLASS kernels take no `starts`: Triton runs instead.
        masks: one per sample.
        scaling_seqlen: constant divisor of the attention weights.
        device: device of the tokens.
        starts: first token of each sample; None if samples are concatenated. With `starts`, results and
            gradients are zero for tokens of no sample.

    Raises:
        ImportError: the backend's package is missing.
        ValueError: the backend cannot compute these masks.
    """
    if backend == "cutlass" and starts is None:
        samples = CutlassSamples(masks, device)
        return partial(cutlass_hstu_attention, samples=samples, scaling_seqlen=scaling_seqlen)
    if backend == "pytorch":
        tiles = AttentionTiles(masks, device, starts)
        return partial(jagged_hstu_attention, tiles=tiles, scaling_seqlen=scaling_seqlen)
    return partial(triton_hstu_attention, work=TritonWork(masks, starts), scaling_seqlen=scaling_seqlen)


def piece_attention(
    backend: str,
    masks: Sequence[SampleMask],
    starts: Sequence[int],
    key_tokens: np.ndarray,
    scaling_seqlen: int,
    device: torch.device,
) -> PieceAttention:
    """Returns the attention of the pieces of samples on this rank.

    Args:
        backend: "pytorch", "triton" or "cutlass". CUTLASS kernels take no pieces: Triton runs instead.
        masks: one per piece; none on a rank without pieces.
        starts: first query of each piece in q; they are consecutive.
        key_tokens: int64, the location of each mask's `num_tokens` keys, one piece after another. Locations
            below `len(q)` are this rank's tokens; from there on they count `fetched` tokens. Pieces may share
            keys, but no key occurs twice in a piece.
        scaling_seqlen: constant divisor of the attention weights.
        device: device of the tokens.

    Raises:
        ImportError: the backend's package is missing.
        ValueError: `key_tokens` does not fit the masks.
    """
    if backend == "pytorch":
        tiles = AttentionTiles(masks, device, starts, key_tokens)
        return lambda q, k, v, fetched: jagged_hstu_attention(q, k, v, tiles, scaling_seqlen, fetched)
    work = TritonWork(masks, starts, key_tokens)
    return lambda q, k, v, fetched: triton_hstu_attention(q, k, v, work, scaling_seqlen, fetched)


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
