import pytest

from tests.hstu.modules.internals import attention_tiles


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
