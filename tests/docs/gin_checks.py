"""What is checked of gin text and command lines, in a process that has configurables of one model alone."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin
import torch

from commons.datasets import BenchmarkDatasetArgs
from commons.gin_values import from_gin, is_bound
from commons.training import OptimizerArgs, TensorModelParallelArgs, TrainerArgs, entry_point
from tests.docs.pages import REPOSITORY

# What a block of a model may be meant to be added to. Both models have a NetworkArgs of their own.
BASES = {
    "hstu": (
        "benchmarks/demo/hstu.gin",
        "hstu/training/configs/movielens_100k_ranking.gin",
        "hstu/training/configs/movielens_100k_retrieval.gin",
    ),
    "sid_gr": ("sid_gr/training/configs/sid_random.gin",),
}
ENTRY_POINTS = {
    "hstu.training.pretrain_gr_ranking": "hstu",
    "hstu.training.pretrain_gr_retrieval": "hstu",
    "sid_gr.training.pretrain_sid_gr": "sid_gr",
}
# Modules that a block imports, as a user's own would be.
_USERS_MODULES = ("my_module",)


def problems_of_gin_text(model: str, text: str) -> list[str]:
    """What is wrong with a block on each of its model's bases; empty if it fits one of them."""
    for name in _USERS_MODULES:
        sys.modules.setdefault(name, types.ModuleType(name))
    problems = []
    for base in BASES[model]:
        gin.clear_config()
        try:
            args = importlib.import_module(f"{model}.training.model_args")
            gin.parse_config((REPOSITORY / base).read_text())
            gin.parse_config(text)
            _make_all(args)
            return []
        except Exception as error:
            problems.append(f"on {base}: {type(error).__name__}: {error}")
    return problems


def _make_all(args: Any) -> None:
    """Instances of all that is configured, each of which checks its values."""
    for configurable in (TrainerArgs, OptimizerArgs, TensorModelParallelArgs, args.NetworkArgs):
        from_gin(configurable)
    for name in ("DatasetArgs", "RankingArgs", "RetrievalArgs"):
        configurable = getattr(args, name, None)
        first = {"DatasetArgs": "dataset_name", "RankingArgs": "prediction_head_arch"}
        if configurable is not None and is_bound(f"{name}.{first.get(name, 'num_negatives')}"):
            from_gin(configurable)
    if is_bound("BenchmarkDatasetArgs.feature_args"):
        from_gin(BenchmarkDatasetArgs)


class _Parsed(Exception):
    """The run would begin here."""


def problem_of_command(module: str, arguments: list[str]) -> str:
    """Runs an entry point until its training would begin; what went wrong before, empty if nothing did.

    Data that is not prepared is nothing wrong, if the message has the command that prepares it.
    """

    @contextlib.contextmanager
    def here() -> Iterator[torch.device]:
        yield torch.device("cpu")

    def stop(*_: Any) -> Any:
        raise _Parsed

    gin.clear_config()
    replaced = {"rank_process": here, "train": stop, "measure_steps": stop}
    kept = {name: getattr(entry_point, name) for name in replaced}
    argv, errors = sys.argv, io.StringIO()
    try:
        for name, function in replaced.items():
            setattr(entry_point, name, function)
        sys.argv = [module, *arguments]
        with contextlib.redirect_stderr(errors), contextlib.chdir(REPOSITORY):
            main = importlib.import_module(module).main
            main()
        return "it did not come to its training"
    except _Parsed:
        return ""
    except FileNotFoundError as error:
        _make_all(importlib.import_module(f"{ENTRY_POINTS[module]}.training.model_args"))
        return "" if "prepare it with" in str(error) else str(error)
    except SystemExit:
        return errors.getvalue()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sys.argv = argv
        for name, function in kept.items():
            setattr(entry_point, name, function)


def in_folder(folder: Path, check: Any, *args: Any) -> Any:
    """`check(*args)` where it may leave files."""
    with contextlib.chdir(folder):
        return check(*args)
