"""Registries of shufflers and pipelines."""

from __future__ import annotations

import pytest

from commons.distributed import BatchShuffler, BatchShufflerFactory, IdentityShuffler, register_batch_shuffler
from commons.pipeline import TrainPipelineFactory


class OwnShuffler(BatchShuffler):
    def get_workloads(self, batch):
        return batch.num_tokens()


def test_a_shuffler_is_registered_created_and_unregistered():
    assert register_batch_shuffler("own")(OwnShuffler) is OwnShuffler
    try:
        assert BatchShufflerFactory.is_registered("own")
        assert "own" in BatchShufflerFactory.list_available()
        assert isinstance(BatchShufflerFactory.create("own", equal_rows=False), OwnShuffler)
        made = BatchShufflerFactory.create_from_config({"type": "own", "equal_rows": False})
        assert isinstance(made, OwnShuffler) and not made.settings.equal_rows
        with pytest.raises(ValueError, match="'own' is already registered, as OwnShuffler"):
            register_batch_shuffler("own")(IdentityShuffler)
    finally:
        BatchShufflerFactory.unregister("own")
    assert not BatchShufflerFactory.is_registered("own")


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


def test_identity_takes_the_settings_of_any_shuffler():
    shuffler = BatchShufflerFactory.create(
        "identity", process_group=None, partitioner="karmarkar_karp", exchange="all_gather", equal_rows=False
    )
    assert shuffler.group.num_ranks == 1


def test_only_shufflers_can_be_registered():
    with pytest.raises(TypeError, match="'x': <class 'dict'> is not a subclass of BatchShuffler"):
        register_batch_shuffler("x")(dict)


@pytest.mark.parametrize("call", ["create", "unregister"])
@pytest.mark.parametrize(
    ("factory", "listed"), [(BatchShufflerFactory, "identity"), (TrainPipelineFactory, "'native', 'none'")]
)
def test_an_unknown_name_lists_the_registered_ones(factory, listed, call):
    with pytest.raises(KeyError, match=f"unknown .* 'nothing'; registered are .*{listed}"):
        getattr(factory, call)("nothing")


def test_a_config_without_type_is_refused():
    with pytest.raises(KeyError, match="needs a"):
        BatchShufflerFactory.create_from_config({"equal_rows": True})
