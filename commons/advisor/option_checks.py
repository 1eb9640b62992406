"""Options of the command line that have no effect with the others."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import InputError
from .public_data import PUBLIC_DATA
from .samples import TOKEN_RULES

DIMENSIONS = ("hidden_size", "num_layers", "num_heads")
OPTIONAL_DIMENSIONS = ("head_dim", "mlp_size")
GIN = ".gin"


def option_of(name: str) -> str:
    """Returns the option that sets an attribute of the parsed arguments."""
    return "--" + name.replace("_", "-")


def check_options(given: argparse.Namespace) -> None:
    """Raises InputError for an unknown model, and for options that have no effect with the others."""
    model, is_named = given.model, given.model in TOKEN_RULES
    _check_data(given)
    if not (model is None or is_named or model.endswith(GIN)):
        raise InputError(f"--model {model}; expected one of {', '.join(TOKEN_RULES)}, or a gin file")
    for name in (*DIMENSIONS, *OPTIONAL_DIMENSIONS):
        if getattr(given, name) is not None and not is_named:
            models = "|".join(TOKEN_RULES)
            raise InputError(
                f"{option_of(name)} {getattr(given, name)} has no effect without --model {models}"
            )
    if model == "hstu" and given.mlp_size is not None:
        raise InputError(f"--mlp-size {given.mlp_size} has no effect: HSTU layers have no MLP")
    if given.cost is not None and given.tflops is not None:
        raise InputError(f"--tflops {given.tflops:g} has no effect with --cost, which has times already")
    if given.html is not None and given.html.is_dir():
        raise InputError(f"--html {given.html} is a folder; expected a file to write")
    if given.html is not None and not given.html.parent.is_dir():
        raise InputError(f"--html {given.html}: folder {given.html.parent} does not exist; create it first")
    for name in ("data", "model", "cost"):
        read = getattr(given, name)
        if given.html is not None and read is not None and _is_same_file(given.html, Path(read)):
            raise InputError(f"--html {given.html} would overwrite {read}, which is read; name another file")
    if given.data is None or given.data.suffix != GIN:
        return
    if model is not None and not is_named:
        raise InputError(f"--model {model}: {given.data} has a model; expected dimensions, or no --model")
    for name in ("column", "ids", "groups", "tokens_per_item", "extra_tokens"):
        if getattr(given, name) is not None:
            raise InputError(
                f"{option_of(name)} {getattr(given, name)} has no effect: {given.data} defines its samples"
            )


def _check_data(given: argparse.Namespace) -> None:
    """Raises InputError unless there is one source of lengths, with options that have an effect."""
    name = given.lengths_of
    if name is None:
        if given.data is None:
            raise InputError("no data; expected a file of lengths, or --lengths-of " + "|".join(PUBLIC_DATA))
        if given.max_length is not None:
            raise InputError(f"--max-length {given.max_length} has no effect without --lengths-of")
        return
    if name not in PUBLIC_DATA:
        raise InputError(f"--lengths-of {name}; expected one of {', '.join(PUBLIC_DATA)}")
    if given.data is not None:
        raise InputError(f"--lengths-of {name} and {given.data} both have lengths; expected one of them")
    for option in ("column", "ids", "groups"):
        if getattr(given, option) is not None:
            raise InputError(f"{option_of(option)} {getattr(given, option)} has no effect with --lengths-of")


def _is_same_file(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.samefile(second)
