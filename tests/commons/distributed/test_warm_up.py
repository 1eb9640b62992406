"""A shuffler compiles at its start all that its settings reach, and nothing that only others do."""

from __future__ import annotations

import pytest

from tests.commons.distributed.compiled_kernels import before_and_after_placing


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"equal_rows": False, "max_tokens": 20_000},
        {"partitioner": "longest_processing_time", "max_tokens": 20_000},
        {"partitioner": "karmarkar_karp"},
    ],
)
def test_no_step_compiles(settings):
    before, after = before_and_after_placing(**settings)
    assert before == after and len(before) > 4
    assert "_level" not in before and "_placed" not in before  # pieces and groups
    assert ("search_to" in before) == ("partitioner" not in settings)
