"""Attention of beams that extend prompts, over a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


class BeamAttention:
    """Attention of W beams for each of B users. A beam sees its user's prompt and its own tokens.

    A user's beams share one copy of the prompt's keys and values. Tokens stay in the cache where they were
    written. When beams are selected, only the small mask of each beam's ancestors changes.

    Per layer, the cache has two tensors, `[B, num_kv_heads, longest prompt + num_steps · W, head_dim]` each.

    Args:
        keys_values: keys and values of the prompts in each layer, `[any, num_kv_heads, head_dim]`.
        offsets: index of each prompt's first token in `keys_values`, `[B]` int64.
        prompt_lengths: number of tokens of each prompt, `[B]` int64.
        longest: maximum of `prompt_lengths`, passed so that it need not be read from the device.
        num_beams: number of beams per user, W.
        num_steps: number of tokens that will extend each beam.
    """

    def __init__(
        self,
        keys_values: Sequence[tuple[torch.Tensor, torch.Tensor]],
        offsets: torch.Tensor,
        prompt_lengths: torch.Tensor,
        longest: int,
        num_beams: int,
        num_steps: int,
    ) -> None:
        device = offsets.device
        self._num_users, self._num_beams, self._longest = len(offsets), num_beams, longest
        places = torch.arange(longest, device=device)
        in_prompt = places < prompt_lengths.unsqueeze(1)
        # After a prompt's end, any token will do, because it is masked out.
        tokens = torch.where(in_prompt, offsets.unsqueeze(1) + places, 0)
        self._cache = [
            tuple(self._with_room(tensor[tokens], num_beams * num_steps) for tensor in layer)
            for layer in keys_values
        ]
        own = torch.zeros(self._num_users, num_beams, num_beams * num_steps, dtype=torch.bool, device=device)
        self._visible = torch.cat([in_prompt.unsqueeze(1).expand(-1, num_beams, -1), own], 2)
        self._step = -1

    def extend(self, parents: torch.Tensor) -> None:
        """Begins a step in which beam w continues beam `parents[:, w]` of the previous step.

        Args:
            parents: int64 `[B, W]`.
        """
        self._step += 1
        parent_columns = parents.unsqueeze(-1).expand(-1, -1, self._visible.shape[-1])
        self._visible = self._visible.gather(1, parent_columns)
        itself = torch.eye(self._num_beams, dtype=torch.bool, device=parents.device)
        self._visible[:, :, self._first_slot : self._first_slot + self._num_beams] = itself

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes the attention of the step's tokens, `[B · W, heads, head_dim]` each, user by user."""
        keys, values = self._cache[layer]
        q, k, v = (
            tensor.unflatten(0, (self._num_users, self._num_beams)).transpose(1, 2) for tensor in (q, k, v)
        )
        last_slot = self._first_slot + self._num_beams
        keys[:, :, self._first_slot : last_slot] = k
        values[:, :, self._first_slot : last_slot] = v
        attended = scaled_dot_product_attention(
            q,
            keys[:, :, :last_slot],
            values[:, :, :last_slot],
            attn_mask=self._visible[:, None, :, :last_slot],
            enable_gqa=keys.shape[1] != q.shape[1],
        )
        return attended.transpose(1, 2).flatten(0, 1)

    @property
    def _first_slot(self) -> int:
        return self._longest + self._step * self._num_beams

    @staticmethod
    def _with_room(prompts_BTHD: torch.Tensor, num_slots: int) -> torch.Tensor:
        """Pads prompts to `[B, H, T + num_slots, D]`."""
        return torch.nn.functional.pad(prompts_BTHD.transpose(1, 2), (0, 0, 0, num_slots))
