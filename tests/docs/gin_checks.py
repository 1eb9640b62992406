"""Checks of gin text and command lines, in a process that has the configurables of one model only."""

import contextlib
import importlib
import io
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gin
import torch

from commons.datasets import BenchmarkDatasetArgs
from commons.datasets.gin_values import from_gin
from commons.training import OptimizerArgs, TensorModelParallelArgs, TrainerArgs, entry_point
from tests.docs.pages import REPOSITORY

# Files that a gin block may extend. Each model has its own NetworkArgs.
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
# Modules that a block imports in place of a user's own.
_USERS_MODULES = ("my_module",)


def problems_of_gin_text(model: str, text: str, folder: Path) -> list[str]:
    """Returns the problems of a block on each base of its model in a folder; empty if it fits one of them."""
    for name in _USERS_MODULES:
        sys.modules.setdefault(name, types.ModuleType(name))
    problems = []
    for base in BASES[model]:
        gin.clear_config()
        try:
            args = importlib.import_module(f"{model}.training.model_args")
            gin.parse_config((REPOSITORY / base).read_text())
            gin.parse_config(text)
            with contextlib.chdir(folder):
                _make_all(args)
            return []
        except Exception as error:
            problems.append(f"on {base}: {type(error).__name__}: {error}")
    return problems


def _make_all(args: Any) -> None:
    """Creates every configured instance, each of which checks its values."""
    names = ("DatasetArgs", "NetworkArgs", "RankingArgs", "RetrievalArgs")
    of_model = [getattr(args, name) for name in names if hasattr(args, name)]
    configured = set(re.findall(r"^(\w+)\.", gin.config_str(), re.MULTILINE))
    for each in (TrainerArgs, OptimizerArgs, TensorModelParallelArgs, BenchmarkDatasetArgs, *of_model):
        if each.__name__ in configured:
            from_gin(each)


class _Parsed(Exception):
    """Raised where the run would begin."""


def problem_of_command(module: str, arguments: list[str]) -> str:
    """Runs an entry point until training would begin. Returns what went wrong before, or an empty string.

    Missing data is no problem if the message has the command that prepares it.
    """

    @contextlib.contextmanager
    def here() -> Iterator[torch.device]:
        yield torch.device("cpu")

    def stop(*_: Any) -> Any:
        raise _Parsed

    gin.clear_config()
    errors, main = io.StringIO(), importlib.import_module(module).main
    try:
        with (
            mock.patch.multiple(entry_point, rank_process=here, train=stop, check_equal=stop),
            mock.patch.object(sys, "argv", [module, *arguments]),
            contextlib.redirect_stderr(errors),
            contextlib.chdir(REPOSITORY),
        ):
            main()
        return "it never reached its training"
    except _Parsed:
        return ""
    except FileNotFoundError as error:
        _make_all(importlib.import_module(f"{ENTRY_POINTS[module]}.training.model_args"))
        return "" if "prepare it with" in str(error) else str(error)
    except SystemExit:
        return errors.getvalue()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
