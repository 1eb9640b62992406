"""Every attention backend computes plain masked attention, its gradients too, or says what it cannot."""

import importlib.util
import math
import re
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import hstu.modules
from hstu.modules import SampleMask, batch_attention
from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.hstu.modules.attention_cases import (
    CASES,
    CAUSAL_CASES,
    MAX_TOKENS,
    SCALING_SEQLEN,
    Case,
    batches,
    dense_attention,
    mask,
)
from tests.hstu.modules.internals import (
    TritonWork,
    running_backend,
    triton_compiler,
    triton_hstu_attention,
)
from tests.hstu.modules.interpreted_attention import IN_PIECES, interpret

CPU, GPU = torch.device("cpu"), torch.device("cuda")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed; the extra kernels installs it",
)
# Norm of the error relative to the result's. Triton's interpreter truncates to bfloat16 instead of rounding.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def check(results: list[torch.Tensor], case: Case) -> None:
    for got, expected in zip(results, case.expected(), strict=True):
        assert got.shape == expected.shape
        assert got.dtype == case.dtype
        error = got.float() - expected
        assert error.norm() <= TOLERANCE[case.dtype] * expected.norm()
        if case.dtype == torch.float32:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", (CASES | CAUSAL_CASES).values(), ids=CASES | CAUSAL_CASES)
def test_pytorch_matches_dense_attention(case):
    check(run_backend("pytorch", case), case)


@pytest.mark.usefixtures("chunk_sizes")
@given(masks=batches(), heads=st.sampled_from([(2, 8), (4, 3)]))
@example([SampleMask(70, 33, 70, 2, True)], (2, 8))  # the prefix ends in a tile's first column
def test_pytorch_is_exact_in_64_bits(masks, heads):
    torch.manual_seed(0)
    drawn = torch.randn(3, sum(mask.num_tokens for mask in masks), *heads, dtype=torch.float64)
    qkv = drawn.requires_grad_().unbind()
    out, expected = batch_attention("pytorch", masks, 7, CPU)(*qkv), dense_attention(qkv, masks, 7)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    grad, expected_grad = (torch.autograd.grad((of * weights).sum(), drawn) for of in (out, expected))
    torch.testing.assert_close(grad, expected_grad)


def test_float16_sums_over_long_samples_stay_finite():
    num_tokens = 2000
    q, k, v = (torch.full((num_tokens, 1, 4), value, dtype=torch.float16) for value in (2, 4, 8))
    out = batch_attention("pytorch", [mask(0, num_tokens)], num_tokens, CPU)(q, k, v)
    weight = 16 * torch.sigmoid(torch.tensor(16.0))  # one token's; the sum over all overflows float16
    torch.testing.assert_close(out[-1].float(), torch.full((1, 4), 8 * weight.item()), rtol=4e-3, atol=0)


def test_a_value_that_is_not_finite_stays_within_its_sample():
    attention = batch_attention("pytorch", [mask(1, 2), mask(1, 19), mask(1, 4)], 7, CPU)  # one chunk
    q, k, v = torch.randn(3, 28, 2, 8, generator=torch.Generator().manual_seed(0))
    expected = attention(q, k, v)
    v[0] = math.inf
    out = attention(q, k, v)
    assert not out[:3].isfinite().all()
    torch.testing.assert_close(out[3:], expected[3:])


def run_backend(backend: str, case: Case) -> list[torch.Tensor]:
    *qkv, grad_out = case.inputs()
    out = batch_attention(backend, case.masks, int(SCALING_SEQLEN), CPU)(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad_out, materialize_grads=True)]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    return interpret(tmp_path_factory.mktemp("interpreted") / "results.pt")


@needs_triton
@pytest.mark.parametrize("name", [*CASES, *IN_PIECES])
def test_triton_matches_dense_attention(name, interpreted):
    case = CASES[name] if name in CASES else Case(tuple(IN_PIECES[name][0]))
    assert sum(one.num_tokens for one in case.masks) <= MAX_TOKENS
    check(interpreted[name], case)


