"""The life of one rank's process: its process group, its device, and its end, good or bad."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def rank_process() -> Iterator[torch.device]:
    """Joins the process group that torchrun describes, and leaves it when all ranks are done.

    NCCL with gloo for host tensors if there are GPUs, else gloo. Without torchrun the process is the only rank.

    Yields:
        This rank's device.
    """
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    yield device
    # A gloo process that ends while others still talk to it aborts, and so do they.
    dist.barrier()
    dist.destroy_process_group()


def run_rank(main: Callable[[], None]) -> None:
    """Runs `main`; if it fails, prints the first cause among all ranks once and exits with 1 at once.

    When a rank fails, the others fail soon after, in whatever collective they were; only the rank that failed
    first reports. Leaving without clean-up is what stops the others: a clean-up would wait for them.
    """
    try:
        main()
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        if _is_first_failure():
            rank = os.environ.get("RANK", "0")
            print(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _is_first_failure() -> bool:
    """Asks torchrun's store, which outlives the ranks; True where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=10),
        )
        # One count per attempt: torchrun restarts failed ranks with the same store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"balanced_training/failures/{attempt}", 1) == 1
    except Exception:  # better a cause shown twice than not at all
        return True
