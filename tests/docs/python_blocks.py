"""Runs the Python blocks of a page in one process of a pool."""

import importlib
import sys
import traceback
import types
from collections.abc import Sequence

import torch

from commons.datasets import DatasetFactory
from commons.distributed import PARTITIONERS, BatchShufflerFactory
from tests.docs.pages import Block


def run_page(prelude: str | None, blocks: Sequence[Block]) -> str:
    """Runs blocks of a page in one namespace, with names of a prelude; returns the first traceback."""
    registered = {factory: factory.list_available() for factory in (BatchShufflerFactory, DatasetFactory)}
    partitioners = set(PARTITIONERS)
    # A module, because ranks unpickle batches of a class that the page defines.
    page = types.ModuleType("docs_page")
    sys.modules["docs_page"] = page
    names = page.__dict__
    random_state = torch.get_rng_state()
    try:
        if prelude is not None:
            name = f"tests.docs.preludes.{prelude}"
            given = importlib.import_module(name)
            names.update({name: value for name, value in vars(given).items() if not name.startswith("__")})
        for block in blocks:
            # This process has imported a checkout. Line numbers in tracebacks are those of the page.
            code = block.code.replace("workload_balancer", "commons")
            exec(compile("\n" * block.line + code, block.page, "exec"), names)
    except Exception:
        return traceback.format_exc()
    finally:
        torch.set_rng_state(random_state)
        for name in set(PARTITIONERS) - partitioners:
            del PARTITIONERS[name]
        for factory, before in registered.items():
            for name in set(factory.list_available()) - set(before):
                factory.unregister(name)
    return ""
