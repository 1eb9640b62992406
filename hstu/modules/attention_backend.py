"""Chooses the attention backend."""

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
from hstu.modules.triton_attention import triton_hstu_attention
from hstu.modules.triton_tiles import MAX_HEAD_DIM
from hstu.modules.triton_work import TritonWork

BACKENDS = {"pytorch": "PyTorch", "triton": "Triton"}


class Attention(Protocol):
    """The attention of one batch; all layers share it."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the attended values. All tensors are `[total_tokens, num_heads, head_dim]`."""


class PieceAttention(Protocol):
    """The attention of the pieces of samples on this rank; all layers share it."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fetched: torch.Tensor
    ) -> torch.Tensor:
        """Returns the results of the pieces' queries, `[total_tokens, num_heads, head_dim]`.

        The results are zero for all other tokens. Even without pieces, the result is one node of the graph
        that depends on all arguments. Only the arguments are saved, so backward gathers the keys again.

        Args:
            q, k, v: `[total_tokens, num_heads, head_dim]` each, of this rank's tokens.
            fetched: keys and values of other ranks' tokens, `[num_fetched, 2, num_heads, head_dim]`.
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
        backend: "pytorch" or "triton".
        masks: masks of the samples.
        scaling_seqlen: constant divisor of the attention weights.
        device: device of the tokens.
        starts: first token of each sample. None means that samples are concatenated. With `starts`, results
            and gradients are zero for tokens that belong to no sample.

    Raises:
        ImportError: the backend's package is missing.
    """
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
        backend: "pytorch" or "triton".
        masks: masks of the pieces; empty on a rank without pieces.
        starts: index in q of each piece's first query. The queries of a piece are consecutive.
        key_tokens: locations of each mask's `num_tokens` keys, int64, piece by piece. Locations below
            `len(q)` are this rank's tokens, and higher ones count `fetched` tokens. Pieces may share keys,
            but no key occurs twice in a piece.
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
    """The backend that runs.

    Attributes:
        name: "pytorch" or "triton".
        reason: reason for running another backend than the requested one; empty if the requested one runs.
    """

    name: str
    reason: str = ""


def running_backend(requested: str, device: torch.device, head_dim: int) -> RunningBackend:
    """Returns the requested backend if it can run, else Triton in place of CUTLASS, else PyTorch.

    Args:
        requested: name of a backend, or "cutlass", which gin files of recsys-examples set.
        device: device of the model.
        head_dim: width of a head.
    """
    if requested == "pytorch":
        return RunningBackend("pytorch")
    if requested not in (*BACKENDS, "cutlass"):
        return RunningBackend("pytorch", f"it is none of {', '.join(BACKENDS)}, cutlass")
    if device.type != "cuda":
        return RunningBackend("pytorch", "there is no GPU")
    if head_dim > MAX_HEAD_DIM:
        reason = f"Triton kernels have heads of width up to {MAX_HEAD_DIM}, not {head_dim}"
        return RunningBackend("pytorch", reason)
    if importlib.util.find_spec("triton") is None:
        return RunningBackend("pytorch", "triton is not installed")
    return RunningBackend("triton", "" if requested == "triton" else "this trainer has no CUTLASS kernels")
