"""The Transformer decoder: pre-norm layers of causal attention and an MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sid_gr.modules.attention import Attention


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder.

    Attributes:
        num_layers: number of layers.
        hidden_size: width of a token.
        num_heads: number of query heads.
        head_dim: width of a head; `num_heads * head_dim` need not be `hidden_size`.
        num_kv_heads: number of key and value heads, each shared by `num_heads / num_kv_heads` query heads.
            −1 means `num_heads`.
        mlp_size: width of the MLP's hidden layer; −1 means `4 * hidden_size`.
        gated_mlp: whether the MLP is `Linear(SiLU(Linear(x)) * Linear(x))` (Shazeer, "GLU Variants Improve
            Transformer", 2020). False means `Linear(GELU(Linear(x)))`.
        dropout: dropout probability on the outputs of attention and MLP.
        norm_epsilon: epsilon of all layer norms.

    Raises:
        ValueError: a size is not positive, or the heads cannot be grouped evenly.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    num_kv_heads: int = -1
    mlp_size: int = -1
    gated_mlp: bool = False
    dropout: float = 0.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name, default in (("num_kv_heads", self.num_heads), ("mlp_size", 4 * self.hidden_size)):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, default)
        for name in ("num_layers", "hidden_size", "num_heads", "head_dim", "num_kv_heads", "mlp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; expected a divisor of num_heads = {self.num_heads}"
            )


class Decoder(nn.Module):
    """Decoder layers and a final layer norm.

    Source: Vaswani et al., "Attention Is All You Need", 2017; norms before attention and MLP as in
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, config: DecoderConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config, device) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon, device=device)

    def forward(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Returns the states, `[tokens, hidden_size]` like x; `attention` decides which tokens see which."""
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attention)
        return self.final_norm(x)


class DecoderLayer(nn.Module):
    """`x + Dropout(Linear(attention(Linear(LayerNorm(x)))))`, then `x + Dropout(MLP(LayerNorm(x)))`."""

    def __init__(self, config: DecoderConfig, device: torch.device | None = None) -> None:
        super().__init__()
        d, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.num_heads = (heads, kv_heads, kv_heads)
        self.attention_norm = nn.LayerNorm(d, eps=config.norm_epsilon, device=device)
        # No bias: softmax cancels the keys' bias, so its gradient is rounding noise, which optimizers such as
        # Adam scale up to full steps.
        self.qkv = nn.Linear(d, sum(self.num_heads) * self.head_dim, bias=False, device=device)
        self.attention_output = nn.Linear(heads * self.head_dim, d, device=device)
        self.mlp_norm = nn.LayerNorm(d, eps=config.norm_epsilon, device=device)
        self.gated_mlp = config.gated_mlp
        self.mlp_input = nn.Linear(d, (2 if config.gated_mlp else 1) * config.mlp_size, device=device)
        self.mlp_output = nn.Linear(config.mlp_size, d, device=device)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, index: int, attention: Attention) -> torch.Tensor:
        """Returns the output, `[tokens, hidden_size]` like x; `index` is the layer's place in the stack."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.num_heads, dim=1)
        attended = attention(index, q, k, v).flatten(1)
        x = x + self.dropout(self.attention_output(attended))
        return x + self.dropout(self._mlp(self.mlp_norm(x)))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mlp_input(x)
        if self.gated_mlp:
            gate, hidden = hidden.chunk(2, dim=-1)
            return self.mlp_output(nn.functional.silu(gate) * hidden)
        return self.mlp_output(nn.functional.gelu(hidden))
