"""A shuffler, a model and batches for the Python block of the page about what stays equal."""

from typing import Any

from tests.docs.preludes.readme import OptimizerArgs, _batch, _Model, device, shard_model


def load_batches() -> list[Any]:
    return [_batch() for _ in range(3)]


def build_model() -> tuple[Any, Any]:
    return shard_model(_Model(), OptimizerArgs("sgd", 0.01), device)
