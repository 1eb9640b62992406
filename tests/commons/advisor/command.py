import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import gin
import numpy as np

from tests.commons.advisor.internals import main

REPOSITORY = Path(__file__).parents[3]
MODEL = ["--model", "hstu", "--hidden-size", "64", "--num-layers", "2", "--num-heads", "2"]


def heavy_tailed(count: int) -> np.ndarray:
    return np.random.default_rng(3).lognormal(4, 1.2, count).clip(0, 2000).astype(np.int64)


def advise(folder: Path, lengths: Any, *arguments: str, model: list[str] = MODEL) -> dict[str, Any]:
    """The JSON output on lengths that are saved in `folder`."""
    np.save(folder / "lengths.npy", lengths)
    return advise_on(folder / "lengths.npy", *arguments, model=model)


def advise_on(path: Path, *arguments: str, model: list[str] = MODEL) -> dict[str, Any]:
    """The JSON output on a file."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([str(path), *model, *arguments, "--json"]) == 0
    return json.loads(out.getvalue())


def by_name(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {strategy["name"]: strategy for strategy in case["strategies"]}


def advise_on_gin_file(path: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; for a process that imports one application alone."""
    os.chdir(REPOSITORY)
    gin.clear_config()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([str(path), "--ranks", "2", "--json"])
    return code, out.getvalue(), err.getvalue()
