"""Paths as a shell reads them."""

from pathlib import Path

import pytest

from commons.perf_model import Cost
from commons.training import TrainerArgs


def test_home_and_variables_are_replaced_wherever_a_path_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    Cost((0.0, 0.0, 1.0)).save(tmp_path / "scratch" / "cost.json")
    args = TrainerArgs(
        4, log_dir="~/logs", ckpt_save_dir="${SCRATCH}/ckpt", balance_cost="~/scratch/cost.json"
    )
    assert (args.log_dir, args.ckpt_save_dir) == (f"{tmp_path}/logs", f"{tmp_path}/scratch/ckpt")
    assert args.cost_file() == tmp_path / "scratch" / "cost.json"
    assert TrainerArgs(4).ckpt_save_dir == "./checkpoints" and Path("~").expanduser() == tmp_path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/ckpt", "ckpt_save_dir = 's3://bucket/ckpt' is a s3 address; expected a path on a disk"),
        ("hdfs:/ckpt", "is a hdfs address"),
        ("~nobody-here/ckpt", "names the home of a user that this machine does not have"),
        ("$NOWHERE/ckpt", r"names \$NOWHERE, which is not set: export it"),
    ],
)
def test_addresses_and_variables_that_are_not_set_are_refused(path, message):
    with pytest.raises(ValueError, match=message):
        TrainerArgs(4, ckpt_save_dir=path)
