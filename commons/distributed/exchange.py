"""Moving samples between ranks as a plan says."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from commons.distributed.rank_group import RankGroup
from commons.distributed.shuffle_plan import ShufflePlan
from commons.sequence_batch.packed_rows import PackedRows, gather_rows
from commons.sequence_batch.row_schema import BUFFER_ALIGNMENT


def all_gather(rows: PackedRows, plan: ShufflePlan, group: RankGroup) -> PackedRows:
    """Sends every sample to every rank, and keeps those that the plan gives to this one.

    One collective, whatever the number of fields and dtypes; every rank receives ranks × the bytes of the
    fullest one. All sizes come from the plan, so there is no host-device synchronisation.

    Args:
        rows: what this rank loaded; the first `plan.num_loaded[rank]` rows are real.
        plan: the placement.
        group: the ranks.

    Returns:
        This rank's samples in the plan's order, without padding.
    """
    schema = rows.schema
    elements_loaded = [
        samples.sum(0).tolist() for samples in np.split(plan.num_elements, plan.home_start[1:])
    ]
    bytes_loaded = np.bincount(plan.home, plan.sample_bytes, minlength=plan.num_ranks)
    size = int(-(-max(bytes_loaded.max(), 1) // BUFFER_ALIGNMENT)) * BUFFER_ALIGNMENT
    packed = _real_rows(rows, int(plan.num_loaded[group.rank]), elements_loaded[group.rank]).to_bytes()
    send = F.pad(packed, (0, size - len(packed)))
    received = send.new_empty(group.num_ranks, size)
    dist.all_gather_into_tensor(received.view(-1), send, group=group.exchange)
    sources = [
        PackedRows.from_bytes(buffer, schema, int(loaded), elements)
        for buffer, loaded, elements in zip(received, plan.num_loaded, elements_loaded, strict=True)
    ]
    samples = plan.partition[group.rank]
    home = plan.home[samples]
    locations = np.stack([samples, plan.home_start[home], plan.num_loaded[home]])
    return gather_rows(
        sources, _to_device(locations, send.device), plan.num_elements[samples].sum(0).tolist()
    )


def _real_rows(rows: PackedRows, num_real: int, num_elements: list[int]) -> PackedRows:
    """The first `num_real` rows, which have `num_elements` elements in each jagged field."""
    if num_real == rows.num_rows:
        return rows
    positions = torch.arange(num_real, device=rows.lengths.device)
    locations = torch.stack(
        [positions, torch.zeros_like(positions), torch.full_like(positions, rows.num_rows)]
    )
    return gather_rows([rows], locations, num_elements)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies without waiting for the device, which takes pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
