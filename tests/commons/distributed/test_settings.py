"""Settings of shufflers, and the registries that make shufflers and pipelines; wrong ones are refused."""

import pytest

from commons.distributed import (
    PARTITIONERS,
    BatchShuffler,
    BatchShufflerFactory,
    IdentityShuffler,
    register_batch_shuffler,
)
from commons.pipeline import TrainPipelineFactory


class OwnShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.num_tokens()


@pytest.fixture
def registered(monkeypatch):
    """A shuffler and a partitioner of a user's own, by their names."""
    monkeypatch.setitem(PARTITIONERS, "mine", lambda workloads, num_partitions: [])
    assert register_batch_shuffler("own")(OwnShuffler) is OwnShuffler
    yield
    BatchShufflerFactory.unregister("own")
    assert not BatchShufflerFactory.is_registered("own")


def test_a_registered_shuffler_is_created_by_its_name(registered):
    assert BatchShufflerFactory.is_registered("own")
    assert {"own", "identity"} <= set(BatchShufflerFactory.list_available())
    for made in (
        BatchShufflerFactory.create("own", equal_rows=False),
        # A partitioner without `equal_size` may place unequal rows.
        BatchShufflerFactory.create_from_config({"type": "own", "equal_rows": False, "partitioner": "mine"}),
    ):
        assert isinstance(made, OwnShuffler) and not made.settings.equal_rows
    settings = {"partitioner": "karmarkar_karp", "exchange": "all_gather", "equal_rows": False}
    assert isinstance(
        BatchShufflerFactory.create("identity", process_group=None, **settings), IdentityShuffler
    )


@pytest.mark.parametrize("factory", [BatchShufflerFactory, TrainPipelineFactory])
def test_a_cleared_registry_is_empty_and_takes_all_names_again(factory):
    classes = dict(factory._classes)
    try:
        factory.clear_registry()
        assert factory.list_available() == []
        assert not factory.is_registered("identity")
    finally:
        for name, implementation in classes.items():
            factory.register(name, implementation)
    assert factory.list_available() == sorted(classes)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"partitioner": "nothing"}, KeyError, "unknown partitioner='nothing'; there are"),
        ({"exchange": "nothing"}, KeyError, "unknown exchange='nothing'; there are"),
        ({"tolerance": -0.1}, ValueError, "tolerance=-0.1: expected"),
        ({"token_tolerance": float("inf")}, ValueError, "token_tolerance=inf: expected"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0: expected an integer"),
        (
            {"partitioner": "karmarkar_karp", "tolerance": 0.1},
            ValueError,
            "tolerance=0.1 has no effect on partitioner='karmarkar_karp': leave it None",
        ),
        (
            {"partitioner": "karmarkar_karp", "max_tokens": 9},
            ValueError,
            "max_tokens=9: partitioner='karmarkar_karp' has no argument max_tokens; choose another",
        ),
        (
            {"partitioner": "mine"},
            ValueError,
            "equal_rows=True: partitioner='mine' has no argument equal_size",
        ),
        ({"tolerence": 0.1}, TypeError, "unexpected keyword argument 'tolerence'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_every_shuffler(registered, settings, kind, words):
    for name in ("own", "identity"):
        with pytest.raises(kind, match=words):
            BatchShufflerFactory.create(name, **settings)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: register_batch_shuffler("own")(IdentityShuffler), ValueError, "'own' .*, as OwnShuffler"),
        (lambda: register_batch_shuffler("x")(dict), TypeError, "'x': <class 'dict'> is not a subclass of"),
        (lambda: BatchShufflerFactory.create_from_config({"equal_rows": True}), KeyError, "needs a"),
        (lambda: BatchShufflerFactory.create("nothing"), KeyError, "'nothing'; registered are .*identity"),
        (lambda: TrainPipelineFactory.create("nothing"), KeyError, "'nothing'; .*'native', 'none'"),
    ],
)
def test_names_and_classes_that_a_factory_cannot_use_are_refused(registered, call, kind, words):
    with pytest.raises(kind, match=words):
        call()
