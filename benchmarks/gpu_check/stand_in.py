"""Minimal stand-ins for TorchRec's jagged tensors, for machines that lack them.

Packing, the exchange, and attention read only values, lengths, and weights. With stand-ins for the classes,
the same code runs on machines where TorchRec cannot be installed.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch


def install_where_missing() -> list[str]:
    """Puts stand-ins for torchrec into `sys.modules` if their imports fail.

    Returns:
        The name of the replaced package with its import error, or nothing.
    """
    try:
        importlib.import_module("torchrec.sparse.jagged_tensor")
    except Exception as error:  # of any type, for example if fbgemm is built for another torch
        for loaded in [key for key in sys.modules if key.partition(".")[0] == "torchrec"]:
            del sys.modules[loaded]
        sys.modules.update(_make_torchrec())
        return [f"torchrec ({error})"]
    return []


def is_stand_in(name: str) -> bool:
    """Returns whether a package is a stand-in."""
    return getattr(sys.modules.get(name), "is_stand_in", False)


class _Jagged:
    def __init__(
        self, values: torch.Tensor, weights: torch.Tensor | None = None, *, lengths: torch.Tensor
    ) -> None:
        self.values, self.weights_or_none = (lambda: values), (lambda: weights)
        self.lengths = self.lengths_or_none = lambda: lengths
        self.offsets_or_none = lambda: None


class JaggedTensor(_Jagged):
    """Rows of different lengths, like `torchrec.sparse.jagged_tensor.JaggedTensor`."""


class KeyedJaggedTensor(_Jagged):
    """Several jagged features, like `torchrec.sparse.jagged_tensor.KeyedJaggedTensor`."""

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        lengths: torch.Tensor,
        stride: int,
        length_per_key: Sequence[int] | None = None,
    ) -> None:
        super().__init__(values, weights, lengths=lengths)
        self.keys, self.stride = (lambda: list(keys)), (lambda: stride)


def _make_module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name, "A stand-in of benchmarks.gpu_check.")
    vars(module).update(members, is_stand_in=True)
    return module


def _make_torchrec() -> dict[str, types.ModuleType]:
    # KeyedTensor and Pipelineable have no instances, and serve `isinstance` checks.
    classes = {"JaggedTensor": JaggedTensor, "KeyedJaggedTensor": KeyedJaggedTensor}
    jagged = _make_module("torchrec.sparse.jagged_tensor", **classes, KeyedTensor=type("KeyedTensor", (), {}))
    streamable = _make_module("torchrec.streamable", Pipelineable=type("Pipelineable", (), {}))
    sparse = _make_module("torchrec.sparse", jagged_tensor=jagged)
    torchrec = _make_module("torchrec", sparse=sparse, streamable=streamable)
    return {module.__name__: module for module in (torchrec, sparse, jagged, streamable)}
