from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from commons.datasets import RandomSIDSource, SequenceDataset, SIDDatasetSpec, random_item_sids
from sid_gr.models import SIDGR, CodeTree, SIDGRConfig
from sid_gr.modules import DecoderConfig
from tests.commons.histories import keyed
from tests.sid_gr.internals import NetworkArgs
from tests.sid_gr.reference import log_probabilities, reference_states
from tests.sid_gr.sid_samples import (
    CODEBOOK_SIZES,
    ITEM_CODES,
    Sample,
    samples,
    sid_batch,
    sid_gr_model,
)


def reference_loss(model, sample: Sample) -> torch.Tensor:
    states = reference_states(model, sample)
    first = len(sample.tags) + len(sample.country) + len(CODEBOOK_SIZES) * len(sample.history)
    losses = []
    for index, row in enumerate(sample.candidates):
        for h, code in enumerate(ITEM_CODES[row]):
            state = states[first + index * (len(CODEBOOK_SIZES) + 1) + h]
            losses.append(-log_probabilities(model, state, tuple(ITEM_CODES[row, :h]), ITEM_CODES)[code])
    return torch.stack(losses).sum()


@given(
    rows=st.lists(samples(), min_size=1, max_size=4),
    padding=st.integers(0, 2),
    share_lm_head=st.booleans(),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    gated_mlp=st.booleans(),
)
@example([Sample([], [4], [])], 1, False, 2, True)  # BOS is all there is to predict the target from
def test_loss_is_that_of_each_sample_by_itself(rows, padding, share_lm_head, num_kv_heads, gated_mlp):
    model = sid_gr_model(share_lm_head=share_lm_head, num_kv_heads=num_kv_heads, gated_mlp=gated_mlp)
    batch = sid_batch(rows, len(rows) + padding)
    loss, output = model(batch)
    assert output is None
    expected = torch.stack([reference_loss(model, row) for row in rows]).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(loss, list(model.parameters()))
    wanted = torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True)
    for ours, reference in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    assert int(batch.num_loss_tokens().sum()) == sum(3 * len(row.candidates) for row in rows)
    num_tokens = [len(reference_states(model, row)) for row in rows] + [0] * padding
    assert batch.num_tokens().tolist() == num_tokens


def test_a_batch_without_tokens_has_no_loss_and_zero_gradients():
    model = sid_gr_model()
    batch = sid_batch([], 1)
    loss, _ = model(batch)
    loss.backward()
    assert loss.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    model.eval()
    _, output = model(batch)
    assert output.items.shape == output.scores.shape == (0, 4) and len(output.targets) == 0


@pytest.mark.parametrize(("num_hierarchies", "max_candidate_length"), [(1, 1), (2, 2), (4, 1), (4, 0)])
def test_any_number_of_hierarchies(num_hierarchies, max_candidate_length):
    sizes = (6, 3, 2, 4)[:num_hierarchies]
    sids = random_item_sids(sizes, 12, seed=0)
    spec = SIDDatasetSpec(sizes, max_history_length=4, max_candidate_length=max_candidate_length)
    config = SIDGRConfig(DecoderConfig(2, 8, 2, 4), top_k=len(sids.items), dtype=torch.float32)
    model = SIDGR(config, CodeTree(sids, sizes)).eval()
    (batch,) = SequenceDataset(RandomSIDSource(sids, spec, None, 5, seed=0), batch_size=6)
    loss, output = model(batch)
    own_losses = [model(batch.index_select([row]))[0] for row in range(len(output.items))]
    torch.testing.assert_close(loss, torch.stack(own_losses).sum())
    for items, scores, target, own_loss in zip(
        output.items, output.scores, output.targets, own_losses, strict=True
    ):
        assert sorted(items.tolist()) == sids.items.tolist()
        if max_candidate_length == 1:  # then the target's codes are all that the loss is about
            torch.testing.assert_close(scores[items == target].sum(), -own_loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_single(dtype):
    rows = [Sample([0, 3, 5], [7], [1]), Sample([], [2, 8], []), Sample([1] * 5, [0], [2, 3])]
    batch, (single, half) = sid_batch(rows, 4), (sid_gr_model(), sid_gr_model(dtype=dtype))
    (expected, wanted), (loss, got) = (_loss_and_gradient(model, batch) for model in (single, half))
    assert expected.dtype == loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    assert float((got - wanted).norm() / wanted.norm()) < 0.1
    scores = [model.eval()(batch)[1].scores for model in (single, half)]
    torch.testing.assert_close(scores[1], scores[0], rtol=0.05, atol=0.1)


def _loss_and_gradient(model, batch):
    loss, _ = model(batch)
    return loss, torch.cat([of.flatten() for of in torch.autograd.grad(loss, list(model.parameters()))])


def test_a_batch_that_is_not_the_models_is_refused():
    model = sid_gr_model()
    batch = sid_batch([Sample([0], [1], [])])
    batch.contextual_feature_names = []
    with pytest.raises(ValueError, match=r"contextual features \[\] and 3 hierarchies; the model"):
        model(batch)
    batch = sid_batch([Sample([0], [1], [])])
    batch.features = keyed({"tags": [1], "history": [2], "candidate": [3], "country": [0]}, torch.arange(6))
    with pytest.raises(ValueError, match="row 0 has 2 history and 3 candidate codes; expected multiples"):
        model(batch)
    with pytest.raises(ValueError, match="row 0 has no candidate"):
        model(replace(sid_batch([], 2), actual_batch_size=1))


def test_settings_of_hstu_layers_have_no_effect():
    args = NetworkArgs(1, 8, 1, 8, kernel_backend="cutlass", recompute_input_silu=True)
    backend, recompute = args.settings_without_effect()
    assert 'kernel_backend = "cutlass"' in backend and "PyTorch" in backend
    assert "recompute_input_silu" in recompute