EQUAL, BF16 = [(3, 2, 32)] * 3, torch.bfloat16
ANY_BACKEND = [
    ([(3, 2, 32), (3, 2, 32), (2, 2, 32)], 3, 1.0, r"one shape \[total_tokens, num_heads, head_dim\]"),
    (EQUAL, 4, 1.0, "masks have 4 tokens, but q, k and v have 3"),
    (EQUAL, 3, 0.0, "scaling_seqlen is 0.0"),
]
WRONG = [
    *(("pytorch", BF16, *wrong) for wrong in ANY_BACKEND),
    ("triton", BF16, *ANY_BACKEND[1]),
    ("triton", BF16, [(3, 2, 257)] * 3, 3, 1.0, "head_dim is 257; expected 1 to 256"),
    ("triton", torch.float64, EQUAL, 3, 1.0, "bfloat16, float16 or float32; got torch.float64"),
    ("triton", BF16, EQUAL, 3, 1.0, "q, k and v are on cpu; the Triton kernels need CUDA"),
]


@pytest.mark.parametrize(("backend", "dtype", "shapes", "num_tokens", "scaling_seqlen", "message"), WRONG)
def test_wrong_arguments_are_named(backend, dtype, shapes, num_tokens, scaling_seqlen, message):
    if backend == "triton":
        pytest.importorskip("triton")
    qkv = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    sample = SampleMask(num_tokens, 0, num_tokens, 1, True)
    with pytest.raises(ValueError, match=message):
        batch_attention(backend, [sample], scaling_seqlen, CPU)(*qkv)


def test_without_triton_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delattr(hstu.modules, "triton_kernels", raising=False)
    monkeypatch.delitem(sys.modules, "hstu.modules.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    qkv = [torch.zeros(3, 2, 4) for _ in range(3)]
    with pytest.raises(ImportError, match="pip install triton"):
        triton_hstu_attention(*qkv, TritonWork([mask(0, 3)]), 1.0)


@needs_triton
def test_a_ptxas_that_compiles_wrong_code_is_named_once_on_its_chip(monkeypatch):
    assert re.fullmatch(r"\d+\.\d+\.\d+", triton_compiler.ptxas_version())
    triton_compiler.warn_of_wrong_code.cache_clear()
    with warnings_of("hstu") as records:
        triton_compiler.warn_of_wrong_code((9, 0))
        assert not records
        monkeypatch.setattr(triton_compiler, "_WRONG_PTXAS", triton_compiler.ptxas_version())
        triton_compiler.warn_of_wrong_code((8, 0))
        assert not records
        triton_compiler.warn_of_wrong_code.cache_clear()
        for _ in range(2):
            triton_compiler.warn_of_wrong_code((9, 0))
    assert len(records) == 1 and "TRITON_PTXAS_PATH" in records[0]
    triton_compiler.warn_of_wrong_code.cache_clear()


@pytest.mark.parametrize(
    ("requested", "head_dim", "name", "reason"),
    [
        ("cutlass", 64, "triton", "this trainer has no CUTLASS kernels"),
        ("cutlass", 512, "pytorch", "Triton kernels have heads of width up to 256, not 512"),
        ("triton", 64, "triton", ""),
        ("pytorch", 64, "pytorch", ""),
        ("tritn", 64, "pytorch", "it is none of pytorch, triton, cutlass"),
    ],
)
def test_the_first_backend_that_can_compute_the_model_runs(requested, head_dim, name, reason):
    backend = running_backend(requested, GPU, head_dim)
    if name == "triton" and importlib.util.find_spec("triton") is None:
        name, reason = "pytorch", "triton is not installed"
    assert (backend.name, backend.reason) == (name, reason)
    on_cpu = running_backend(requested, CPU, head_dim)
    assert on_cpu.name == "pytorch"
    if requested in ("cutlass", "triton"):
        assert on_cpu.reason == "there is no GPU"
