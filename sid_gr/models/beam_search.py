"""Beam search over semantic IDs, restricted to prefixes of items."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sid_gr.models.code_tree import CodeTree

# A function from codes [B, W] of hierarchy `depth`, and the beams [B, W] that they extend, to logits
# [B, W, codebook size] of the next hierarchy.
NextLogits = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def beam_search(
    first_logits: torch.Tensor, next_logits: NextLogits, tree: CodeTree, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Searches for the `width` most probable items of each user, with a beam of that width.

    A tuple's score is the sum of its codes' log-probabilities. Each probability is normalized over the codes
    that, after the previous codes, lead to an item. The result is exact if there are at least as many beams
    as prefixes of any length.

    Args:
        first_logits: `[B, codebook size]` of the first hierarchy.
        next_logits: function that extends the beams by one code; called once for each further hierarchy.
        tree: tree of the existing code tuples.
        width: number of beams, and of items to return.

    Returns:
        Items, int64 `[B, width]`, best first, and their scores, float32 `[B, width]`; −1 and −inf where there
        are fewer items.
    """
    num_users = len(first_logits)
    nodes = torch.zeros(num_users, 1, dtype=torch.int64, device=first_logits.device)
    scores = torch.zeros(num_users, 1, device=first_logits.device)
    logits = first_logits.unsqueeze(1)
    for depth in range(len(tree.codebook_sizes)):
        nodes, scores, codes, parents = _best_children(nodes, scores, logits, tree, depth, width)
        if depth < len(tree.codebook_sizes) - 1:
            logits = next_logits(codes, parents, depth)
    return tree.items_of(nodes, scores, width)


def _best_children(
    nodes: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor, tree: CodeTree, depth: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the `width` best prefixes one code longer: nodes, scores, last codes, and parents.

    Each is `[B, width]`. If there are fewer prefixes, filler prefixes have a score of −inf.
    """
    children, exists = tree.child_nodes(nodes, depth)
    # Not −inf here: a filler prefix without children would get NaN from log_softmax.
    log_probabilities = logits.float().masked_fill(~exists, torch.finfo(torch.float32).min).log_softmax(-1)
    child_scores = (scores.unsqueeze(-1) + log_probabilities).masked_fill(~exists, -torch.inf).flatten(1)
    missing = max(width - child_scores.shape[1], 0)
    child_scores = torch.nn.functional.pad(child_scores, (0, missing), value=-torch.inf)
    scores, chosen = child_scores.topk(width)
    chosen = chosen.clamp(max=children.shape[1] * children.shape[2] - 1)  # for choices from the padding
    codebook_size = children.shape[2]
    nodes = children.flatten(1).gather(1, chosen)
    return nodes, scores, chosen % codebook_size, chosen // codebook_size
