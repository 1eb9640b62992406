"""The functions that are compiled when a shuffler starts, and by the placing after it."""

import json
import subprocess
import sys
import tempfile
from typing import Any

from numba.core.dispatcher import Dispatcher

from tests.rank_server import forked_python

# In a process of its own, because the tests' processes have compiled everything.
PROGRAM = """
import json, sys
from dataclasses import replace
import numpy as np
from commons.distributed.plan import RowTable
from commons.distributed.placement import arguments_of, place, warm_up
from commons.distributed.settings import ShufflerSettings
from tests.commons.distributed.compiled_kernels import compiled

settings, extensions = ShufflerSettings(**json.loads(sys.argv[1])), []
SETUP
warm_up(settings, extensions)
before, rng = compiled(), np.random.default_rng(0)
for num_loaded in ([8] * 8, [40, 0, 3], [9, 8, 8], [600, 0, 0, 0, 0]):
    for spread in (0.1, 1, 3):
        rows = np.array(num_loaded)
        tokens = rng.lognormal(3, spread, rows.sum()).clip(1, 99).astype(np.int64)
        each = tokens[:, None]
        samples = RowTable(rows, rows, tokens**2, tokens, tokens, each, tokens, each, columns=COLUMNS)
        samples = replace(samples, arguments=arguments_of(extensions))
        for speeds in (None, 1 + rng.random(len(rows))):
            plan = place(replace(samples, speeds=speeds, ranks_per_node=2), settings)
            THEN
print(json.dumps([before, compiled()]))
"""


def compiled() -> list[str]:
    """Returns the compiled functions of partitioning and of extensions, once for each signature."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("commons.partition", "commons.extensions"))
    ]
    found = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, Dispatcher)}
    return sorted(f.__name__ for f in found.values() for _ in f.signatures)


def before_and_after_placing(
    setup: str = "", columns: str = "{}", then: str = "pass", **settings: Any
) -> list[list[str]]:
    """Returns what is compiled after the warm-up, and after steps.

    `setup` makes `extensions`; `columns` is an expression of the `tokens`; and `then` follows placing.
    """
    program = PROGRAM.replace("SETUP", setup).replace("COLUMNS", columns).replace("THEN", then)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        command = [*forked_python(fresh=True), file.name, json.dumps(settings)]
        process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)
