"""FLOPs of a Transformer decoder."""

from __future__ import annotations

from dataclasses import dataclass

from ..argument_checks import require, require_at_least
from .token_counts import ATTENTION_TILE, Tokens, as_columns, as_token_counts, num_tiles


@dataclass(frozen=True)
class TransformerConfig:
    """Dimensions that determine a Transformer decoder's FLOPs.

    Provisional: may change in a minor version.

    Attributes:
        num_layers: number of layers.
        hidden_size: width of a token, d.
        num_heads: number of query heads, H.
        num_kv_heads: number of key and value heads, Hkv; H for multi-head attention, fewer for grouped heads.
        head_dim: width of a head, dh. H·dh need not equal d.
        mlp_size: width of the hidden layer of the MLP, or of each expert, f.
        gated_mlp: whether the MLP, or each expert, has a third matrix that gates the hidden layer.
        num_experts: number of experts per layer that a router chooses from for each token, E. 0 means one MLP
            and no router.
        experts_per_token: number of experts chosen per token, k; 0 without experts.
        num_shared_experts: number of further experts per layer, which every token uses, s; 0 without experts.
        vocab_size: width of a language-model head applied to every token, V. 0 means no head.

    Raises:
        ValueError: a size is not positive, a count is negative, the heads cannot be grouped evenly, or the
            counts of experts contradict each other.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    gated_mlp: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size")
        counts = ("num_experts", "experts_per_token", "num_shared_experts", "vocab_size")
        for name in (*sizes, *counts):
            require_at_least(1 if name in sizes else 0, name, getattr(self, name))
        heads, kv_heads, experts = self.num_heads, self.num_kv_heads, self.num_experts
        require(heads % kv_heads == 0, "num_kv_heads", kv_heads, f"a divisor of num_heads = {heads}")
        if experts:
            chosen = self.experts_per_token
            require(1 <= chosen <= experts, "experts_per_token", chosen, f"1 to num_experts = {experts}")
        else:
            for name in ("experts_per_token", "num_shared_experts"):
                require(not getattr(self, name), name, getattr(self, name), "0, as num_experts is 0")


def transformer_work(config: TransformerConfig, tokens: Tokens) -> Tokens:
    """Returns the forward FLOPs of each sample in two columns; a multiply-add counts as two.

    The first column is linear in tokens. For a sample of T tokens, each layer adds `2·T·d·(H + 2·Hkv)·dh` for
    the projections to q, k and v, `2·T·H·dh·d` for the output, and `4·T·d·f` for the MLP (`6·T·d·f` if
    gated). With experts, the MLP counts `k + s` times, and the router adds `2·T·d·E`. A language-model head
    adds `2·T·d·V` once. Only matrix products count: no norms, softmax, biases or embedding lookups.

    The second column is causal attention (q kᵀ and A v): `4·H·dh` per layer and pair of tokens in 32 × 32
    tiles that are not fully masked. These are n·(n + 1)/2 tiles for n = ceil(T / 32), on any device. Fused
    kernels also skip the masked half, but have tile sizes of their own.

    Sources: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, for the counting; Ainslie et
    al., "GQA", 2023, for grouped heads; Shazeer, "GLU Variants Improve Transformer", 2020, for the gated
    MLP; Shazeer et al., "Outrageously Large Neural Networks", 2017, for experts and router; Dai et al.,
    "DeepSeekMoE", 2024, for shared experts.

    Provisional: may change in a minor version.

    Args:
        config: dimensions of the decoder.
        tokens: `[batch_size]` integers, number of tokens of each sample.

    Returns:
        `[batch_size, 2]` int64, with the container type and device of `tokens`.

    Raises:
        TypeError: `tokens` are not integers.
        ValueError: a number of tokens is negative, or FLOPs do not fit an int64. Checked only on the host.
    """
    as_int64 = as_token_counts(tokens)
    d, attention_size = config.hidden_size, config.num_heads * config.head_dim
    projected = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlps = config.experts_per_token + config.num_shared_experts if config.num_experts else 1
    mlp_matrices = mlps * (3 if config.gated_mlp else 2)
    # The router is a matrix with a column for each expert.
    columns = projected + attention_size + config.num_experts + mlp_matrices * config.mlp_size
    per_token = 2 * d * (config.num_layers * columns + config.vocab_size)
    _check_fits(as_int64, per_token, config.num_layers * 2 * attention_size)
    tiles = num_tiles(as_int64)
    pairs = ATTENTION_TILE * ATTENTION_TILE * (tiles * (tiles + 1) // 2)
    linear = config.num_layers * (2 * d * columns * as_int64) + 2 * d * config.vocab_size * as_int64
    return as_columns(linear, config.num_layers * (4 * attention_size * pairs))


def _check_fits(tokens: Tokens, per_token: int, per_square: int) -> None:
    """Raises a ValueError if the longest sample's FLOPs do not fit an int64. Skips tokens on a device."""
    on_host = str(getattr(tokens, "device", "cpu")) == "cpu"  # arrays have no device before NumPy 2
    longest = int(tokens.max()) if on_host and len(tokens) else 0
    if longest * per_token + per_square * (longest + ATTENTION_TILE) ** 2 >= 2**63:
        raise ValueError(
            f"the FLOPs of a sample of {longest} tokens do not fit an int64: count in another unit"
        )


def transformer_flops(config: TransformerConfig, tokens: Tokens) -> Tokens:
    """Returns the forward FLOPs of each sample, `[batch_size]` int64: the sum of the columns of
    `transformer_work`, with the same arguments and errors.

    Provisional: may change in a minor version.
    """
    return transformer_work(config, tokens).sum(-1)
