import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from commons.datasets import ItemSIDs
from sid_gr.models import CodeTree
from sid_gr.modules import JaggedCausalAttention, TokenLayout
from tests.sid_gr.internals import model_file
from tests.sid_gr.reference import log_probabilities
from tests.sid_gr.sid_samples import (
    CODEBOOK_SIZES,
    SIDS,
    Sample,
    samples,
    sid_batch,
    sid_gr_model,
)

NUM_HIERARCHIES = len(CODEBOOK_SIZES)


@given(
    codes=st.lists(
        st.tuples(*(st.integers(0, size - 1) for size in CODEBOOK_SIZES)), min_size=1, max_size=25
    ),
    rows=st.lists(samples(), min_size=1, max_size=3),
    padding=st.integers(0, 1),
    num_kv_heads=st.sampled_from([1, 4]),
    top_k=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
@example([(0, 0, 0), (1, 2, 4)], [Sample([], [1], []), Sample([1, 2], [3], [1])], 1, 4, 4, 0)
def test_any_beam_finds_what_a_search_by_hand_finds(codes, rows, padding, num_kv_heads, top_k, seed):
    """The search by hand sees neither the target nor other samples.

    A beam wider than the tree is exhaustive; items that share a tuple are in the order of their ids.
    """
    sids = ItemSIDs(items=np.arange(len(codes)) * 2, codes=np.array(codes))
    model = sid_gr_model(top_k=top_k, sids=sids, num_kv_heads=num_kv_heads, seed=seed).eval()
    _, output = model(sid_batch(rows, len(rows) + padding))
    assert output.targets.tolist() == [SIDS.items[sample.candidates[-1]] for sample in rows]
    for sample, items, scores in zip(rows, output.items.tolist(), output.scores.tolist(), strict=True):
        expected = search_by_hand(model, sample, codes, top_k)
        assert scores == sorted(scores, reverse=True)
        assert scores[len(expected) :] == [-np.inf] * (top_k - len(expected))
        assert [item for item in items if item >= 0] == [item for item, _ in expected]
        np.testing.assert_allclose(
            scores[: len(expected)], [score for _, score in expected], rtol=1e-5, atol=1e-5
        )
        assert items[len(expected) :] == [-1] * (top_k - len(expected))


@torch.no_grad()
def search_by_hand(model, sample: Sample, codes: list[tuple[int, ...]], width: int):
    """Runs beam search over Python lists, with a forward pass over each beam's whole sequence."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(NUM_HIERARCHIES):
        extended = []
        for prefix, score in beams:
            scores = log_probabilities(model, state_after(model, sample, prefix), prefix, codes)
            valid = torch.nonzero(scores.isfinite()).flatten().tolist()
            extended += [((*prefix, code), score + float(scores[code])) for code in valid]
        beams = sorted(extended, key=lambda beam: -beam[1])[:width]
    items = [(2 * i, score) for prefix, score in beams for i, item in enumerate(codes) if item == prefix]
    return items[:width]


def state_after(model, sample: Sample, prefix: tuple[int, ...]) -> torch.Tensor:
    """Returns the state after a prompt and a prefix of codes, from a forward pass of the decoder."""
    batch = sid_batch([sample])
    layout = TokenLayout.of(batch)
    length = layout.host_prompt_lengths[0]
    tokens, before_candidates = model.embedding(batch, layout)
    tokens, so_far = list(tokens[:length]), before_candidates[-1]
    for h, code in enumerate(prefix):
        so_far = so_far + model.embedding.codes[h].weight[code]
        tokens.append(so_far + model.embedding.at(torch.tensor(length + h)))
    x = torch.stack(tokens)
    return model.decoder(x, JaggedCausalAttention([len(x)]))[-1]


def test_search_in_chunks_finds_the_same(monkeypatch):
    rows = [Sample(list(range(length)), [length], []) for length in (5, 0, 8, 3, 5)]
    model = sid_gr_model().eval()
    _, at_once = model(sid_batch(rows, 6))
    for budget in (1, 60):  # one user at a time, and several
        monkeypatch.setattr(model_file, "_CACHED_TOKENS", budget)
        _, in_chunks = model(sid_batch(rows, 6))
        assert in_chunks.items.tolist() == at_once.items.tolist()
        torch.testing.assert_close(in_chunks.scores, at_once.scores, rtol=1e-5, atol=1e-5)


def test_the_tree_has_every_prefix_once():
    tree = CodeTree(SIDS, CODEBOOK_SIZES)
    assert [tree.num_prefixes(depth) for depth in range(3)] == [3, 5, 7]
    assert tree.max_items_per_tuple == 2
    assert tree.state_dict() == {}
