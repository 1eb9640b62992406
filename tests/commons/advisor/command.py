from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commons.advisor.__main__ import main

MODEL = ["--model", "hstu", "--hidden-size", "64", "--num-layers", "2", "--num-heads", "2"]


def heavy_tailed(count: int) -> np.ndarray:
    return np.random.default_rng(3).lognormal(4, 1.2, count).clip(0, 2000).astype(np.int64)


def saved(folder: Path, lengths: np.ndarray) -> str:
    path = folder / "lengths.npy"
    np.save(path, lengths)
    return str(path)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_name(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {strategy["name"]: strategy for strategy in case["strategies"]}
