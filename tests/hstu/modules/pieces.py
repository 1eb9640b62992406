"""Samples cut into pieces on several ranks, all simulated in one process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from hstu.modules import SampleMask, batch_attention, piece_attention
from tests.hstu.modules.attention_cases import batches

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Piece:
    """Tokens `first` to `end`, exclusive, of a sample; the mask is for their queries."""

    sample: int
    first: int
    end: int
    mask: SampleMask

    @property
    def is_whole(self) -> bool:
        """Whether the sample was not cut."""
        return self.mask.num_rows == self.mask.num_tokens


def cut(sample: int, mask: SampleMask, cuts: Sequence[int]) -> list[Piece]:
    """Returns the pieces of a sample that is cut before these tokens, all within its history."""
    pieces = []
    for first, end in zip([0, *cuts], [*cuts, mask.num_tokens], strict=True):
        rows = {"first_row": first, "num_rows": end - first}
        if end < mask.num_tokens:
            num_keys = end if mask.is_causal else mask.history_end
            rows |= {"num_tokens": num_keys, "history_end": num_keys}
        pieces.append(Piece(sample, first, end, replace(mask, **rows)))
    return pieces


@st.composite
def cut_samples(draw: st.DrawFn) -> tuple[list[SampleMask], list[list[Piece]]]:
    """Draws whole samples, and the pieces of each rank in the order of their tokens."""
    masks = draw(batches())
    ranks: list[list[Piece]] = [[] for _ in range(draw(st.integers(2, 3)))]
    for sample, mask in enumerate(masks):
        possible = range(max(mask.num_contextual, 1), min(mask.history_end + 1, mask.num_tokens))
        cuts = draw(st.sets(st.sampled_from(possible), max_size=4)) if possible else set()
        for piece in cut(sample, mask, sorted(cuts)):
            draw(st.sampled_from(ranks)).append(piece)
    return masks, [draw(st.permutations(pieces)) for pieces in ranks]


def attention_in_pieces(
    backend: str,
    masks: Sequence[SampleMask],
    ranks: Sequence[Sequence[Piece]],
    qkv: Sequence[torch.Tensor],
    scaling_seqlen: int,
) -> torch.Tensor:
    """Returns the attention of samples in their order, computed from the pieces of each rank."""
    starts = np.cumsum([0, *(mask.num_tokens for mask in masks)])
    outs, tokens_of_outs = [], []
    for pieces in ranks:
        own = np.concatenate([np.arange(0), *(starts[p.sample] + np.arange(p.first, p.end) for p in pieces)])
        q, k, v = (x[torch.from_numpy(own)] for x in qkv)
        first_tokens = np.cumsum([0, *(p.end - p.first for p in pieces)])[:-1].tolist()
        placed = list(zip(pieces, first_tokens, strict=True))
        whole = [(piece.mask, start) for piece, start in placed if piece.is_whole]
        cut_up = [(piece, start) for piece, start in placed if not piece.is_whole]
        keys = np.concatenate(
            [np.arange(0), *(starts[p.sample] + np.arange(p.mask.num_tokens) for p, _ in cut_up)]
        )
        elsewhere = np.setdiff1d(keys, own)
        location = {token: place for place, token in enumerate([*own.tolist(), *elsewhere.tolist()])}
        key_tokens = np.array([location[token] for token in keys.tolist()], np.int64)
        fetched = torch.stack(qkv[1:], 1)[torch.from_numpy(elsewhere)]
        attend_to_whole = batch_attention(
            backend, [mask for mask, _ in whole], scaling_seqlen, CPU, [start for _, start in whole]
        )
        attend_to_pieces = piece_attention(
            backend,
            [p.mask for p, _ in cut_up],
            [start for _, start in cut_up],
            key_tokens,
            scaling_seqlen,
            CPU,
        )
        outs.append(attend_to_whole(q, k, v) + attend_to_pieces(q, k, v, fetched))
        tokens_of_outs.append(own)
    order = np.argsort(np.concatenate(tokens_of_outs))
    return torch.cat(outs)[torch.from_numpy(order)]
