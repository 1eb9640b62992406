"""Checkpoints are whole or refused, whatever happens to the disk or to their files."""

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.commons.distributed.errors_and_warnings import error_of_all
from tests.commons.training.internals import CONTENTS_FILE, Checkpoints, PlainReader, TrainingState


def _state(num_bytes: int) -> dict[str, torch.Tensor]:
    return {f"rank{dist.get_rank()}.{part}": torch.ones(num_bytes // 8) for part in "ab"}


def _save_two(path: str, marker: Path | None = None) -> None:
    """Saves checkpoints of steps 2 and 4; with a marker, their value runs a command that makes the file."""
    value, checkpoints = 1 if marker is None else _Command(marker), Checkpoints(Path(path))
    for step in (2, 4):
        checkpoints.save(step, {"value": value} | _state(4096), {"seed": 7})
        checkpoints.finish()


def _newest(path: str) -> tuple[Path | None, list[str]]:
    return Checkpoints(Path(path)).newest()


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory) -> Path:
    """A folder of two checkpoints, which tests may damage as long as they mend it."""
    folder = tmp_path_factory.mktemp("saved")
    pools(2).run(_save_two, str(folder))
    return folder


@contextmanager
def _changed(path: Path, data: bytes | None) -> Iterator[None]:
    """While active, a file has other content, or is missing."""
    before = path.read_bytes()
    path.unlink() if data is None else path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def _assert_skipped(pools, folder: Path, problem: str) -> None:
    (newest, problems), on_other_rank = pools(2).run(_newest, str(folder))
    assert newest == folder / "step_2" and (newest, problems) == on_other_rank
    (line,) = problems
    assert line.startswith(f"{folder}/step_4 is damaged and is skipped: ") and problem in line


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        (CONTENTS_FILE, None, "contents.json cannot be read"),
        (CONTENTS_FILE, b"[]", "contents.json does not list its files"),
        (
            CONTENTS_FILE,
            b'{".metadata": 23, "settings.json": 1}',
            "contents.json has 23 for .metadata, expected",
        ),
        ("__1_0.distcp", b"", "__1_0.distcp has 0 bytes"),
        ("__0_0.distcp", None, "__0_0.distcp cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_on_all_ranks(pools, saved, name, data, problem):
    assert pools(2).run(_newest, str(saved)) == [(saved / "step_4", [])] * 2
    with _changed(saved / "step_4" / name, data):
        _assert_skipped(pools, saved, problem)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_found_in_any_file_that_is_listed(pools, saved, data):
    names = json.loads((saved / "step_4" / CONTENTS_FILE).read_text())
    path = saved / "step_4" / data.draw(st.sampled_from(sorted(names)))
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    with _changed(path, bytes(content)):
        _assert_skipped(pools, saved, f"{path.name} has changed")


class _Command:
    def __init__(self, marker: Path) -> None:
        self._command = f"touch {marker}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self._command,)


def _load(path: str) -> None:
    checkpoints = Checkpoints(Path(path))
    newest, _ = checkpoints.newest()
    checkpoints.keys(newest)
    checkpoints.load(newest, {"value": 0})


def _keys(checkpoint: str) -> set[str]:
    return Checkpoints(Path(checkpoint).parent).keys(Path(checkpoint))


def test_a_checkpoint_that_would_run_a_command_is_refused(pools, tmp_path):
    marker, newest = tmp_path / "ran", tmp_path / "crafted/step_4"
    pools(2).run(_save_two, str(newest.parent), marker)
    refused, _ = pools(2).run(error_of_all, _load, str(newest.parent))
    assert "value is refused: it is not plain data" in refused
    (newest / ".metadata").write_bytes(pickle.dumps(_Command(marker)))
    refused, _ = pools(2).run(error_of_all, _keys, str(newest))
    assert ".metadata is refused: it names posix.system" in refused
    assert not marker.exists()


@pytest.mark.parametrize(
    ("pickled", "refused"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"cbuiltins\ngetattr\n(ctorch\nSize\nS'count'\ntR.", "it holds a GenericAlias"),
        (pickle.dumps(7), "int"),
        (b"random", ""),
    ],
)
def test_metadata_of_anything_else_is_refused(tmp_path, pickled, refused):
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises(ValueError, match=f"^{tmp_path}/.metadata is refused: .*{refused}"):
        PlainReader(tmp_path).read_metadata()


def test_an_enum_pickled_by_name_is_read(tmp_path):
    member = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    member += b"S'TORCH_CHANNELS_LAST'\ntR"
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n((d" + member + b"tR."
    (tmp_path / ".metadata").write_bytes(metadata)
    assert PlainReader(tmp_path).read_metadata().planner_data.name == "TORCH_CHANNELS_LAST"


class _Learned:
    """Stands in for `LearnedCosts` of a rank that learns alone."""

    num_ranks = 1

    def state(self) -> dict[str, bytes]:
        return {"learned": b"costs of %d" % dist.get_rank(), "times": b"times of %d" % dist.get_rank()}

    def load_state(self, state: dict[str, bytes]) -> None:
        self.loaded = state


def _costs_of_sets(folder: str) -> bool:
    checkpoints, learned = Checkpoints(Path(folder)), _Learned()
    state = TrainingState(torch.nn.Linear(1, 1), None)
    state.follow(learned)
    checkpoints.save(1, state.to_save(), state.settings_to_save())
    checkpoints.finish()
    resumed, (newest, _) = TrainingState(torch.nn.Linear(1, 1), None), checkpoints.newest()
    resumed.restore(checkpoints, newest)
    resumed.follow(learned)
    return learned.loaded == learned.state()


def test_ranks_that_learn_apart_get_their_own_costs_back(pools, tmp_path):
    assert pools(2).run(_costs_of_sets, str(tmp_path)) == [True, True]
