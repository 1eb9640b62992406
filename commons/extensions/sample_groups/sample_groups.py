"""Brings the samples of a group to one rank, so that their shared ids are looked up once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...checks import SettingError, require_type
from ...distributed.extension import Extension, Place
from ...distributed.placement import make_plan, place_rows
from ...distributed.plan import RowTable, ShufflePlan
from ...distributed.settings import ShufflerSettings
from ...sequence_batch import BaseBatch
from .groups import COLUMN, MOST_MOVES, MOVES_PER_COPY, compile_search, number_groups, rebalance_groups

if TYPE_CHECKING:
    from ...distributed.shuffler import BatchShuffler

GetGroups = Callable[[Any], torch.Tensor]


class SampleGroups(Extension):
    """Brings the samples of a group to one rank, if balance and limits allow it; with `strict`, always.

    Rows are placed by `rebalance_groups`, for which the settings say `partitioner="rebalance"`, the default,
    or by a partitioner of your own that takes `groups`. With `strict`, any partitioner places whole groups.
    A listwise loss over a session, or over pairs, needs `strict`: rows of one group then meet on one rank.

    Args:
        feature: name of a feature of a `BaseBatch`, such as the user's id. Samples with the same first value
            belong together. If one rank has them all, their shared ids are looked up once. An empty row
            belongs to no group.
        get_groups: function that returns the group of each row of a host batch, int64 or int32
            `[batch_size]`. A negative number means no group. If neither this nor `feature` is given, the
            shuffler must have a method of this name.
        moves_per_copy: value of having a group on one rank fewer, in moves of the group's largest sample. It
            is the bytes of embeddings and gradients that ranks exchange per id, over all tables, ÷ the bytes
            of a sample per id. The default of 64 suits one table of 128 float32, with an action per id.
        strict: whether groups never divide. This needs `equal_rows=False`, and neither `Pieces` nor
            `MicroBatches`. A group with more than `max_tokens` is an error on all ranks.

    Raises:
        TypeError: an argument has the wrong type, or both `feature` and `get_groups` are given.
        ValueError: `moves_per_copy` is out of range. When a shuffler is made: the partitioner takes no
            groups, or there is no source of groups; or rows are equal and groups strict.
    """

    name = "sample_groups"
    order = 25  # around `Pieces`, which places rows by the partitioner that this extension gives them

    def __init__(
        self,
        feature: str | None = None,
        *,
        get_groups: GetGroups | None = None,
        moves_per_copy: float = MOVES_PER_COPY,
        strict: bool = False,
    ) -> None:
        require_type("SampleGroups.feature", feature, str | None)
        require_type("SampleGroups.moves_per_copy", moves_per_copy, float)
        require_type("SampleGroups.strict", strict, bool)
        if feature is not None and get_groups is not None:
            raise TypeError(f"SampleGroups got feature={feature!r} and get_groups; expected one of them")
        if not 0 <= moves_per_copy <= MOST_MOVES:
            raise SettingError(
                f"{{moves_per_copy}}: expected a number from 0 to {MOST_MOVES:g}",
                moves_per_copy=moves_per_copy,
            )
        self.feature, self.moves_per_copy, self._given = feature, moves_per_copy, get_groups
        self.strict = strict
        if strict:
            self.excludes = {name: "strict groups do not divide" for name in ("pieces", "micro_batches")}
        else:
            self.partitioner_arguments = {"moves_per_copy": moves_per_copy}

    def settings(self) -> Mapping[str, Any]:
        """Returns the arguments that are plain data."""
        return {"feature": self.feature, "moves_per_copy": self.moves_per_copy, "strict": self.strict}

    def check(self, settings: ShufflerSettings) -> None:
        """Checks that the partitioner takes groups, or that strict ones may have any number of rows."""
        if self.strict and settings.equal_rows:
            raise SettingError(
                "{equal_rows}: SampleGroups(strict=True) needs equal_rows=False, because groups differ in "
                "their numbers of rows",
                equal_rows=True,
            )
        # A partitioner of the user's gets the groups as a column.
        self._partitioner = rebalance_groups if settings.partitioner == "rebalance" else None
        takes = partial(settings.takes, instead=self._partitioner)
        if self.moves_per_copy != MOVES_PER_COPY and not takes("moves_per_copy"):
            raise SettingError(
                f"{{moves_per_copy}} has no effect on {{partitioner}}: leave it {MOVES_PER_COPY:g}",
                moves_per_copy=self.moves_per_copy,
                partitioner=settings.partitioner,
            )
        if not (self.strict or takes(COLUMN)):
            given = "" if self.feature is None else "{feature}: "
            raise SettingError(
                f"{given}{{partitioner}} has no argument groups; choose another partitioner, such as "
                '"rebalance"',
                feature=self.feature,
                partitioner=settings.partitioner,
            )

    def setup(self, shuffler: BatchShuffler) -> None:
        """Finds the source of the groups."""
        self._view, self._settings = shuffler.view, shuffler.settings
        own = getattr(shuffler, "get_groups", None)
        self._whose = f"{type(shuffler).__name__}.get_groups"
        if own is not None and self.feature is not None:
            raise SettingError(
                f"{{feature}} has no effect, because {self._whose} returns the groups; leave it out",
                feature=self.feature,
            )
        if self._given is not None:
            self._whose = "get_groups"
        self._get_groups = self._given or own or self._read_feature
        if self._get_groups == self._read_feature and self.feature is None:
            raise SettingError(
                "SampleGroups({feature}, {moves_per_copy}) does not know the groups: name a feature, give it "
                f"get_groups=, or {type(shuffler).__name__} a method get_groups",
                feature=None,
                moves_per_copy=self.moves_per_copy,
            )

    def warm_up(self) -> None:
        """Compiles the search that places groups."""
        compile_search()

    def columns(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Returns the group of each row, int64 `[batch_size]`. A ValueError if they are no such tensor."""
        groups = self._get_groups(batch)
        shape, is_tensor = (self._view(batch).num_rows,), isinstance(groups, torch.Tensor)
        if not is_tensor or groups.shape != shape or groups.dtype not in (torch.int32, torch.int64):
            kind = f"{groups.dtype} of {tuple(groups.shape)}" if is_tensor else type(groups).__name__
            raise ValueError(f"{self._whose} returned {kind}; expected an int64 or int32 tensor of {shape}")
        return {COLUMN: groups.detach().cpu().long()}

    def place(self, rows: RowTable, place: Place) -> ShufflePlan:
        """Places rows, or strict groups as if each was one row. A ValueError on every rank if a strict group
        is above `max_tokens`."""
        if not self.strict or rows.num_ranks == 1:
            return place(replace(rows, partitioner=self._partitioner))
        group_of = number_groups(rows.columns[COLUMN], len(rows.workloads))
        most = self._settings.max_tokens
        for group in np.flatnonzero(np.bincount(group_of, rows.tokens) > (most or np.inf))[:1]:
            number = int(rows.columns[COLUMN][group_of == group][0])
            raise ValueError(
                f"group {number} has {rows.tokens[group_of == group].sum()} tokens, above max_tokens={most}, "
                "and strict groups do not divide: raise the limit, or truncate histories"
            )
        groups, order = _as_rows(rows, group_of)
        rank_of = np.empty(len(order), dtype=np.int64)
        rank_of[order] = place_rows(groups, self._settings)
        return make_plan(rows, rank_of[group_of])

    def _read_feature(self, batch: BaseBatch) -> torch.Tensor:
        ids = batch.features[self.feature]
        values, lengths = ids.values(), ids.lengths().long()
        if values.is_floating_point():
            raise ValueError(f"feature={self.feature!r} has {values.dtype} values, expected integers")
        has_group, starts = lengths > 0, lengths.cumsum(0) - lengths
        groups = torch.full_like(lengths, -1)
        # Ids such as hashes may be negative, but a negative group means none.
        groups[has_group] = values[starts[has_group]].long() & torch.iinfo(torch.int64).max
        return groups


