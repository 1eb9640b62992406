"""HSTU attention by FBGEMM's CUTLASS kernels, the distribution `fbgemm_gpu_hstu`.

The kernels' backward is not deterministic.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from commons.jagged_indices import to_device_together
from hstu.modules.attention import jagged_hstu_attention
from hstu.modules.attention_inputs import check_inputs
from hstu.modules.attention_mask import SampleMask
from hstu.modules.attention_tiles import AttentionTiles

DISTRIBUTION = "fbgemm_gpu_hstu"
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (32, 64, 128, 256)
TOLERANCE = 0.03  # share of a result's norm: bfloat16 stays within 0.01, and wrong masks exceed 0.1


class CutlassSamples:
    """The samples of a batch in the form that the kernels take. Make one per batch; all layers share it.

    Samples without tokens are left out.

    Args:
        masks: masks of the samples.
        device: device of the tokens.

    Attributes:
        num_tokens: number of tokens of all samples.
        longest: number of tokens of the longest sample.
        tokens_per_candidate: 2 for an item and its action, 1 for an item without an action.
        offsets: first token of each sample, then the number of all tokens, int32 `[samples + 1]`.
        num_targets: number of candidate tokens of each sample, int32 `[samples]`; None without candidates.

    Raises:
        ValueError: tokens before a sample's candidates see later ones, which the kernels cannot express; or
            masks differ in `tokens_per_candidate`.
    """

    def __init__(self, masks: Sequence[SampleMask], device: torch.device) -> None:
        masks = [mask for mask in masks if mask.num_tokens]
        for mask in masks:
            if mask.prefix > 1:
                raise ValueError(
                    f"{mask} lets {mask.prefix} tokens see each other; the CUTLASS kernels need causal "
                    'contextual and history tokens: use attention_backend "triton" or "pytorch"'
                )
        kinds = {mask.tokens_per_candidate for mask in masks} or {1}
        if len(kinds) > 1:
            raise ValueError(f"masks have tokens_per_candidate {sorted(kinds)}; expected one per batch")
        (self.tokens_per_candidate,) = kinds
        lengths = np.array([mask.num_tokens for mask in masks], np.int64)
        targets = lengths - np.array([mask.history_end for mask in masks], np.int64)
        self.num_tokens, self.longest = int(lengths.sum()), int(lengths.max(initial=0))
        offsets, num_targets = to_device_together([np.append(0, lengths.cumsum()), targets], device)
        self.offsets = offsets.int()
        self.num_targets = num_targets.int() if targets.any() else None


def cutlass_hstu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, samples: CutlassSamples, scaling_seqlen: int
) -> torch.Tensor:
    """Computes `SiLU(q kᵀ / sqrt(head_dim)) / scaling_seqlen`, masked, times v, for each sample.

    Equals `jagged_hstu_attention` up to rounding. Host and device do not synchronize.

    Args:
        q, k, v: `[total_tokens, num_heads, head_dim]` each, bfloat16 or float16; head_dim is 32, 64, 128, or
            256. They may be views of one projection.
        samples: the batch's samples.
        scaling_seqlen: constant of the model.

    Returns:
        `[total_tokens, num_heads, head_dim]`, with the inputs' dtype.

    Raises:
        ImportError: the package is not installed or does not load.
        ValueError: shapes or dtypes do not fit, or `scaling_seqlen` is not positive.
    """
    check_inputs(q, k, v, samples.num_tokens, scaling_seqlen)
    if q.dtype not in DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; expected all bfloat16 or all float16"
        )
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"head_dim is {q.shape[2]}; expected one of {HEAD_DIMS} for the CUTLASS kernels")
    if not samples.num_tokens:
        return v
    function = _package().hstu_attn_varlen_func
    return function(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=samples.offsets,
        cu_seqlens_k=samples.offsets,
        **_without_value(function),
        max_seqlen_q=samples.longest,
        max_seqlen_k=samples.longest,
        scaling_seqlen=scaling_seqlen,
        num_contexts=None,
        num_targets=samples.num_targets,
        target_group_size=samples.tokens_per_candidate,
        window_size=(-1, 0),  # causal
        alpha=1 / math.sqrt(q.shape[2]),
    )


def unsupported(head_dim: int, dtype: torch.dtype, is_causal: bool, num_contextual: int) -> str:
    """Returns the reason why the kernels cannot compute a model's attention; empty if they can.

    Args:
        head_dim, dtype: width and dtype of heads.
        is_causal: whether attention is causal.
        num_contextual: largest number of contextual tokens in a sample that all see each other.
    """
    if dtype not in DTYPES:
        return f"CUTLASS kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"CUTLASS kernels have heads of width {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if not is_causal:
        return "CUTLASS kernels take candidates only if attention is causal"
    if num_contextual > 1:
        return (
            "in CUTLASS kernels, contextual tokens see the whole history, not only each other; "
            "disable_contextual_mask = True makes them causal"
        )
    return ""


def disagreement(head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the reason why the installed kernels cannot be used for these heads; empty if they can.

    Runs a small batch forward and backward and compares it with `jagged_hstu_attention`. A build without the
    kernels for a width, dtype, or mask can return arbitrary numbers instead of raising an error. On some
    chips, some versions of the package divide by the longest sample of the batch.
    """
    lengths = ((150, 20), (4, 0), (67, 67))  # tokens of a sample, and its tokens before the candidates
    # Most tokens are candidates, so that a wrong mask shows, and one sample's candidates exceed a tile of the
    # kernels. Without candidates, other kernels run.
    with_candidates = [SampleMask(num_tokens, 0, end, 2, is_causal=True) for num_tokens, end in lengths]
    without = [SampleMask(num_tokens, 0, num_tokens, 2, is_causal=True) for num_tokens, _ in lengths]
    try:
        agrees = all(_agrees(masks, head_dim, dtype, device) for masks in (with_candidates, without))
    except ImportError as error:
        return str(error)
    except Exception as error:  # whatever the package raises, another backend can run
        return f"{DISTRIBUTION} fails: {_first_line(error)}"
    return "" if agrees else f"the installed {DISTRIBUTION} gives other results than PyTorch"


