"""The code tuples of all items, as a tree of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from commons.datasets import ItemSIDs


class CodeTree(nn.Module):
    """The prefixes of the items' semantic IDs by length, and the items of each complete tuple.

    Node n at depth h is the n-th prefix of h + 1 codes, in lexicographic order. The root above depth 0 is
    node 0. Memory is proportional to the number of items and independent of the codebooks' sizes. The buffers
    move to the model's device, but are not part of its state.

    Args:
        sids: items and their codes.
        codebook_sizes: codebook size of each hierarchy.

    Raises:
        ValueError: a code is outside its codebook.
    """

    items: torch.Tensor  # ordered by tuple, then by id
    item_starts: torch.Tensor  # first index in `items`, per tuple
    item_counts: torch.Tensor  # number of items, per tuple

    def __init__(self, sids: ItemSIDs, codebook_sizes: Sequence[int]) -> None:
        super().__init__()
        sids.check_codebooks(codebook_sizes)
        codes = torch.from_numpy(sids.codes)
        self.codebook_sizes = tuple(codebook_sizes)
        nodes = torch.zeros(len(codes), dtype=torch.int64, device="cpu")
        for depth, size in enumerate(codebook_sizes):
            keys, nodes = torch.unique(nodes * size + codes[:, depth], return_inverse=True)
            self.register_buffer(f"keys_{depth}", keys, persistent=False)
        # Stable, so items of one tuple stay ordered by id.
        self.register_buffer(
            "items", torch.from_numpy(sids.items)[torch.argsort(nodes, stable=True)], persistent=False
        )
        counts = torch.bincount(nodes)
        self.register_buffer("item_starts", counts.cumsum(0) - counts, persistent=False)
        self.register_buffer("item_counts", counts, persistent=False)
        self.max_items_per_tuple = int(counts.max())

    def num_prefixes(self, depth: int) -> int:
        """Returns the number of prefixes of `depth + 1` codes that lead to an item."""
        return self.get_buffer(f"keys_{depth}").numel()

    def child_nodes(self, nodes: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the child that each code of hierarchy `depth` leads to, for nodes one level above.

        Args:
            nodes: int64 of any shape; zeros for depth 0.
            depth: depth of the children.

        Returns:
            The child's number, int64 `[..., codebook size]`, and whether it exists, bool of the same shape.
            A child that does not exist has the number of some other node.
        """
        keys, size = self.get_buffer(f"keys_{depth}"), self.codebook_sizes[depth]
        wanted = nodes.unsqueeze(-1) * size + torch.arange(size, device=nodes.device)
        found = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
        return found, keys[found] == wanted

    def items_of(
        self, tuples: torch.Tensor, scores: torch.Tensor, num_items: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the items of ranked tuples; items that share a tuple are ordered by id.

        Args:
            tuples: int64 `[B, W]`, nodes of the last depth, best first.
            scores: `[B, W]`; −inf where there is no tuple.
            num_items: number of items to return.

        Returns:
            Items, int64 `[B, num_items]`, and the scores of their tuples, float of the same shape; −1 and
            −inf where there are fewer items.
        """
        shared = torch.arange(min(self.max_items_per_tuple, num_items), device=tuples.device)
        exists = (shared < self.item_counts[tuples].unsqueeze(-1)) & (scores > -torch.inf).unsqueeze(-1)
        places = (self.item_starts[tuples].unsqueeze(-1) + shared).clamp(max=self.items.numel() - 1)
        items = self.items[places].masked_fill(~exists, -1).flatten(1)
        item_scores = scores.unsqueeze(-1).masked_fill(~exists, -torch.inf).flatten(1)
        missing = max(num_items - items.shape[1], 0)
        items = nn.functional.pad(items, (0, missing), value=-1)
        item_scores = nn.functional.pad(item_scores, (0, missing), value=-torch.inf)
        first = torch.argsort((items < 0).int(), dim=1, stable=True)[:, :num_items]
        return items.gather(1, first), item_scores.gather(1, first)