def _as_rows(rows: RowTable, group_of: np.ndarray) -> tuple[RowTable, np.ndarray]:
    """Returns a table with a row per group, and the number of the group in each of its rows.
    The home of a group is the rank that loaded most of its bytes. `group_of` is int64 `[rows]`."""
    count, num_ranks = int(group_of.max(initial=-1)) + 1, rows.num_ranks
    at_home = np.bincount(group_of * num_ranks + rows.home, rows.sample_bytes, minlength=count * num_ranks)
    home = at_home.reshape(count, num_ranks).argmax(1)
    order = np.argsort(home, kind="stable")

    def summed(values: np.ndarray) -> np.ndarray:
        sums = np.zeros(count, dtype=values.dtype)
        np.add.at(sums, group_of, values)
        return sums[order]

    groups = RowTable(
        batch_sizes=rows.batch_sizes,
        num_loaded=np.bincount(home, minlength=num_ranks),
        workloads=summed(rows.workloads),
        tokens=summed(rows.tokens),
        loss_tokens=summed(rows.loss_tokens),
        key_lengths=np.zeros((count, 0), dtype=np.int64),
        sample_bytes=summed(rows.sample_bytes),
        arguments=rows.arguments,
        ranks=rows.ranks,
        speeds=rows.speeds,
        ranks_per_node=rows.ranks_per_node,
    )
    return groups, order
