"""Training with the stage off, on, and off again, in alternating blocks."""

from __future__ import annotations

import gin
import torch
import torch.distributed as dist

from benchmarks.demo.training import ARMS, AS_LOADED, DEFAULT, make_arm, parse_config
from benchmarks.harness import Record, compare_times, summarize, train_in_turn
from commons.datasets.gin_values import from_gin
from commons.training import TrainerArgs

OFF, ON, OFF_AGAIN = "off", "on", "off again"
WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK = 3, 20, 5
OF_A_REHEARSAL = 1, 2, 1  # the same numbers, without GPUs
# The demo's model is sized for CPUs. A step of this model takes tens of milliseconds on a GPU.
LARGER_MODEL = {
    "NetworkArgs.num_layers": 8,
    "NetworkArgs.hidden_size": 512,
    "NetworkArgs.num_attention_heads": 8,
    "RankingArgs.prediction_head_arch": [512, 5],
    "TrainerArgs.train_batch_size": 32,
}


def train(device: torch.device) -> Record:
    """Trains on this rank, and returns the throughput, losses, and imbalance of each arm."""
    make_task = parse_config("hstu")
    on_gpu = device.type == "cuda"
    if on_gpu:
        with gin.unlock_config():
            for name, value in LARGER_MODEL.items():
                gin.bind_parameter(name, value)
    settings = {OFF: ARMS[AS_LOADED], ON: ARMS[DEFAULT], OFF_AGAIN: ARMS[AS_LOADED]}
    arms = {name: make_arm(make_task, of, device) for name, of in settings.items()}
    warm_up, blocks, steps = (WARM_UP_STEPS, BLOCKS, STEPS_PER_BLOCK) if on_gpu else OF_A_REHEARSAL
    train_in_turn(arms.values(), blocks, "train off, on, off again", steps, warm_up)
    samples = from_gin(TrainerArgs).train_batch_size * dist.get_world_size()
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "backend": dist.get_backend_config(),
        "steps": blocks * steps,
        "samples_per_second": {
            name: summarize([samples / seconds for seconds in arm.block_seconds])
            for name, arm in arms.items()
        },
        "imbalance": {
            name: summarize([report.imbalance_after for report in arm.reports]) for name, arm in arms.items()
        },
        "on_against_off": compare_times(arms[OFF], arms[ON]),
        "off_again_against_off": compare_times(arms[OFF], arms[OFF_AGAIN]),
        "losses": {name: arm.losses for name, arm in arms.items()},
        "max_relative_loss_difference": {
            name: arms[name].difference_of_losses(arms[OFF]) for name in (ON, OFF_AGAIN)
        },
    }
