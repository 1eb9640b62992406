from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets import ItemSIDs
from sid_gr.models import CodeTree
from sid_gr.modules import JaggedCausalAttention, TokenLayout
from tests.sid_gr.models.test_sid_gr import log_probabilities, reference_states
from tests.sid_gr.sid_samples import (
    CODEBOOK_SIZES,
    ITEM_CODES,
    SIDS,
    Sample,
    samples,
    sid_batch,
    sid_gr_model,
)

NUM_HIERARCHIES = len(CODEBOOK_SIZES)
ROWS = range(len(ITEM_CODES))


@torch.no_grad()
def uncached_score(model, sample: Sample, row: int) -> float:
    """Log-probability of an item as a sample's target, from a forward pass over the whole sequence."""
    states = reference_states(model, Sample(sample.history, [*sample.candidates[:-1], row], sample.tags))
    score = 0.0
    for h, code in enumerate(ITEM_CODES[row]):
        prefix = tuple(ITEM_CODES[row, :h])
        score += float(log_probabilities(model, states[h - NUM_HIERARCHIES], prefix, ITEM_CODES)[code])
    return score


@given(
    rows=st.lists(samples(), min_size=1, max_size=4),
    padding=st.integers(0, 1),
    num_kv_heads=st.sampled_from([1, 4]),
    top_k=st.integers(7, 12),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_a_beam_as_wide_as_the_tree_finds_the_exhaustive_top_k(rows, padding, num_kv_heads, top_k, seed):
    model = sid_gr_model(top_k=top_k, num_kv_heads=num_kv_heads, seed=seed).eval()
    assert max(model.tree.num_prefixes(depth) for depth in range(NUM_HIERARCHIES)) <= top_k
    _, output = model(sid_batch(rows, len(rows) + padding))
    assert output.items.shape == (len(rows), top_k)
    for sample, items, scores, target in zip(rows, output.items, output.scores, output.targets, strict=True):
        score_of = dict(
            zip(SIDS.items.tolist(), (uncached_score(model, sample, row) for row in ROWS), strict=True)
        )
        found = min(top_k, len(ITEM_CODES))
        # The best, and of equals, which share a tuple, those with the smaller ids.
        expected = sorted(score_of, key=lambda item: (-round(score_of[item], 4), item))[:found]
        assert sorted(items[:found].tolist()) == sorted(expected)
        for item, score in zip(items[:found].tolist(), scores.tolist(), strict=False):
            assert abs(score_of[item] - score) <= 1e-5 * max(1, abs(score))
        assert scores.tolist() == sorted(scores.tolist(), reverse=True)
        assert int(target) == SIDS.items[sample.candidates[-1]]
        ranked = items.tolist()
        for first, second in ((33, 43), (53, 63)):
            if second in ranked:
                assert ranked.index(second) == ranked.index(first) + 1
        assert ranked[found:] == [-1] * (top_k - found)  # more than there are
        assert not torch.isfinite(scores[found:]).any()


@given(
    codes=st.lists(
        st.tuples(*(st.integers(0, size - 1) for size in CODEBOOK_SIZES)), min_size=1, max_size=25
    ),
    rows=st.lists(samples(), min_size=1, max_size=3),
    top_k=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_beam_finds_what_a_search_by_hand_finds(codes, rows, top_k, seed):
    sids = ItemSIDs(items=np.arange(len(codes)) * 2, codes=np.array(codes))
    model = sid_gr_model(top_k=top_k, sids=sids, seed=seed).eval()
    _, output = model(sid_batch(rows))
    for sample, items, scores in zip(rows, output.items.tolist(), output.scores.tolist(), strict=True):
        expected = search_by_hand(model, sample, codes, top_k)
        assert [item for item in items if item >= 0] == [item for item, _ in expected]
        np.testing.assert_allclose(
            scores[: len(expected)], [score for _, score in expected], rtol=1e-5, atol=1e-5
        )
        assert items[len(expected) :] == [-1] * (top_k - len(expected))


@torch.no_grad()
def search_by_hand(model, sample: Sample, codes: list[tuple[int, ...]], width: int):
    """Beam search over Python lists, each beam's logits from a forward pass over its whole sequence."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(NUM_HIERARCHIES):
        extended = []
        for prefix, score in beams:
            scores = log_probabilities(model, state_behind(model, sample, prefix), prefix, codes)
            valid = torch.nonzero(scores.isfinite()).flatten().tolist()
            extended += [((*prefix, code), score + float(scores[code])) for code in valid]
        beams = sorted(extended, key=lambda beam: -beam[1])[:width]
    items = [(2 * i, score) for prefix, score in beams for i, item in enumerate(codes) if item == prefix]
    return items[:width]


def state_behind(model, sample: Sample, prefix: tuple[int, ...]) -> torch.Tensor:
    """The state behind a prompt and the codes of a prefix, through a whole forward pass of the decoder."""
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


@given(rows=st.lists(samples(), min_size=1, max_size=4), others=st.data())
@settings(max_examples=20, deadline=None)
def test_retrieval_depends_neither_on_the_target_nor_on_company(rows, others):
    model = sid_gr_model().eval()
    _, together = model(sid_batch(rows, len(rows) + 1))
    for index, row in enumerate(rows):
        target = others.draw(st.integers(0, len(ITEM_CODES) - 1))
        alone = Sample(row.history, [*row.candidates[:-1], target], row.tags)
        _, output = model(sid_batch([alone]))
        assert output.items[0].tolist() == together.items[index].tolist()
        torch.testing.assert_close(output.scores[0], together.scores[index], rtol=1e-5, atol=1e-5)


def test_users_searched_for_in_chunks_get_the_same(monkeypatch):
    rows = [Sample(list(range(length)), [length], []) for length in (5, 0, 8, 3, 5)]
    model = sid_gr_model().eval()
    _, at_once = model(sid_batch(rows, 6))
    for budget in (1, 60):  # every user alone, and some together
        monkeypatch.setattr("sid_gr.models.sid_gr._CACHED_TOKENS", budget)
        _, in_chunks = model(sid_batch(rows, 6))
        assert in_chunks.items.tolist() == at_once.items.tolist()
        torch.testing.assert_close(in_chunks.scores, at_once.scores, rtol=1e-5, atol=1e-5)


def test_the_tree_has_every_prefix_once():
    tree = CodeTree(SIDS, CODEBOOK_SIZES)
    assert [tree.num_prefixes(depth) for depth in range(3)] == [3, 5, 7]
    assert tree.max_items_per_tuple == 2
    assert tree.state_dict() == {}
