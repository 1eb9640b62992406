"""The version of ptxas that compiles kernels like HSTU's wrong is named once, on the chip that it is for."""

import importlib.util
import re

import pytest

from tests.commons.distributed.errors_and_warnings import warnings_of
from tests.hstu.modules.internals import triton_compiler


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_wrong_version_is_named_once_on_its_chip(monkeypatch):
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
