"""A setting of version 0.1.0 that is gone is refused by an error that says what to do."""

import pytest

from commons.datasets.gin_values import GONE, parse_gin
from commons.distributed import BatchShufflerFactory
from commons.training import TrainerArgs


@pytest.mark.parametrize("name", GONE)
def test_a_gin_file_with_a_gone_setting_learns_what_to_do(name, tmp_path):
    path = tmp_path / "config.gin"
    path.write_text(f"{TrainerArgs.__name__}.{name} = 1\n")
    with pytest.raises(ValueError, match=f"{name} is gone since 0.1.0: delete it") as error:
        parse_gin(path, [])
    assert str(path) in str(error.value)
    with pytest.raises(ValueError, match="doesn't have a parameter named 'unknown'") as error:
        path.write_text("")
        parse_gin(path, ["TrainerArgs.unknown = 1"])
    assert "gone" not in str(error.value)


def test_an_identity_shuffler_with_a_gone_setting_learns_what_to_do():
    with pytest.raises(TypeError, match=r"no longer takes \['get_workloads', 'unit'\]: use your own"):
        BatchShufflerFactory.create("identity", get_workloads=len, unit="items")
