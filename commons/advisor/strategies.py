"""The ways to balance that the advisor compares, by the settings that training takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from commons.distributed.shuffler_settings import ShufflerSettings

AS_LOADED, REFINED, REBALANCE, WINDOW = "as_loaded", "refined", "rebalance", "window"
REBALANCE_GROUPS = "rebalance_groups"
SPLIT = "split"
KARMARKAR_KARP = "karmarkar_karp"


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
    def window(self) -> int:
        """Steps that are placed together."""
        return 1 if self.settings is None else self.settings.window

    @property
    def splits(self) -> bool:
        """Whether samples are cut into pieces."""
        return self.settings is not None and self.settings.split

    def gin_lines(self, rows_per_rank: int) -> list[str]:
        """Returns the lines of a gin file that switch the strategy on."""
        values: dict[str, object] = {"train_batch_size": rows_per_rank}
        if self.settings is not None:
            values["enable_balanced_shuffler"] = True
            if self.balance_cost is not None:
                values["balance_cost"] = self.balance_cost
            for setting in fields(self.settings):
                value = getattr(self.settings, setting.name)
                # The partitioner always, because the gin file may have another one.
                if setting.name == "partitioner" or value != setting.default:
                    values[f"balance_{setting.name}"] = value
        return [f"TrainerArgs.{name} = {value!r}" for name, value in values.items()]


def strategies(
    window: int, balance_cost: str | None, splits: bool, group_column: str | None = None
) -> list[Strategy]:
    """Returns all strategies, as loaded first.

    Args:
        window: steps of a window; 1 for no such strategy.
        balance_cost: the setting of the cost to balance by; None for FLOPs.
        splits: whether to compare pieces of samples.
        group_column: the name of the samples' groups; None if they have none.
    """
    settings = {
        (KARMARKAR_KARP, "Karmarkar–Karp"): ShufflerSettings(partitioner="karmarkar_karp"),
        (REFINED, "refined"): ShufflerSettings(partitioner="refined"),
        (REBALANCE, "rebalance (default)"): ShufflerSettings(),
    }
    if group_column is not None:
        settings[REBALANCE_GROUPS, "rebalance, groups"] = ShufflerSettings(group_feature=group_column)
    if splits:
        # Refined spreads what pieces fetch more evenly.
        settings[SPLIT, "pieces (split)"] = ShufflerSettings("refined", equal_rows=False, split=True)
    if window > 1:
        settings[WINDOW, f"window of {window} *"] = ShufflerSettings(window=window)
    balanced = [Strategy(*names, of_strategy, balance_cost) for names, of_strategy in settings.items()]
    return [Strategy(AS_LOADED, "as loaded"), *balanced]
