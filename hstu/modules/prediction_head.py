"""The head that turns a token's state into scores of its action."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


@dataclass(frozen=True)
class RankingHeadConfig:
    """Settings of the head that predicts actions.

    Attributes:
        prediction_head_arch: output width of each linear layer. The last is the number of action classes, or
            equals `num_tasks`.
        prediction_head_act_type: "relu" or "gelu".
        prediction_head_bias: whether the linear layers have a bias.
        num_tasks: number of binary tasks encoded in an action, one per bit; 1 for classes.

    Raises:
        ValueError: there are no widths, a width is not positive, or the activation is unknown.
    """

    prediction_head_arch: tuple[int, ...]
    prediction_head_act_type: str = "relu"
    prediction_head_bias: bool = True
    num_tasks: int = 1

    def __post_init__(self) -> None:
        widths, act_type = self.prediction_head_arch, self.prediction_head_act_type
        if not widths or min(widths) < 1:
            raise ValueError(
                f"prediction_head_arch is {list(widths)}; expected positive widths, at least one"
            )
        if act_type not in _ACTIVATIONS:
            raise ValueError(
                f"prediction_head_act_type is {act_type!r}; expected one of {sorted(_ACTIVATIONS)}"
            )


class PredictionHead(nn.Sequential):
    """An MLP on `[tokens, input_size]`, with an activation after each linear layer except the last."""

    def __init__(self, input_size: int, config: RankingHeadConfig) -> None:
        widths, bias = config.prediction_head_arch, config.prediction_head_bias
        layers: list[nn.Module] = []
        for width_in, width_out in zip((input_size, *widths[:-1]), widths, strict=True):
            layers += [
                nn.Linear(width_in, width_out, bias),
                _ACTIVATIONS[config.prediction_head_act_type](),
            ]
        super().__init__(*layers[:-1])
