"""A check that tensors share no memory."""

from typing import Any

from tests.drawn_batches import tensors_of


def check_own_memory(batch: Any, *others: Any) -> None:
    """Checks that every tensor of a batch has memory of its own, and no other has it."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.numel()]
    of_others = [tensor for other in others for tensor in tensors_of(other) if tensor.numel()]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    every = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    every += {tensor.untyped_storage().data_ptr() for tensor in of_others}
    assert len(set(every)) == len(every)
