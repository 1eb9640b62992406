"""Public names of a package, imported when they are first used.

Importing one module of such a package imports no other. Planning needs only numbers, so `balance-advisor`
plans even if neither torch nor TorchRec is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def imported_on_use(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], list[str]]:
    """Returns `__getattr__` and `__all__` of a package. `names` has the public names of each module."""
    module_of = {name: module for module, names_of_module in names.items() for name in names_of_module}

    def __getattr__(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return __getattr__, list(module_of)
