"""The head that turns a token's state into scores of its action."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class PredictionHead(nn.Sequential):
    """An MLP from `[tokens, input_size]` to `[tokens, widths[-1]]`, with activations between its layers.

    Args:
        input_size: width of a token.
        widths: output width of each linear layer.
        act_type: "relu" or "gelu".
        bias: whether the linear layers have a bias.
        device: device of the parameters.

    Raises:
        ValueError: there are no widths, a width is not positive, or the activation is unknown.
    """

    def __init__(
        self,
        input_size: int,
        widths: Sequence[int],
        act_type: str,
        bias: bool,
        device: torch.device | None = None,
    ) -> None:
        if not widths or min(widths) < 1:
            raise ValueError(
                f"prediction_head_arch is {list(widths)}; expected positive widths, at least one"
            )
        if act_type not in _ACTIVATIONS:
            raise ValueError(
                f"prediction_head_act_type is {act_type!r}; expected one of {sorted(_ACTIVATIONS)}"
            )
        layers: list[nn.Module] = []
        for width_in, width_out in zip([input_size, *widths[:-1]], widths, strict=True):
            layers += [nn.Linear(width_in, width_out, bias=bias, device=device), _ACTIVATIONS[act_type]()]
        super().__init__(*layers[:-1])
