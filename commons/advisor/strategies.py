"""The strategies that the advisor compares, expressed in the settings of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module

from ..distributed.placement import warm_up
from ..distributed.settings import ShufflerSettings

AS_LOADED, REFINED, REBALANCE = "as_loaded", "refined", "rebalance"
PIECES = "pieces"
KARMARKAR_KARP = "karmarkar_karp"
# Settings that a strategy decides, `balance_<name>` in `TrainerArgs`. The user decides all others, such as
# token limits.
CHOSEN = ("partitioner", "equal_rows", "split")
# `balance_cost` for learned costs, and the default of `balance_speed_limit`, which only learned costs use.
LEARNED, SPEED_LIMIT = "learned", 2.0


@dataclass(frozen=True)
class Strategy:
    """A way to place samples.

    Attributes:
        name: name in the JSON output.
        title: title in tables.
        settings: settings of the shuffler; None leaves every sample on the rank that loaded it.
        balance_cost: value of the setting `balance_cost`; None for FLOPs.
        cuts_samples: whether samples are cut into pieces.
    """

    name: str
    title: str
    settings: ShufflerSettings | None = None
    balance_cost: str | None = None
    cuts_samples: bool = False

    def warm_up(self) -> None:
        """Compiles the functions that the strategy calls, so that planning times exclude compilation."""
        if self.settings is not None:
            warm_up(self.settings)
        if self.cuts_samples:
            from ..extensions.pieces.cut_search import compile_search

            compile_search()

    def gin_lines(self, present: Mapping[str, object]) -> list[str]:
        """Returns the lines that a gin file with the settings `present` lacks to switch the strategy on."""
        if self.settings is None:
            return []
        chosen = (self.settings.partitioner, self.settings.equal_rows, self.cuts_samples)
        wanted = dict(zip(CHOSEN, chosen, strict=True))
        wanted = {name: value for name, value in wanted.items() if f"balance_{name}" in present}
        needed = {"cost": self.balance_cost, **self._changed(), "split": self.cuts_samples or None}
        wanted |= {name: value for name, value in needed.items() if value is not None}
        lines = {"enable_balanced_shuffler": True} | {f"balance_{name}": wanted[name] for name in wanted}
        # Values that undo settings which the strategy excludes, if the file has them.
        undone: dict[str, object] = {"max_tokens_per_micro_batch": None} if self.cuts_samples else {}
        if self.settings.partitioner != REBALANCE:
            undone["balance_group_feature"] = None
        if self.balance_cost not in (None, LEARNED):
            undone["balance_speed_limit"] = SPEED_LIMIT
        lines |= {name: value for name, value in undone.items() if name in present}
        return [f"TrainerArgs.{name} = {lines[name]!r}" for name in lines if present.get(name) != lines[name]]

    @property
    def python(self) -> str | None:
        """The pipeline's argument in a program of your own; None without balancing."""
        if self.settings is None:
            return None
        given = {name: repr(value) for name, value in self._changed().items()}
        if self.balance_cost not in (None, LEARNED):
            given = {"cost": f"Cost.load({self.balance_cost!r})"} | given
        extensions = ["LearnedCosts()"] if self.balance_cost == LEARNED else []
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


def has_extension(name: str) -> bool:
    """Returns whether the folder of an extension is there, as it need not be."""
    try:
        import_module(f"{__package__.rpartition('.')[0]}.extensions.{name}")
    except ModuleNotFoundError:
        return False
    return True


def strategies(balance_cost: str | None) -> list[Strategy]:
    """Returns all strategies, as loaded first. Without its extension, "pieces" is left out."""
    compared = [
        Strategy(AS_LOADED, "as loaded"),
        Strategy(KARMARKAR_KARP, "Karmarkar–Karp", ShufflerSettings("karmarkar_karp"), balance_cost),
        Strategy(REFINED, "refined", ShufflerSettings("refined"), balance_cost),
        Strategy(REBALANCE, "rebalance (default)", ShufflerSettings(), balance_cost),
    ]
    if has_extension("pieces"):
        # "refined" spreads the fetches of pieces more evenly than "rebalance".
        settings = ShufflerSettings("refined", equal_rows=False)
        compared.append(Strategy(PIECES, "pieces", settings, balance_cost, cuts_samples=True))
    return compared
