"""Costs of pieces of samples, and the keys and values that ranks fetch for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..perf_model.cost import Cost

if TYPE_CHECKING:
    from ..distributed.plan import RowTable, ShufflePlan
    from ..distributed.settings import ShufflerSettings
    from ..extensions.pieces.cutting import Cutting

# Cost of the models here. Their FLOPs have one column for matrix products and one for attention.
FLOPS = Cost.sum_of_columns(2)
# The forward pass fetches keys and values, and the backward pass returns as many bytes of gradients.
FETCHES_PER_LAYER = 2


class Cuts(NamedTuple):
    """The cut samples of one step, and the bytes that its ranks fetch.

    Attributes:
        num_samples, num_pieces: numbers of cut samples and of their pieces.
        bytes_per_layer: bytes of keys and values that a rank fetches in one layer, mean over ranks.
        bytes_of_slowest: bytes of keys, values, and gradients in all layers, at the rank that sends or
            receives the most. Bytes that stay within a node do not count.
    """

    num_samples: int = 0
    num_pieces: int = 0
    bytes_per_layer: float = 0.0
    bytes_of_slowest: float = 0.0


@dataclass(frozen=True)
class PieceCosts:
    """Costs of pieces of samples in one model.

    Attributes:
        prefix_work: function that takes numbers of first tokens and of all tokens, int64 `[samples]` each,
            and returns the forward FLOPs of the first tokens' queries, int64 `[samples, columns]`.
        num_layers: number of layers with attention.
        num_kv_heads, head_dim: number of heads of keys and of values, and width of a head.
        value_bytes: bytes of one number in a key or a value.
        is_causal: whether no token sees a later one.
        cost: cost to balance by, a sum over samples, tokens, and FLOPs.
    """

    prefix_work: Callable[[np.ndarray, np.ndarray], np.ndarray]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_bytes: int = 2
    is_causal: bool = True
    cost: Cost = FLOPS

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def cutting(self) -> Cutting:
        """Rules and costs for cutting samples between any two tokens."""

        def prefix_cost(first: np.ndarray, counts: Mapping[str, np.ndarray]) -> np.ndarray:
            return self.cost.of(first > 0, first, self.prefix_work(first, counts["tokens"]))

        from ..extensions.pieces.cut_rules import ALONG_ITEMS, CutRules, ItemGroup
        from ..extensions.pieces.cutting import Cutting

        # To the advisor, a sample is a row of tokens, each with a loss, and a cut may precede any token.
        rules = CutRules(items=(ItemGroup("tokens"),), fields={"loss_tokens": ALONG_ITEMS})

        return Cutting(rules, None, (), prefix_cost)

    def place(self, samples: RowTable, settings: ShufflerSettings) -> ShufflePlan:
        """Places the samples of a step, and cuts the samples that prevent balance."""
        from ..distributed.placement import make_plan
        from ..extensions.pieces.cut_search import cut_and_place

        return make_plan(*cut_and_place(samples, settings, self.cutting))

    def cuts(self, plan: ShufflePlan, ranks_per_node: int | None) -> Cuts:
        """Returns the cuts of a step's plan. Bytes within a node of `ranks_per_node` ranks take no time."""
        if plan.rows.starts_sample.all():
            return Cuts()
        per_sample = np.bincount(plan.rows.sample_of)
        sender, receiver, num_bytes = self.fetched(plan)
        nodes = 1 if ranks_per_node is None else ranks_per_node
        paid = num_bytes * (sender // nodes != receiver // nodes)
        slowest = max(np.bincount(ranks, paid).max(initial=0) for ranks in (sender, receiver))
        return Cuts(
            num_samples=int((per_sample > 1).sum()),
            num_pieces=int(per_sample[per_sample > 1].sum()),
            bytes_per_layer=float(num_bytes.sum() / plan.num_ranks),
            bytes_of_slowest=float(slowest * self.num_layers * FETCHES_PER_LAYER),
        )

    def fetched(self, plan: ShufflePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the transfers of one layer: keys and values on other ranks that a rank's pieces see.

        The plan must cut at least one sample.

        Returns:
            The sending ranks, the receiving ranks, and the bytes, int64 `[transfers]` each.
        """
        pieces, sample_of = pieces_of(plan), plan.rows.sample_of
        # The ranks that hold rows of each sample, sample by sample, and the end of the tokens each one sees.
        key, key_of_row = np.unique(sample_of * plan.num_ranks + plan.destination, return_inverse=True)
        sample, receiver = np.divmod(key, plan.num_ranks)
        farthest = np.zeros_like(key)
        np.maximum.at(farthest, key_of_row, pieces["last_token" if self.is_causal else "num_tokens"])
        # All pairs of a row and a rank of its sample.
        num_ranks = np.bincount(sample)
        repeats = num_ranks[sample_of]
        row = np.arange(len(sample_of)).repeat(repeats)
        number = np.arange(len(row)) - (np.cumsum(repeats) - repeats)[row]
        at = (np.cumsum(num_ranks) - num_ranks)[sample_of[row]] + number
        tokens = np.minimum(pieces["last_token"][row], farthest[at]) - pieces["first_token"][row]
        fetches = (plan.destination[row] != receiver[at]) & (tokens > 0)
        num_bytes = tokens[fetches] * self.bytes_per_token
        return plan.destination[row[fetches]], receiver[at[fetches]], num_bytes

    def assumption(self, bytes_per_second: float) -> str:
        """Returns the assumptions about the fetch, without a final period."""
        return (
            f"Pieces of samples fetch {self.bytes_per_token:,} bytes of keys and values per token and layer "
            f"(2 × {self.num_kv_heads} heads of {self.head_dim} × {self.value_bytes} bytes, "
            f"{self.num_layers} layers), and return as many bytes of gradients, at "
            f"{bytes_per_second / 1e9:g} GB/s per rank; a step waits for all of it. Cuts are between any two "
            "tokens, where training cuts between items"
        )


def bytes_of_rows(plan: ShufflePlan) -> np.ndarray:
    """Returns the bytes of each row of a plan. A piece's share of its sample's bytes follows its tokens."""
    rows = plan.rows
    if rows.starts_sample.all():
        return rows.sample_bytes
    num_tokens = pieces_of(plan)["num_tokens"]
    shares = np.where(num_tokens > 0, rows.tokens / np.maximum(num_tokens, 1), 1.0)
    return shares * rows.sample_bytes


def pieces_of(plan: ShufflePlan) -> np.ndarray:
    """Returns the place of each row in its sample, `[rows]` of dtype `PIECE`. The plan must cut a sample."""
    from ..extensions.pieces.cutting import COLUMN

    return plan.rows.columns[COLUMN]
