"""A shuffler compiles at its start all that its settings reach, and nothing that only others do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.torchrun import ENVIRONMENT, REPOSITORY

# In a process of its own, because the tests' processes have compiled everything.
PROGRAM = """
import json, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from commons.distributed.loaded_samples import LoadedSamples
from commons.distributed.placement import divide, place, warm_up
from commons.distributed.shuffler_settings import ShufflerSettings

def compiled():
    modules = [module for name, module in sys.modules.items() if name.startswith("commons.partition")]
    found = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, Dispatcher)}
    return sorted(f.__name__ for f in found.values() for _ in f.signatures)

settings = ShufflerSettings(**json.loads(sys.argv[1]))
warm_up(settings)
before, rng = compiled(), np.random.default_rng(0)
for num_loaded in ([8] * 8, [40, 0, 3], [9, 8, 8], [600, 0, 0, 0, 0]):
    for spread in (0.1, 1, 3):
        rows = np.array(num_loaded)
        tokens = rng.lognormal(3, spread, rows.sum()).clip(1, 99).astype(np.int64)
        each = tokens[:, None]
        groups = None if settings.group_feature is None else tokens % 9
        samples = LoadedSamples(rows, rows, tokens**2, tokens, tokens, each, tokens, each, groups=groups)
        for speeds in (None, 1 + rng.random(len(rows))):
            plan = place(samples, settings, 2, speeds=speeds)
            if settings.max_tokens_per_micro_batch is not None:
                divide(plan, settings.max_tokens_per_micro_batch)
print(json.dumps([before, compiled()]))
"""


def _before_and_after_placing(**settings) -> list[list[str]]:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"equal_rows": False, "max_tokens": 20_000},
        {"partitioner": "refined", "max_tokens_per_micro_batch": 100},
        {"partitioner": "longest_processing_time", "max_tokens": 20_000},
        {"partitioner": "karmarkar_karp"},
        {"group_feature": "user"},
    ],
)
def test_no_step_compiles(settings):
    before, after = _before_and_after_placing(**settings)
    assert before == after and len(before) > 4
    assert "_level" not in before  # pieces
    assert ("place_units" in before) == ("group_feature" in settings)
    assert ("search_to" in before) == ("partitioner" not in settings)
