"""Maps ids to rows of a table. A new id gets a row in its first training step."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torchrec.modules.mc_modules import LFU_EvictionPolicy, LRU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from .id_mix import MARK_OF_FREE_ROW, mixed

logger = logging.getLogger(__name__)

_MOST = torch.iinfo(torch.int64).max


class _IdleWithoutNewIds:
    """Skips sorting the rows in a step without new ids, which evicts nothing."""

    def _compute_selected_eviction_and_replacement_indices(
        self, pivot: int, eviction_scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(eviction_scores) == pivot:  # no scores of new ids
            none = torch.empty(0, dtype=torch.int64, device=eviction_scores.device)
            return none, none
        return super()._compute_selected_eviction_and_replacement_indices(  # type: ignore[misc]
            pivot, eviction_scores
        )


class LeastRecentlyUsed(_IdleWithoutNewIds, LRU_EvictionPolicy):
    """Evicts the ids whose last training step is longest ago."""


class LeastFrequentlyUsed(_IdleWithoutNewIds, LFU_EvictionPolicy):
    """Evicts the ids trained on least often since they got their rows, but never ids of the current step.

    TorchRec's own policy admits a new id only if its count in the step exceeds the count of an id with a row.
    In a full table, most new ids would never get a row.
    """

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: torch.Tensor,
        coalesced_history_sorted_unique_ids_counts: torch.Tensor,
        coalesced_history_mch_matching_elements_mask: torch.Tensor,
        coalesced_history_mch_matching_indices: torch.Tensor,
        mch_metadata: dict[str, torch.Tensor],
        coalesced_history_metadata: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns evicted rows and the new ids admitted in their place, like the base class."""
        counts = mch_metadata["counts"]
        step_counts = coalesced_history_sorted_unique_ids_counts
        is_held, held = coalesced_history_mch_matching_elements_mask, coalesced_history_mch_matching_indices
        counts[held] += step_counts[is_held]
        new = step_counts[~is_held]
        scores = counts.clone()
        scores[held] = scores[mch_size - 1] = _MOST  # ids without a row share the last row
        evicted, selected = self._compute_selected_eviction_and_replacement_indices(
            mch_size, torch.cat([scores, torch.full_like(new, _MOST)])
        )
        counts[evicted] = new[selected]
        return evicted, selected


EVICTION_POLICIES = {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed}


class IdRows(MCHManagedCollisionModule):
    """TorchRec's map from ids to rows, for unbounded ids and updated in every training step.

    Ids are mixed before they are distributed to the ranks, and they are stored mixed. A step admits its new
    ids before the lookup, most frequent first, each to a free row or to the row of an evicted id. It never
    evicts its own ids. So the map depends only on each step's ids and their counts, not on their order or on
    the ranks they come from. Ids without a row share the last row of the rank that owns them.

    `id_rows` makes the map of a whole table, and TorchRec makes each rank's part of it.

    Attributes:
        segments: first row of each rank, then the number of all rows.
        is_misplaced: whether a checkpoint of another number of ranks was loaded; `place_ids` must follow.
    """

    _input_history_buffer_size: int

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.segments: list[int] = arguments.get("output_segments") or [0, self._zch_size]
        self.is_misplaced = False
        self._has_warned = False

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Admits the ids of a step, if the module is in training mode."""
        num_ids = sum(feature.values().numel() for feature in features.values())
        if num_ids > self._input_history_buffer_size:
            # TorchRec sizes the buffer by the first step and would drop the surplus of a larger one.
            self._input_history_buffer_size = -1
        return super().profile(features)

    def ids_of_rows(self) -> torch.Tensor:
        """Returns the mixed id of each row, int64 `[rows of this rank]`, or `MARK_OF_FREE_ROW`."""
        rows = self._mch_remapped_ids_mapping - self._output_global_offset
        return torch.empty_like(rows).index_copy_(0, rows, self._mch_sorted_raw_ids)

    def remap(self, features: dict[str, JaggedTensor], *args: Any, **kwargs: Any) -> dict[str, JaggedTensor]:
        """Returns the row of each id.

        Raises:
            RuntimeError: ids are not on the ranks that own them.
        """
        if self.is_misplaced:
            raise RuntimeError(
                f"table {self._name!r} was loaded from a checkpoint of other ranks: call place_loaded_ids of "
                "its collection after loading its embeddings and their optimizer"
            )
        return super().remap(features, *args, **kwargs)

    def validate_state(self) -> None:
        """Records whether the loaded ids are misplaced. TorchRec calls this after `load_state_dict`."""
        loaded = self._output_segments_tensor
        # Misplaced ids stay misplaced after a second load, which may come from this very state.
        self.is_misplaced |= loaded[loaded >= 0].tolist() != self.segments
        loaded.fill_(-1)[: len(self.segments)] = torch.tensor(self.segments, device=loaded.device)
        self._current_iter = -1  # read again from the loaded state

    def entries(self) -> torch.Tensor:
        """Returns mixed ids, global rows, and last use or number of uses, int64 `[3, rows of this rank]`."""
        (used,) = self._mch_metadata.values()
        return torch.stack([self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, used])

    def set_entries(self, ids: torch.Tensor, used: torch.Tensor) -> None:
        """Assigns the first rows of this rank to ascending mixed ids. `used` is as in `entries`."""
        self._mch_sorted_raw_ids.fill_(MARK_OF_FREE_ROW)[: len(ids)] = ids
        rows = self._mch_remapped_ids_mapping
        first = self._output_global_offset
        torch.arange(first, first + len(rows), out=rows, device=rows.device)
        for metadata in self._mch_metadata.values():
            metadata.zero_()[: len(ids)] = used
        self.is_misplaced = False

    def _update_and_evict(
        self,
        uniq_ids: torch.Tensor,
        uniq_ids_counts: torch.Tensor,
        uniq_ids_metadata: dict[str, torch.Tensor],
    ) -> None:
        usable = self._zch_size - 1
        if len(uniq_ids) > usable and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"table {self._name!r}: one step has {len(uniq_ids)} ids for the {usable} rows of ids on one "
                "rank. Ids without a row share one, and this is the only warning: raise "
                "item_vocab_size_or_capacity, or train on smaller batches"
            )
        super()._update_and_evict(uniq_ids, uniq_ids_counts, uniq_ids_metadata)

    def _sort_mch_buffers(self) -> None:
        if len(self._evicted_emb_indices):  # otherwise unchanged and still sorted
            super()._sort_mch_buffers()


def id_rows(name: str, num_rows: int, eviction: str, device: torch.device | None) -> IdRows:
    """Returns the map of a whole table, not yet divided among ranks.

    Args:
        name: name of the table.
        num_rows: number of rows of the table. On each rank, ids without a row share one of them.
        eviction: "lru" or "lfu".
        device: device of the ids; None for the CPU.

    Raises:
        ValueError: `eviction` is unknown.
    """
    if eviction not in EVICTION_POLICIES:
        raise ValueError(
            f"table {name!r}: eviction = {eviction!r}, expected one of {', '.join(EVICTION_POLICIES)}"
        )
    return IdRows(
        name=name,
        zch_size=num_rows,
        device=device or torch.device("cpu"),
        eviction_policy=EVICTION_POLICIES[eviction](),
        eviction_interval=1,
        input_hash_size=0,  # ranks follow from the mixed id's remainder, all equally likely
        input_hash_func=_mixed_for_torchrec,
    )


def _mixed_for_torchrec(ids: torch.Tensor, hash_size: int) -> torch.Tensor:
    return mixed(ids)
