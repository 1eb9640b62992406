import importlib.util

import pytest
import torch

from hstu.models import HSTUConfig
from hstu.modules import batch_attention
from tests.commons.distributed.counted_collectives import no_synchronization
from tests.hstu.hstu_samples import Sample, hstu_batch, ranking_model
from tests.hstu.modules.attention_cases import CAUSAL, mask
from tests.hstu.modules.cutlass_stand_in import ATTENTION
from tests.hstu.modules.internals import cutlass_attention, running_backend

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_contextual_tokens_that_see_each_other_are_refused(install):
    install()
    model = ranking_model(dtype=torch.bfloat16, head_dim=32, attention_backend="cutlass")
    model(hstu_batch([Sample([1], [], [5, 6], [0, 1], 1, [1])]))[0].backward()
    with pytest.raises(ValueError, match="lets 2 tokens see each other; the CUTLASS kernels need causal"):
        model(hstu_batch([Sample([1, 2], [], [5, 6], [0, 1], 1, [1])]))


OLD = ATTENTION.replace(" scaling_seqlen,", "").replace("scaling_seqlen", "max_seqlen_q")
DIFFERS = "the installed fbgemm_gpu_hstu gives other results than PyTorch"
INSTALLATIONS = {
    "complete": (ATTENTION, ""),
    "without kernels for batches without candidates": (
        ATTENTION.replace("torch.cat(out)", "((num_targets is not None) * torch.cat(out))"),
        DIFFERS,
    ),
    "ignores candidates": (ATTENTION.replace("num_targets[sample]", "0 * num_targets[sample]"), DIFFERS),
    "one token per candidate": (ATTENTION.replace(" // target_group_size * target_group_size", ""), DIFFERS),
    "divides by the longest sample": (ATTENTION.replace("/ scaling_seqlen)", "/ max_seqlen_q)"), DIFFERS),
    "old": (OLD, "fbgemm_gpu_hstu fails: hstu_attn_varlen_func() got an unexpected keyword argument"),
    "of another torch": ("raise OSError('no symbol')", "fbgemm_gpu_hstu does not load: no symbol"),
}


@pytest.mark.parametrize(("attention", "reason"), INSTALLATIONS.values(), ids=INSTALLATIONS)
def test_an_installation_is_tried_before_it_is_used(install, attention, reason):
    install(attention)
    found = cutlass_attention.disagreement(32, torch.bfloat16, CPU)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_missing_package_is_named():
    assert cutlass_attention.disagreement(32, torch.float16, CPU) == "fbgemm_gpu_hstu is not installed"


MODEL = {"head_dim": 64, "dtype": torch.bfloat16, "is_causal": True, "num_contextual": 1}


@pytest.mark.parametrize(
    ("requested", "settings", "name", "reason"),
    [
        ("cutlass", {"dtype": torch.float32}, "triton", "kernels take bfloat16 and float16, not float32"),
        (
            "cutlass",
            {"head_dim": 48},
            "triton",
            "kernels have heads of width 32, 64, 128, 256, not 48",
        ),
        ("cutlass", {"is_causal": False}, "triton", "take candidates only if attention is causal"),
        ("cutlass", {"num_contextual": 2}, "triton", "contextual tokens see the whole history"),
        ("cutlass", {"head_dim": 512}, "pytorch", "Triton kernels have heads of width up to 256, not 512"),
        ("triton", {}, "triton", ""),
        ("pytorch", {}, "pytorch", ""),
        ("tritn", {}, "pytorch", "it is none of pytorch, triton, cutlass"),
    ],
)
def test_the_first_backend_that_can_compute_the_model_runs(requested, settings, name, reason):
    backend = running_backend(requested, GPU, **MODEL | settings)
    if name == "triton" and importlib.util.find_spec("triton") is None:
        assert backend.name == "pytorch" and backend.reason.endswith("triton is not installed")
    else:
        assert backend.name == name and bool(backend.reason) == bool(reason)
    assert reason in backend.reason
    if requested in ("cutlass", "triton"):
        assert running_backend(requested, CPU, **MODEL | settings).reason == "there is no GPU"


def test_a_configuration_refuses_what_cutlass_cannot_compute():
    with pytest.raises(ValueError, match='attention_backend is "cutlass", but CUTLASS kernels have heads'):
        HSTUConfig(1, 8, 1, 48, scaling_seqlen=9, attention_backend="cutlass")


def test_a_batch_is_prepared_without_reading_from_the_device():
    with no_synchronization():
        batch_attention("cutlass", CAUSAL["candidates of two tokens"], 40, CPU)


def test_samples_of_a_batch_have_one_kind_of_candidate():
    with pytest.raises(ValueError, match=r"tokens_per_candidate \[1, 2\]; expected one per batch"):
        batch_attention("cutlass", [mask(0, 3, tokens=1), mask(0, 3)], 1, CPU)
