"""What samples cost, and what that says about the time of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from commons.advisor.input_error import InputError
from commons.advisor.lengths import TokenRule
from commons.perf_model import HSTUFlops, TransformerConfig, transformer_flops
from commons.perf_model.measured_cost import MeasuredCost

Flops = Callable[[np.ndarray], np.ndarray]

# The backward pass computes two products of matrices for each of the forward pass.
TRAINING_FLOPS_PER_FORWARD = 3


@dataclass(frozen=True)
class ConfiguredModel:
    """A model of which the dimensions are known.

    Attributes:
        flops: tokens to forward FLOPs, both int64 `[samples]`.
        description: in words.
        tokens: of a sample of so many items, where the data does not say it.
    """

    flops: Flops
    description: str
    tokens: TokenRule


@dataclass(frozen=True)
class SampleCost:
    """What is balanced, and how long a rank takes for it.

    Attributes:
        workloads: tokens to workloads, both int64 `[samples]`.
        description: the model, in words.
        assumption: what the prediction takes a step to be, in words.
        seconds_per_unit: of training, per unit of workload; None if it is not known.
        seconds_per_step: what a step takes whatever it computes, as far as that is known.
        file: with the measured cost; None for FLOPs.
    """

    workloads: Flops
    description: str
    assumption: str
    seconds_per_unit: float | None = None
    seconds_per_step: float = 0.0
    file: Path | None = None

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Workloads of samples, int64 `[samples]`.

        Raises:
            InputError: a sample costs more than int64 holds.
        """
        longest = int(tokens.max())
        fewer = 1
        while fewer < longest:
            # Each of these costs is a + b·T + c·T²: for twice the tokens at most four times as much.
            if not 0 <= int(self.workloads(np.array([fewer]))[0]) < 2**60:
                raise InputError(f"a sample of {longest} tokens costs more than 2^62 in {self.description}")
            fewer *= 2
        return self.workloads(tokens)

    def step_times(self, largest_loads: np.ndarray) -> np.ndarray:
        """What steps take, float64 of the same shape: seconds where these are known, else units."""
        if self.seconds_per_unit is None:
            return largest_loads
        return self.seconds_per_step + self.seconds_per_unit * largest_loads


def flops_cost(model: ConfiguredModel, tflops: float | None) -> SampleCost:
    """Training time from forward FLOPs; `tflops` is what a device achieves, in 10¹² FLOP/s, or None."""
    assumption = (
        f"A step takes what its largest rank computes: {TRAINING_FLOPS_PER_FORWARD} × the forward FLOPs of "
        "the layers (training = forward + backward). "
    )
    fixed_part = (
        "the part of a step that does not depend on lengths is taken for 0: the larger it is, the smaller "
        "the speedups are"
    )
    if tflops is None:
        assumption += f"Without --tflops or --cost only ratios are predicted; {fixed_part}"
        return SampleCost(model.flops, model.description, assumption)
    assumption += f"Every device achieves {tflops:g} TFLOP/s whatever the lengths; {fixed_part}"
    per_unit = TRAINING_FLOPS_PER_FORWARD / (tflops * 1e12)
    return SampleCost(model.flops, model.description, assumption, per_unit)


def measured_cost(path: Path) -> SampleCost:
    """The curve that a calibration has measured.

    Raises:
        InputError: there is no such file, or it is something else.
    """
    try:
        cost = MeasuredCost.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--cost {path}: {error}") from error
    assumption = (
        f"A step takes {cost.per_step * 1e3:.3g} ms whatever it computes, and what its largest rank needs "
        f"for its samples, as a calibration measured it ({path}, median error {cost.median_error:.1%}); "
        "balanced are these times"
    )
    return SampleCost(
        cost.per_sample_ns, f"measured cost of {path}", assumption, 1e-9, cost.per_step, file=path
    )


def hstu_flops(num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> Flops:
    """Tokens to forward FLOPs of HSTU layers."""
    return HSTUFlops(num_layers, hidden_size, num_heads, head_dim).per_sample


def decoder_flops(num_layers: int, hidden_size: int, num_heads: int, head_dim: int, mlp_size: int) -> Flops:
    """Tokens to forward FLOPs of Transformer layers, of which a kernel skips what the causal mask hides."""
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        mlp_size=mlp_size,
        skips_masked=True,
    )
    return partial(transformer_flops, config)
