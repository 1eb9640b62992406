"""Tests that run on several ranks at once."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any


def on_ranks(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that runs on each of so many ranks; its arguments have to pickle."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        def test(pools: Any, **arguments: Any) -> None:
            pools(num_ranks).run(_on_rank, function.__module__, function.__name__, arguments)

        test.__module__, test.__name__, test.__doc__ = (
            function.__module__,
            function.__name__,
            function.__doc__,
        )
        pools_parameter = inspect.Parameter("pools", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature([pools_parameter, *parameters])  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorated


def _on_rank(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).on_rank(**arguments)
