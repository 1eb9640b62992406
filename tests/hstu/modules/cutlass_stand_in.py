"""A distribution like `fbgemm_gpu_hstu`, whose function computes plain masked attention on any device."""

# Contextual rows see all up to the targets. A target sees its own group up to itself, and no other target.
ATTENTION = """
import torch


def hstu_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, scaling_seqlen,
    num_contexts, num_targets, target_group_size=1, window_size=(-1, -1), alpha=1.0, rab=None,
):
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[2] in (32, 64, 128, 256) and {q.stride(-1), k.stride(-1), v.stride(-1)} == {1}
    assert isinstance(scaling_seqlen, int) and isinstance(max_seqlen_q, int)
    samples = len(cu_seqlens_q) - 1
    assert samples > 0 and cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    for numbers in (cu_seqlens_q[1:], num_contexts, num_targets):
        assert numbers is None or (numbers.dtype == torch.int32 and numbers.shape == (samples,))
    assert window_size == (-1, 0) or num_contexts is num_targets is None
    out = []
    for sample in range(samples):
        first, last = cu_seqlens_q[sample], cu_seqlens_q[sample + 1]
        rows = torch.arange(last - first)[:, None]
        history_end = len(rows) - (0 if num_targets is None else num_targets[sample])
        contexts = 0 if num_contexts is None else num_contexts[sample]
        own = history_end + (rows - history_end) // target_group_size * target_group_size
        columns = rows.T
        seen = (columns <= rows) & ~((rows >= history_end) & (columns >= history_end) & (columns < own))
        seen |= (rows < contexts) & (columns < history_end)
        q_, k_, v_ = (x[first:last].float() for x in (q, k, v))
        scores = torch.einsum("rhd,chd->hrc", q_, k_) * alpha
        weights = torch.nn.functional.silu(scores) * seen
        out.append(torch.einsum("hrc,chd->rhd", weights, v_) / scaling_seqlen)
    return torch.cat(out).to(q.dtype)
"""
