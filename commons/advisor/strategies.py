"""The ways to balance that the advisor compares, by the settings that training takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..distributed.shuffler_settings import LEARNED, ShufflerSettings

AS_LOADED, REFINED, REBALANCE = "as_loaded", "refined", "rebalance"
REBALANCE_GROUPS = "rebalance_groups"
SPLIT = "split"
KARMARKAR_KARP = "karmarkar_karp"
# Settings that a strategy decides. Others, such as limits of tokens, are the user's.
CHOSEN = ("partitioner", "equal_rows", "split")


@dataclass(frozen=True)
class Strategy:
    """A way to place samples.

    Attributes:
        name: in the JSON output.
        title: in tables.
        settings: of the shuffler; None leaves every sample on the rank that loaded it.
        balance_cost: the setting of the cost to balance by; None for FLOPs.
    """

    name: str
    title: str
    settings: ShufflerSettings | None = None
    balance_cost: str | None = None

    @property
    def splits(self) -> bool:
        """Whether samples are cut into pieces."""
        return self.settings is not None and self.settings.split

    def gin_lines(self, present: Mapping[str, object]) -> list[str]:
        """Returns the lines that a gin file lacks to switch the strategy on.

        Args:
            present: the settings of `TrainerArgs` that the file has; the others have their defaults.
        """
        if self.settings is None:
            return []
        wanted = {f"balance_{name}": getattr(self.settings, name) for name in CHOSEN}
        wanted = {name: value for name, value in wanted.items() if name in present}
        wanted |= {f"balance_{name}": value for name, value in self._changed().items()}
        lines = {"enable_balanced_shuffler": True, **wanted}
        unset = object()
        return [
            f"TrainerArgs.{name} = {value!r}"
            for name, value in lines.items()
            if present.get(name, unset) != value
        ]

    @property
    def python(self) -> str | None:
        """The argument for the pipeline of a program of one's own; None without balancing."""
        if self.settings is None:
            return None
        given = {name: repr(value) for name, value in self._changed().items()}
        if self.balance_cost not in (None, LEARNED):
            given["cost"] = f"Cost.load({given['cost']})"
        return f"batch_shuffler=MyShuffler({', '.join(f'{name}={value}' for name, value in given.items())})"

    def _changed(self) -> dict[str, object]:
        """Returns the cost, and the settings that differ from their defaults."""
        changed = {} if self.balance_cost is None else {"cost": self.balance_cost}
        settings = {
            spec.name: (getattr(self.settings, spec.name), spec.default) for spec in fields(ShufflerSettings)
        }
        return changed | {name: value for name, (value, default) in settings.items() if value != default}


def strategies(balance_cost: str | None, group_column: str | None = None) -> list[Strategy]:
    """Returns all strategies, as loaded first.

    Args:
        balance_cost: the setting of the cost to balance by; None for FLOPs.
        group_column: the name of the samples' groups; None if they have none.
    """
    settings = {
        (KARMARKAR_KARP, "Karmarkar–Karp"): ShufflerSettings(partitioner="karmarkar_karp"),
        (REFINED, "refined"): ShufflerSettings(partitioner="refined"),
        (REBALANCE, "rebalance (default)"): ShufflerSettings(),
    }
    if group_column is not None:
        settings[REBALANCE_GROUPS, "rebalance, groups"] = ShufflerSettings(group_feature=group_column)
    # Refined spreads what pieces fetch more evenly.
    settings[SPLIT, "pieces (split)"] = ShufflerSettings("refined", equal_rows=False, split=True)
    balanced = [Strategy(*names, of_strategy, balance_cost) for names, of_strategy in settings.items()]
    return [Strategy(AS_LOADED, "as loaded"), *balanced]