def _agrees(masks: Sequence[SampleMask], head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether results and gradients for these masks agree with PyTorch's."""
    shape = sum(mask.num_tokens for mask in masks), 2, head_dim
    generator = torch.Generator().manual_seed(0)
    *qkv, grad = (torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for _ in range(4))
    scaling_seqlen = 40  # neither the longest sample nor near it
    tiles, samples = AttentionTiles(masks, device), CutlassSamples(masks, device)
    results = []
    for attention in (
        partial(jagged_hstu_attention, tiles=tiles),
        partial(cutlass_hstu_attention, samples=samples),
    ):
        inputs = [x.detach().requires_grad_() for x in qkv]
        out = attention(*inputs, scaling_seqlen=scaling_seqlen)
        results.append([x.float() for x in (out, *torch.autograd.grad(out, inputs, grad))])
    # `<=` rather than a negated `>`, so that NaN counts as a difference.
    return all(
        bool((got - want).norm() <= TOLERANCE * want.norm()) for want, got in zip(*results, strict=True)
    )


@cache
def _without_value(function: Callable[..., Any]) -> dict[str, None]:
    """Returns None for the arguments that only some versions require."""
    return dict.fromkeys({"seqused_q", "seqused_k"} & inspect.signature(function).parameters.keys())


def _package() -> ModuleType:
    """Returns the package, loaded under the distribution's name, because its own name, `hstu`, is taken here.

    Raises:
        ImportError: the package is not installed or does not load.
    """
    if DISTRIBUTION in sys.modules:
        return sys.modules[DISTRIBUTION]
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{DISTRIBUTION} is not installed") from error
    file = Path(str(distribution.locate_file("hstu/__init__.py")))
    if not file.exists():
        raise ImportError(f"{DISTRIBUTION} is installed without {file}")
    spec = importlib.util.spec_from_file_location(
        DISTRIBUTION, file, submodule_search_locations=[str(file.parent)]
    )
    assert spec is not None and spec.loader is not None  # a file that ends in .py has both
    package = importlib.util.module_from_spec(spec)
    sys.modules[DISTRIBUTION] = package  # its modules import each other through this entry
    try:
        spec.loader.exec_module(package)
    except Exception as error:  # not only ImportError, as for a library built for another torch
        del sys.modules[DISTRIBUTION]
        raise ImportError(f"{DISTRIBUTION} does not load: {_first_line(error)}") from error
    return package


def _first_line(error: Exception) -> str:
    """Returns an error's message without the C++ stack that may follow it."""
    return str(error).partition("\n")[0]
