import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import hstu
from commons.datasets import HSTUBatch
from hstu.models import HSTUConfig
from hstu.modules import SampleMask, batch_attention, cutlass_attention
from hstu.modules.attention_backend import running_backend
from tests.commons.distributed.counted_collectives import no_synchronization
from tests.hstu.hstu_samples import Sample, hstu_batch, ranking_model
from tests.hstu.modules import cutlass_stand_in
from tests.hstu.modules.cutlass_stand_in import ATTENTION

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCALING_SEQLEN = 40
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs the stand-in, or one with other sources, for one test."""

    def _install(attention: str = ATTENTION) -> Path:
        folder = cutlass_stand_in.install(tmp_path, attention)
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
        importlib.invalidate_caches()
        return folder

    yield _install
    for name in [name for name in sys.modules if name.partition(".")[0] == cutlass_attention.DISTRIBUTION]:
        del sys.modules[name]


def mask(history: int, candidates: int = 0, tokens: int = 2, contextual: int = 0) -> SampleMask:
    history_end = contextual + history
    return SampleMask(history_end + tokens * candidates, contextual, history_end, tokens, is_causal=True)


MASKS = {
    "history": [mask(9), mask(1), mask(33)],
    "candidates of two tokens": [mask(9, 3), mask(0), mask(5), mask(0, 2)],
    "candidates of one token": [mask(9, 3, tokens=1), mask(0, 5, tokens=1)],
    "one contextual token": [mask(9, 3, contextual=1), mask(0, contextual=1)],
    "no tokens": [mask(0), mask(0)],
}


@pytest.mark.parametrize("dtype", cutlass_attention.DTYPES)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_results_are_those_of_pytorch(install, masks, dtype):
    folder = install()
    # Views of one projection, as a layer has them.
    inputs = torch.randn(sum(mask.num_tokens for mask in masks), 4, 2, 32, dtype=dtype).requires_grad_()
    grad = torch.randn_like(inputs[:, 0])
    results = []
    for backend in ("cutlass", "pytorch"):
        out = batch_attention(backend, masks, SCALING_SEQLEN, CPU)(*inputs.unbind(1)[1:])
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for got, expected in zip(*results, strict=True):
        assert got.dtype == dtype and got.shape == expected.shape
        assert (got.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()
    if inputs.numel():
        assert sys.modules["fbgemm_gpu_hstu"].__file__ == str(folder / "hstu/__init__.py")
    assert sys.modules["hstu"] is hstu and str(folder) not in str(hstu.__path__)


def _batch(contextual: int) -> HSTUBatch:
    sample = Sample(list(range(contextual)), [], [5, 6, 7, 8], [0, 1, 2, 3], 2, [2, 3])
    return hstu_batch([sample, Sample([], [], [], [], 0, []), sample])


def test_a_model_has_the_loss_and_gradients_of_pytorch(install):
    install()
    gradients = []
    for backend in ("cutlass", "pytorch"):
        model = ranking_model(dtype=torch.bfloat16, head_dim=32, attention_backend=backend)
        loss, _ = model(_batch(contextual=1))
        loss.backward()
        gradients.append(torch.cat([loss.view(1), *(x.grad.flatten() for x in model.dense.parameters())]))
    got, expected = gradients
    assert (got - expected).norm() <= 2e-2 * expected.norm()


def test_contextual_tokens_that_see_each_other_are_refused(install):
    install()
    model = ranking_model(dtype=torch.bfloat16, head_dim=32, attention_backend="cutlass")
    with pytest.raises(ValueError, match="lets 2 tokens see each other; the CUTLASS kernels need causal"):
        model(_batch(contextual=2))


OLD = ATTENTION.replace(" scaling_seqlen,", "").replace("scaling_seqlen", "max_seqlen_q")


DIFFERS = "the installed fbgemm_gpu_hstu gives other results than PyTorch"
INSTALLATIONS = {
    "complete": (ATTENTION, ""),
    "without kernels": (ATTENTION.replace("torch.cat(out)", "(0 * torch.cat(out))"), DIFFERS),
    "without kernels for batches without candidates": (
        ATTENTION.replace("torch.cat(out)", "((num_targets is not None) * torch.cat(out))"),
        DIFFERS,
    ),
    "ignores candidates": (ATTENTION.replace("num_targets[sample]", "0 * num_targets[sample]"), DIFFERS),
    "one token per candidate": (ATTENTION.replace(" // target_group_size * target_group_size", ""), DIFFERS),
    "divides by the longest sample": (ATTENTION.replace("/ scaling_seqlen)", "/ max_seqlen_q)"), DIFFERS),
    "old": (OLD, "fbgemm_gpu_hstu fails: hstu_attn_varlen_func() got an unexpected keyword argument"),
    "of another torch": (
        "raise OSError('undefined symbol')",
        "fbgemm_gpu_hstu does not load: undefined symbol",
    ),
}


@pytest.mark.parametrize(("attention", "reason"), INSTALLATIONS.values(), ids=INSTALLATIONS)
def test_an_installation_is_tried_before_it_is_used(install, attention, reason):
    install(attention)
    found = cutlass_attention.disagreement(32, torch.bfloat16, CPU)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_missing_package_is_named():
    assert cutlass_attention.disagreement(32, torch.float16, CPU) == "fbgemm_gpu_hstu is not installed"


MODEL = {"head_dim": 64, "dtype": torch.bfloat16, "is_causal": True, "num_contextual": 1}
UNSUPPORTED = [
    ({"dtype": torch.float32}, "CUTLASS kernels take bfloat16 and float16, not float32"),
    ({"head_dim": 48}, "CUTLASS kernels have heads of width 32, 64, 128, 256, not 48"),
    ({"is_causal": False}, "CUTLASS kernels take candidates only if attention is causal"),
    ({"num_contextual": 2}, "in CUTLASS kernels, contextual tokens see the whole history"),
]


@pytest.mark.parametrize(("settings", "reason"), UNSUPPORTED)
def test_what_cutlass_cannot_compute_runs_in_triton(settings, reason):
    backend = running_backend("cutlass", CPU, **MODEL | settings)
    assert (backend.name, backend.reason) == ("pytorch", "there is no GPU")
    backend = running_backend("cutlass", GPU, **MODEL | settings)
    has_triton = importlib.util.find_spec("triton") is not None
    assert backend.name == ("triton" if has_triton else "pytorch")
    assert backend.reason.startswith(reason)
    assert backend.reason.endswith("triton is not installed") != has_triton


def test_a_head_too_wide_for_any_kernel_runs_in_pytorch():
    for requested in ("cutlass", "triton"):
        backend = running_backend(requested, GPU, **MODEL | {"head_dim": 512})
        assert backend.name == "pytorch"
        assert backend.reason.endswith("Triton kernels have heads of width up to 256, not 512")


def test_a_backend_that_runs_has_no_reason():
    assert running_backend("pytorch", GPU, **MODEL).reason == ""
    assert running_backend("tritn", GPU, **MODEL).reason == "it is none of pytorch, triton, cutlass"
    backend = running_backend("triton", GPU, **MODEL)
    assert (backend.name, backend.reason) in [("triton", ""), ("pytorch", "triton is not installed")]


@pytest.mark.parametrize(("settings", "reason"), UNSUPPORTED[:3])
def test_a_configuration_refuses_what_cutlass_cannot_compute(settings, reason):
    fitting = {"head_dim": 64, "attention_backend": "cutlass"}
    with pytest.raises(ValueError, match=f'attention_backend is "cutlass", but {reason}'):
        HSTUConfig(num_layers=1, hidden_size=8, num_heads=1, scaling_seqlen=9, **fitting | settings)


@pytest.mark.parametrize(
    ("shape", "dtype", "num_tokens", "message"),
    [
        ((3, 2, 32), torch.bfloat16, 4, "masks have 4 tokens, but q, k and v have 3"),
        ((3, 2, 32), torch.float32, 3, "are torch.float32, .*; expected all bfloat16 or all float16"),
        ((3, 2, 40), torch.float16, 3, r"head_dim is 40; expected one of \(32, 64, 128, 256\)"),
    ],
)
def test_wrong_arguments_are_named(shape, dtype, num_tokens, message):
    with pytest.raises(ValueError, match=message):
        batch_attention("cutlass", [mask(num_tokens)], 1, CPU)(*(torch.zeros(shape, dtype=dtype),) * 3)


def test_a_batch_is_prepared_without_reading_from_the_device():
    with no_synchronization():
        batch_attention("cutlass", MASKS["candidates of two tokens"], SCALING_SEQLEN, CPU)


def test_samples_of_a_batch_have_one_kind_of_candidate():
    with pytest.raises(ValueError, match=r"masks have tokens_per_candidate \[1, 2\]; expected one per batch"):
        batch_attention("cutlass", [mask(3, tokens=1), mask(3)], 1, CPU)
