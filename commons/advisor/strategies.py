"""The ways to balance that the advisor compares, by the settings that training takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import Any

from ..distributed.placement import compile_placement
from ..distributed.shuffler_settings import ShufflerSettings

AS_LOADED, REFINED, REBALANCE = "as_loaded", "refined", "rebalance"
REBALANCE_GROUPS = "rebalance_groups"
PIECES = "pieces"
KARMARKAR_KARP = "karmarkar_karp"
# Settings that a strategy decides, `balance_<name>` in `TrainerArgs`. Others, such as limits of tokens, are
# the user's.
CHOSEN = ("partitioner", "equal_rows", "split")
# The value of `balance_cost` with which training learns costs, and the default of a setting for these alone.
LEARNED, SPEED_LIMIT = "learned", 2.0
# Modules of extensions that need numpy and numba alone, and compile what they need.
_SEARCHES = {"pieces": "cut_search", "sample_groups": "group_column"}
_EXTENSIONS = f"{__package__.rpartition('.')[0]}.extensions"


@dataclass(frozen=True)
class Strategy:
    """A way to place samples.

    Attributes:
        name: name in the JSON output.
        title: title in tables.
        settings: settings of the shuffler; None leaves every sample on the rank that loaded it.
        balance_cost: the setting of the cost to balance by; None for FLOPs.
        cuts_samples: whether samples are cut into pieces.
        group_feature: the extension whose samples stay together; None for no groups.
    """

    name: str
    title: str
    settings: ShufflerSettings | None = None
    balance_cost: str | None = None
    cuts_samples: bool = False
    group_feature: str | None = None

    @property
    def extension(self) -> str | None:
        """The extension that the strategy needs; None if it needs none."""
        if self.cuts_samples:
            return "pieces"
        return None if self.group_feature is None else "sample_groups"

    @property
    def is_missing(self) -> bool:
        """Whether the extension that the strategy needs has been deleted."""
        try:
            self._import_extension()
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(_EXTENSIONS):
                raise
            return True
        return False

    def warm_up(self) -> None:
        """Compiles what the strategy calls, so that no time of planning includes it."""
        if self.settings is None:
            return
        compile_placement(self.settings)
        extension = self._import_extension()
        if extension is not None:
            extension.compile_search()

    def _import_extension(self) -> ModuleType | None:
        if self.extension is None:
            return None
        return import_module(f"{_EXTENSIONS}.{self.extension}.{_SEARCHES[self.extension]}")

    def gin_lines(self, present: Mapping[str, object]) -> list[str]:
        """Returns the lines to switch the strategy on that a gin file with settings `present` lacks."""
        if self.settings is None:
            return []
        chosen = (self.settings.partitioner, self.settings.equal_rows, self.cuts_samples)
        wanted = dict(zip(CHOSEN, chosen, strict=True))
        wanted = {name: value for name, value in wanted.items() if f"balance_{name}" in present}
        needed = {"cost": self.balance_cost, **self._changed(), "group_feature": self.group_feature}
        needed["split"] = self.cuts_samples or None
        wanted |= {name: value for name, value in needed.items() if value is not None}
        lines = {"enable_balanced_shuffler": True} | {f"balance_{name}": wanted[name] for name in wanted}
        # What the file has, and the strategy excludes.
        undone: dict[str, object] = {"max_tokens_per_micro_batch": None} if self.cuts_samples else {}
        if self.group_feature is None and not self.settings.takes("groups"):
            undone["balance_group_feature"] = None
        if self.balance_cost not in (None, LEARNED):
            undone["balance_speed_limit"] = SPEED_LIMIT
        lines |= {name: value for name, value in undone.items() if name in present}
        return [f"TrainerArgs.{name} = {lines[name]!r}" for name in lines if present.get(name) != lines[name]]

    @property
    def python(self) -> str | None:
        """The argument for the pipeline of a program of one's own; None without balancing."""
        if self.settings is None:
            return None
        given = {name: repr(value) for name, value in self._changed().items()}
        if self.balance_cost not in (None, LEARNED):
            given = {"cost": f"Cost.load({self.balance_cost!r})"} | given
        extensions = ["LearnedCosts()"] if self.balance_cost == LEARNED else []
        if self.group_feature is not None:
            extensions.append(f"SampleGroups({self.group_feature!r})")
        if self.cuts_samples:
            extensions.append("Pieces()")
        if extensions:
            given["extensions"] = f"[{', '.join(extensions)}]"
        return f"batch_shuffler=MyShuffler({', '.join(f'{name}={value}' for name, value in given.items())})"

    def _changed(self) -> dict[str, object]:
        """Returns the settings that differ from their defaults."""
        return {
            spec.name: value
            for spec in fields(ShufflerSettings)
            if (value := getattr(self.settings, spec.name)) != spec.default
        }


def strategies(balance_cost: str | None, group_column: str | None = None) -> list[Strategy]:
    """Returns all strategies, as loaded first, by a cost and by the samples' groups where there are any."""

    def balanced(name: str, title: str, settings: ShufflerSettings, **extension: Any) -> Strategy:
        return Strategy(name, title, settings, balance_cost, **extension)

    compared = [
        Strategy(AS_LOADED, "as loaded"),
        balanced(KARMARKAR_KARP, "Karmarkar–Karp", ShufflerSettings("karmarkar_karp")),
        balanced(REFINED, "refined", ShufflerSettings("refined")),
        balanced(REBALANCE, "rebalance (default)", ShufflerSettings()),
    ]
    if group_column is not None:
        settings = ShufflerSettings()
        compared.append(balanced(REBALANCE_GROUPS, "rebalance, groups", settings, group_feature=group_column))
    # Refined spreads what pieces fetch more evenly.
    settings = ShufflerSettings("refined", equal_rows=False)
    return [*compared, balanced(PIECES, "pieces", settings, cuts_samples=True)]
