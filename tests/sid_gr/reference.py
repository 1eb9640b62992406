"""Straightforward forward pass of the SID-GR model, to compare with."""

import torch

from tests.sid_gr.sid_samples import CODEBOOK_SIZES, ITEM_CODES, Sample


def reference_states(model, sample: Sample) -> torch.Tensor:
    """Returns the states of one sample's tokens, computed head by head with a full mask."""
    embedding, decoder = model.embedding, model.config.decoder
    tokens = [embedding.contextual[0].weight[i] for i in sample.tags]
    tokens += [embedding.contextual[1].weight[i] for i in sample.country]
    before = torch.zeros(model.config.decoder.hidden_size)
    for index, row in enumerate(sample.history + sample.candidates):
        if index >= len(sample.history):
            tokens.append(embedding.bos[0] + before)
        so_far = torch.zeros_like(before)
        for h, code in enumerate(ITEM_CODES[row]):
            so_far = so_far + embedding.codes[h].weight[code]
            tokens.append(so_far + before)
        before = so_far
    x = torch.stack(tokens[:-1])
    places = torch.arange(len(x)).clamp(max=embedding.positions.num_embeddings - 1)
    x = x + embedding.positions.weight[places]
    for layer in model.decoder.layers:
        q, k, v = (
            layer.qkv(layer.attention_norm(x))
            .unflatten(-1, (-1, decoder.head_dim))
            .split((decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads), 1)
        )
        group = decoder.num_heads // decoder.num_kv_heads
        heads = []
        for head in range(decoder.num_heads):
            scores = q[:, head] @ k[:, head // group].T / decoder.head_dim**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, head // group])
        x = x + layer.attention_output(torch.cat(heads, -1))
        hidden = layer.mlp_input(layer.mlp_norm(x))
        if decoder.gated_mlp:
            gate, hidden = hidden.chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * hidden
        else:
            hidden = torch.nn.functional.gelu(hidden)
        x = x + layer.mlp_output(hidden)
    return model.decoder.final_norm(x)


def log_probabilities(model, state: torch.Tensor, prefix: tuple[int, ...], item_codes) -> torch.Tensor:
    """Returns log-probabilities of the codes after a prefix, normalized over those that lead to an item."""
    h = len(prefix)
    logits = model.heads[0 if len(model.heads) == 1 else h](state)[: CODEBOOK_SIZES[h]]
    valid = sorted({int(codes[h]) for codes in item_codes if tuple(codes[:h]) == prefix})
    scores = torch.full_like(logits, -torch.inf)
    scores[valid] = logits[valid].log_softmax(-1)
    return scores
