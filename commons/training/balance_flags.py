"""The balancing flags of `TrainerArgs`: the shuffler's settings, and the extensions that flags enable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from .. import NAME
from ..checks import SettingError
from ..distributed.extension import Extension, order_extensions
from ..distributed.settings import ShufflerSettings

if TYPE_CHECKING:
    from .training_args import TrainerArgs

# Values of `balance_cost` that are not the name of a file.
FLOPS, LEARNED = "flops", "learned"

# The flags of each class, and the field or argument of the class that each flag sets, if any. A flag that
# differs from its default enables its extension, but `balance_cost` does so only if it is LEARNED.
SETS = {
    "distributed.ShufflerSettings": {
        "balance_partitioner": "partitioner",
        "balance_tolerance": "tolerance",
        "balance_equal_rows": "equal_rows",
        "balance_max_tokens": "max_tokens",
        "balance_token_tolerance": "token_tolerance",
        "balance_exchange": "exchange",
    },
    "extensions.learned_costs.LearnedCosts": {"balance_cost": "", "balance_speed_limit": "speed_limit"},
    "extensions.micro_batches.MicroBatches": {"max_tokens_per_micro_batch": "max_tokens"},
    "extensions.sample_groups.SampleGroups": {
        "balance_group_feature": "feature",
        "balance_moves_per_copy": "moves_per_copy",
    },
    "extensions.pieces.Pieces": {"balance_split": ""},
    "extensions.verification.Verification": {"balance_verify": ""},
}
CORE, *EXTENSIONS = SETS


def check_flags(args: TrainerArgs) -> None:
    """Checks all flags together.

    Raises:
        ValueError, ModuleNotFoundError: a flag is invalid, by itself or with others, or lacks its package.
    """
    with errors_name_flags():
        given = {argument: getattr(args, flag) for flag, argument in SETS[CORE].items()}
        settings = ShufflerSettings(**given)
        for extension in make_extensions(args):
            extension.check(settings)


def make_extensions(args: TrainerArgs, tells_groups: str = "") -> Sequence[Extension]:
    """Makes the extensions that flags enable.

    `tells_groups` names a shuffler's method that enables `SampleGroups`, for messages, or is empty.

    Raises:
        ValueError: a value is out of range, or extensions exclude each other. The message names the flags.
        ModuleNotFoundError: an extension's package is missing.
    """
    extensions, all_asked = [], []
    for part in EXTENSIONS:
        asked = [
            f"TrainerArgs.{flag} = {value!r}"
            for flag, value in args.changed()
            if flag in SETS[part] and (flag != "balance_cost" or value == LEARNED)
        ]
        if tells_groups and "balance_group_feature" in SETS[part]:
            asked.append(tells_groups)
        if asked:
            arguments = {argument: getattr(args, flag) for flag, argument in SETS[part].items() if argument}
            with errors_name_flags(part):
                extensions.append(_class_of(part, asked[0])(**arguments))
        all_asked += asked
    try:
        return order_extensions(extensions)
    except ValueError as error:
        raise ValueError(f"{', '.join(all_asked)}: {error}") from None


@contextmanager
def errors_name_flags(*parts: str) -> Iterator[None]:
    """Re-raises a `SettingError` as a ValueError that names the flags of `parts`, or of all parts."""
    searched = parts or (*EXTENSIONS, CORE)  # the core comes last, so that its names win
    flag_of = {argument: f"TrainerArgs.{flag}" for part in searched for flag, argument in SETS[part].items()}
    try:
        yield
    except SettingError as error:
        text = error.show(lambda name, value: f"{flag_of.get(name, name)} = {value!r}")
        raise ValueError(text) from None


def _class_of(part: str, reason: str) -> type[Extension]:
    module, _, name = f"{NAME}.{part}".rpartition(".")
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        found = None
    if found is None:  # a folder without files still imports
        raise ModuleNotFoundError(f"{reason} needs {module}, which is not installed", name=module)
    return found
