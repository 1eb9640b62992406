import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hstu.modules.cutlass_stand_in import ATTENTION
from tests.hstu.modules.internals import attention_tiles, cutlass_attention


@pytest.fixture(
    params=[(1, 1, 1), (1, 1 << 20, 1), (1 << 20, 1 << 20, 1), (1 << 20, 1 << 20, 3)],
    ids=["head by head", "sample by sample", "together", "long blocks"],
)
def chunk_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with small and large chunks of the CPU path, and with longer blocks of rows."""
    for name, size in zip(
        ("CPU_CHUNK_BYTES", "CPU_HEADS_BYTES", "CPU_ROW_TILES"), request.param, strict=True
    ):
        monkeypatch.setattr(attention_tiles, name, size)


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs the stand-in for the CUTLASS kernels, or one with other sources, for one test."""

    def _install(attention: str = ATTENTION) -> Path:
        for name, text in {
            "fbgemm_gpu_hstu-0.1.0.dist-info/METADATA": "Name: fbgemm_gpu_hstu\nVersion: 0.1.0\n",
            "hstu/__init__.py": "from .cuda_hstu_attention import hstu_attn_varlen_func\n",
            "hstu/cuda_hstu_attention.py": attention,
        }.items():
            file = tmp_path / name  # which stands for site-packages
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        importlib.invalidate_caches()
        return tmp_path

    yield _install
    for name in [name for name in sys.modules if name.partition(".")[0] == cutlass_attention.DISTRIBUTION]:
        del sys.modules[name]
