"""Generative retrieval with semantic IDs: generates the codes of the next item.

Source: Rajput et al., "Recommender Systems with Generative Retrieval", NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from commons.datasets import SIDBatch
from sid_gr.models.beam_search import beam_search
from sid_gr.models.code_tree import CodeTree
from sid_gr.models.sid_embedding import SIDEmbedding
from sid_gr.modules.attention import JaggedCausalAttention
from sid_gr.modules.beam_attention import BeamAttention
from sid_gr.modules.decoder import Decoder, DecoderConfig
from sid_gr.modules.piecewise_attention import PiecewiseCausalAttention
from sid_gr.modules.token_layout import TokenLayout

# Limit of the beams' cache in padded tokens: 1 GB for eight bfloat16 layers of eight heads of width 128.
_CACHED_TOKENS = 1 << 15


@dataclass(frozen=True)
class SIDGRConfig:
    """Sizes and settings of the model.

    Attributes:
        decoder: sizes of the layers.
        top_k: number of items to retrieve, and of beams.
        contextual_vocab_sizes: number of ids of each contextual feature, in the order of their tokens.
        share_lm_head: whether all hierarchies share one head, as wide as the largest codebook. False gives
            each hierarchy its own head.
        num_position_buckets: number of positions with their own embedding; later positions share the last.
        dtype: torch.bfloat16 and torch.float16 run under autocast with float32 parameters; torch.float32 runs
            without.

    Raises:
        ValueError: a size is not positive, or `dtype` is not supported.
    """

    decoder: DecoderConfig
    top_k: int = 10
    contextual_vocab_sizes: Mapping[str, int] = field(default_factory=dict)
    share_lm_head: bool = True
    num_position_buckets: int = 8192
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("top_k", "num_position_buckets"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"dtype is {self.dtype}; expected torch.float32, torch.bfloat16 or torch.float16"
            )


@dataclass(frozen=True)
class RetrievalOutput:
    """Items retrieved for the samples that end in a rank's batch, in the order of its rows.

    A whole sample ends in its row, and a cut sample ends in the row of its last piece. So each sample has one
    row, on one rank.

    Attributes:
        items: int64 `[samples, top_k]`, best first; −1 where there are fewer items.
        scores: float32 `[samples, top_k]`, log-probabilities of the items' codes; −inf where there are fewer
            items.
        targets: int64 `[samples]`, the target items; None if the batch does not have them.
    """

    items: torch.Tensor
    scores: torch.Tensor
    targets: torch.Tensor | None


class SIDGR(nn.Module):
    """Embeddings, a causal Transformer over the jagged tokens, and heads that predict codes.

    Args:
        config: sizes of the model.
        tree: tree of the items that can be retrieved, which also determines the codebooks.
        device: device of the parameters.
    """

    def __init__(self, config: SIDGRConfig, tree: CodeTree, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        self.tree = tree
        hidden_size, sizes = config.decoder.hidden_size, tree.codebook_sizes
        self.embedding = SIDEmbedding(
            sizes, config.contextual_vocab_sizes, hidden_size, config.num_position_buckets, device
        )
        self.dropout = nn.Dropout(config.decoder.dropout)
        self.decoder = Decoder(config.decoder, device)
        widths = [max(sizes)] if config.share_lm_head else sizes
        self.heads = nn.ModuleList(nn.Linear(hidden_size, width, device=device) for width in widths)
        for head in self.heads:  # all codes start equally probable
            nn.init.zeros_(head.get_parameter("weight"))
            nn.init.zeros_(head.get_parameter("bias"))

    def forward(self, batch: SIDBatch) -> tuple[torch.Tensor, RetrievalOutput | None]:
        """Returns the summed loss of the batch's candidate codes, a float32 scalar.

        In evaluation mode, also returns the `top_k` items that beam search finds for each sample. The
        target is the sample's last candidate, whose own codes do not influence the search. A batch without
        tokens has a loss of 0 and zero gradients for all parameters, so its rank stays in step with the
        others. If samples are cut, the call is collective over the plan's ranks.

        Raises:
            ValueError: the batch's features differ from the model's, codes do not form whole items, a sample
                has no candidate, or the token counts of a plan that cuts samples differ from the model's.
        """
        with self._autocast(batch):
            layout = TokenLayout.of(batch)
            attention = self._attention(batch, layout)
            tokens, before_candidates = self.embedding(batch, layout)
            states = self.decoder(self.dropout(tokens), attention)
            loss = self._loss(states[layout.predictors], layout.labels)
            if self.training:
                return loss, None
            rows = list(range(batch.num_samples))
            if batch.pieces is not None:  # the search continues from a sample's last piece
                rows = np.flatnonzero(batch.pieces.ends_sample[: batch.num_samples]).tolist()
            items, scores = self._retrieve(states, before_candidates, attention, layout, rows)
        if batch.target_items is None:
            return loss, RetrievalOutput(items, scores, None)
        return loss, RetrievalOutput(items, scores, batch.target_items[rows])

    def _attention(
        self, batch: SIDBatch, layout: TokenLayout
    ) -> JaggedCausalAttention | PiecewiseCausalAttention:
        """Returns the attention of a batch. In evaluation, it keeps keys and values."""
        keep, lengths = not self.training, layout.host_lengths
        if batch.pieces is None:
            return JaggedCausalAttention(lengths, keep)
        return PiecewiseCausalAttention(lengths, batch.pieces, batch.features.device(), keep)

    def _autocast(self, batch: SIDBatch) -> torch.autocast:
        device_type = batch.features.device().type
        return torch.autocast(device_type, self.config.dtype, enabled=self.config.dtype != torch.float32)

    def _logits(self, states: torch.Tensor, hierarchy: int) -> torch.Tensor:
        """Returns the logits of a hierarchy's codes, `[..., codebook size]`."""
        head = self.heads[0 if self.config.share_lm_head else hierarchy]
        return head(states)[..., : self.tree.codebook_sizes[hierarchy]]

    def _loss(self, states: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Returns the summed loss of `[candidate codes]` codes, from `[candidate codes, hidden_size]` states.

        Only codes that lead to an item compete, as in the search. So the model need not learn which codes do,
        and the probabilities of all existing semantic IDs add up to 1.
        """
        num_hierarchies = len(self.tree.codebook_sizes)
        item_codes = codes.view(-1, num_hierarchies, 1)
        nodes = torch.zeros(len(item_codes), dtype=torch.int64, device=codes.device)
        losses = []
        for hierarchy, step_states in enumerate(states.unflatten(0, (-1, num_hierarchies)).unbind(1)):
            labels = item_codes[:, hierarchy]
            children, exists = self.tree.child_nodes(nodes, hierarchy)
            exists = exists.scatter(1, labels, True)  # an item outside the tree would have an infinite loss
            logits = self._logits(step_states, hierarchy).float().masked_fill(~exists, -torch.inf)
            losses.append(cross_entropy(logits, labels.squeeze(1), reduction="sum"))
            nodes = children.gather(1, labels).squeeze(1)
        return torch.stack(losses).sum()

    @torch.no_grad()
    def _retrieve(
        self,
        states: torch.Tensor,
        before_candidates: torch.Tensor,
        attention: JaggedCausalAttention | PiecewiseCausalAttention,
        layout: TokenLayout,
        rows: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns items and scores of some rows, after the forward pass over their prompts.

        The search is not collective, so ranks may have different numbers of samples.

        Args:
            states: states of the tokens, `[tokens, hidden_size]`.
            before_candidates: embedding of the item before each candidate, `[candidates, hidden_size]`.
            attention: attention that computed `states`, with its keys and values.
            layout: layout of the tokens.
            rows: ascending rows, each of which ends its sample.
        """
        num_steps, device = len(self.tree.codebook_sizes) - 1, states.device
        items = torch.full((len(rows), self.config.top_k), -1, device=device)
        scores = torch.full((len(rows), self.config.top_k), -torch.inf, device=device)
        host_lengths = [layout.host_prompt_lengths[row] for row in rows]
        key_starts = [attention.key_starts[row] for row in rows]
        row_of, starts_of = torch.tensor([rows, key_starts], dtype=torch.int64, device=device)
        for users in _chunks(host_lengths, self.config.top_k * num_steps):
            chosen = torch.tensor(users, device=device)
            chosen_rows = row_of[chosen]
            prompt_lengths = layout.prompt_lengths[chosen_rows]
            beams = BeamAttention(
                attention.keys_values,
                starts_of[chosen],
                prompt_lengths,
                longest=host_lengths[users[-1]],
                num_beams=self.config.top_k,
                num_steps=num_steps,
            )
            last_tokens = layout.offsets[chosen_rows] + prompt_lengths - 1
            before_targets = before_candidates[layout.last_candidates[chosen_rows]]
            items[chosen], scores[chosen] = self._search(
                states[last_tokens], before_targets, prompt_lengths, beams
            )
        return items, scores

    def _search(
        self,
        states: torch.Tensor,
        before_targets: torch.Tensor,
        prompt_lengths: torch.Tensor,
        beams: BeamAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs beam search for the users of `beams`, from `[users, hidden_size]` states of the last BOS."""
        sums = before_targets.unsqueeze(1).expand(-1, self.config.top_k, -1)  # up to each beam's last code

        def scores_of(states: torch.Tensor, hierarchy: int) -> torch.Tensor:
            # In 16 bits, many logits of a codebook would tie, and chance would choose among them.
            with torch.autocast(states.device.type, enabled=False):
                return self._logits(states.float(), hierarchy)

        def next_logits(codes: torch.Tensor, parents: torch.Tensor, hierarchy: int) -> torch.Tensor:
            nonlocal sums
            beams.extend(parents)
            sums = sums.gather(1, parents.unsqueeze(-1).expand_as(sums))
            sums = sums + self.embedding.codes[hierarchy](codes)
            tokens = sums + self.embedding.at(prompt_lengths + hierarchy).unsqueeze(1)
            return scores_of(self.decoder(tokens.flatten(0, 1), beams).view_as(tokens), hierarchy + 1)

        return beam_search(scores_of(states, 0), next_logits, self.tree, self.config.top_k)


def _chunks(prompt_lengths: list[int], room: int) -> Iterator[list[int]]:
    """Yields lists of users to search for together, shortest prompts first, so that padding costs little.

    Args:
        prompt_lengths: prompt length of each user.
        room: number of tokens of each user's beams, in addition to the prompt.
    """
    chunk: list[int] = []
    for user in sorted(range(len(prompt_lengths)), key=prompt_lengths.__getitem__):
        if chunk and (len(chunk) + 1) * (prompt_lengths[user] + room) > _CACHED_TOKENS:
            yield chunk
            chunk = []
        chunk.append(user)
    if chunk:
        yield chunk
