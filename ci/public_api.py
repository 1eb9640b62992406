"""Writes docs/api.md, the page of the public API's names and parameters: `python -m ci.public_api`.

A test compares the page with the code, so a change of the API shows as a change of the page.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import commons
from commons.distributed import BatchShuffler

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
PACKAGES = (
    *("sequence_batch", "partition", "distributed", "pipeline", "perf_model"),
    *("extensions.sample_groups", "extensions.padded", "extensions.pieces", "extensions.micro_batches"),
    *("extensions.learned_costs", "extensions.pieces.cut_rules", "extensions.unshuffle"),
    *("extensions.verification", "extensions.controller"),
    *("check_equal", "balance_meter", "first_cause", "datasets", "training", "unbounded_ids"),
)
# Methods of a `BatchShuffler` that only the stage calls. They may change.
OF_THE_STAGE = ("ahead", "exchange_rows", "plan_over")
INTRODUCTION = """\
# Public API

These names, their parameters and their defaults stay as they are in all versions 0.1.x. Anything else may
change in any version. What each does is in its docstring: `help(workload_balancer.partition.rebalance)`, for
example. A change of this page is a line in the [changelog](../CHANGELOG.md). `python -m ci.public_api` writes
the page, and a test compares it with the code.
"""


def make_page() -> str:
    """Returns the page as Markdown."""
    modules = {package: import_module(f"commons.{package}") for package in PACKAGES}
    public = [getattr(module, name) for module in modules.values() for name in _public_names(module)]
    lines = [INTRODUCTION]
    for package, module in modules.items():
        entries = [_entry(name, getattr(module, name), public) for name in sorted(_public_names(module))]
        lines += [f"## {package}", "", *entries, ""]
    return "\n".join(lines)


def _public_names(module: ModuleType) -> list[str]:
    """Returns the names that a module exports, or the public names that it defines if it has no `__all__`."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _entry(name: str, value: object, public: list[object]) -> str:
    """Returns a name's line, and a line for each member of a class that no other public class defines."""
    if not callable(value):
        return f"- `{name}`"
    lines = [f"- `{name}{_parameters(value)}`"]
    if inspect.isclass(value):
        lines += [f"  - `{member}`" for member in sorted(_members(value, public))]
    return "\n".join(lines)


def _members(of: type, public: list[object]) -> Iterator[str]:
    """Yields a class's methods and properties, except members of other libraries or public classes."""
    bases = [each for each in of.__mro__ if each.__module__.split(".")[0] == commons.__name__]
    own = [each for each in bases if each is of or each not in public]
    names = {name for each in own for name in vars(each) if not name.startswith("_")}
    if of is BatchShuffler:
        names -= {*OF_THE_STAGE}
    for name in names:
        member = inspect.getattr_static(of, name)
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if inspect.isfunction(member):
            yield f"{name}{_parameters(member)}"
        elif isinstance(member, property) or hasattr(member, "func"):  # a cached property has `func`
            yield name


def _parameters(function: object) -> str:
    """Returns the signature without types and without `self`."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except ValueError:  # some classes in C have no signature
        return "(…)"
    parameters = [
        each.replace(annotation=inspect.Parameter.empty, default=_shown(each.default))
        for name, each in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    return str(inspect.Signature(parameters))


class _Text:
    """A default value that is shown as this text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(default: object) -> object:
    """Returns a default, or "…" for an object whose text changes from process to process."""
    if default is inspect.Parameter.empty:
        return default
    return _Text("…") if " at 0x" in repr(default) or "factory" in repr(default) else default


if __name__ == "__main__":
    PAGE.write_text(make_page())
