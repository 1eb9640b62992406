"""The code tuples that belong to items, as a tree of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from commons.datasets import ItemSIDs


class CodeTree(nn.Module):
    """All prefixes of the items' semantic IDs, by length, and the items of each whole tuple.

    Node n at depth h is the n-th prefix of h + 1 codes, in the order of their codes; the one node above depth
    0 is number 0. Memory is proportional to the number of items, whatever the codebooks' sizes. Its buffers
    follow the model to its device, and are left out of its state.

    Args:
        sids: the items and their codes.
        codebook_sizes: of each hierarchy.

    Raises:
        ValueError: the codes are not within codebooks of these sizes.
    """

    items: torch.Tensor  # ordered by tuple, then by id
    item_starts: torch.Tensor  # of each tuple, in `items`
    item_counts: torch.Tensor  # of each tuple

    def __init__(self, sids: ItemSIDs, codebook_sizes: Sequence[int]) -> None:
        super().__init__()
        sids.check_codebooks(codebook_sizes)
        codes = torch.from_numpy(sids.codes)
        self.codebook_sizes = tuple(codebook_sizes)
        nodes = torch.zeros(len(codes), dtype=torch.int64)
        for depth, size in enumerate(codebook_sizes):
            keys, nodes = torch.unique(nodes * size + codes[:, depth], return_inverse=True)
            self.register_buffer(f"keys_{depth}", keys, persistent=False)
        # Stable, so that items of one tuple stay in the order of their ids.
        self.register_buffer(
            "items", torch.from_numpy(sids.items)[torch.argsort(nodes, stable=True)], persistent=False
        )
        counts = torch.bincount(nodes)
        self.register_buffer("item_starts", counts.cumsum(0) - counts, persistent=False)
        self.register_buffer("item_counts", counts, persistent=False)
        self.max_items_per_tuple = int(counts.max())

    def num_prefixes(self, depth: int) -> int:
        """How many prefixes of `depth + 1` codes lead to an item."""
        return self.get_buffer(f"keys_{depth}").numel()

    def child_nodes(self, nodes: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What each code of hierarchy `depth` leads to from nodes one level above.

        Args:
            nodes: int64 of any shape; for depth 0, zeros.
            depth: of the children.

        Returns:
            int64 `[..., codebook size]`, the child's number; and bool of that shape, whether it exists. The
            number of a child that does not exist is that of some other node.
        """
        keys, size = self.get_buffer(f"keys_{depth}"), self.codebook_sizes[depth]
        wanted = nodes.unsqueeze(-1) * size + torch.arange(size, device=nodes.device)
        found = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
        return found, keys[found] == wanted

    def items_of(
        self, tuples: torch.Tensor, scores: torch.Tensor, num_items: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The items of ranked tuples; those that share a tuple in the order of their ids.

        Args:
            tuples: int64 `[B, W]`, nodes of the last depth, the best first.
            scores: `[B, W]`; −inf where there is no tuple.
            num_items: how many items are wanted.

        Returns:
            int64 and float `[B, num_items]`, items and the scores of their tuples; −1 and −inf where there
            are no more.
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
