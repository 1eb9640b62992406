"""Triton kernels of HSTU attention over jagged sequences; only `triton_attention` imports this file.

Each program computes a block of rows (queries) or of columns (keys and values) for one sample and head. It
visits the tiles in its item of the work list (`TritonWork`), and masks only tiles at the mask's edge. Sums
are float32. Each output element has one writer, so results are deterministic.

Name suffixes: R rows of a tile, C columns of a tile, D head_dim padded to a power of two.

Source: Zhai et al., "Actions Speak Louder than Words", ICML 2024.
"""

from __future__ import annotations

import triton
import triton.language as tl

# int32 fields of a work item; `TritonWork.lists` describes them.
NUM_FIELDS = tl.constexpr(15)


@triton.jit
def _item(work, num_heads):
    """Returns this program's work item and head, then places of token 0 of the sample among queries and keys.

    The end of the rows, the number of columns, and the block's first row or column follow.
    """
    item = work + tl.program_id(0) // num_heads * NUM_FIELDS
    head = tl.program_id(0) % num_heads
    query_base, key_base = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64)
    return item, head, query_base, key_base, tl.load(item + 3), tl.load(item + 4), tl.load(item + 8)


# With TRITON_INTERPRET=1 at import, kernels run in Python, even on a CPU.
INTERPRETED = tl.constexpr(not isinstance(_item, triton.JITFunction))


@triton.jit
def _num_tiles(item, EDGE: tl.constexpr):
    """Returns the number of tiles that need the mask if EDGE, else the number of the others."""
    if EDGE:
        return tl.load(item + 12) + tl.load(item + 14)
    return tl.load(item + 10)


@triton.jit
def _tile(item, step, EDGE: tl.constexpr):
    """Returns the tile of a step. EDGE tiles form two ranges, visited one after the other."""
    if EDGE:
        num_edge = tl.load(item + 12)
        return tl.where(step < num_edge, tl.load(item + 11) + step, tl.load(item + 13) + step - num_edge)
    return tl.load(item + 9) + step


@triton.jit
def _load(base, first, end, stride, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Loads `[ROWS, DIM]` starting at token `first`, with zeros from token `end` on and past head_dim."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    pointers = base + first.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    inside = (rows < end - first)[:, None]
    if HEAD_DIM != DIM:
        inside = inside & (dims < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _store(base, values, first, end, stride, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Stores `[ROWS, DIM]` starting at token `first`, but nothing from token `end` on or past head_dim."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    pointers = base + first.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    inside = (rows < end - first)[:, None]
    if HEAD_DIM != DIM:
        inside = inside & (dims < HEAD_DIM)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _dot(a, b, acc=None):
    """Returns `a b + acc`. Three TF32 products replace a float32 product, and are nearly as accurate."""
    if INTERPRETED:  # the interpreter cannot multiply bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def _one_plus_tanh(half, dtype: tl.constexpr):
    """Returns `1 + tanh(half)`, which is `2 sigmoid(2 half)`.

    bfloat16 uses tanh.approx, one special-function instruction instead of two. Its relative error, 2^-11, is
    below bfloat16's rounding error.
    """
    if dtype == tl.bfloat16 and not INTERPRETED:
        return 1.0 + tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
    return 2.0 / (1.0 + tl.exp(-2.0 * half))


@triton.jit
def _visible(scores, rows, columns, item):
    """Zeroes scores that a row does not see, by the rule of `SampleMask`."""
    prefix, history_end, per_candidate = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    prefix_end = tl.minimum(tl.maximum(rows + 1, prefix), history_end)
    own_start = rows - tl.maximum(rows - history_end, 0) % per_candidate
    sees = (columns < prefix_end) | ((columns >= own_start) & (columns <= rows))
    return tl.where(sees, scores, 0.0)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    work,
    token_stride,
    head_stride,
    key_token_stride,
    key_head_stride,
    num_heads,
    half_scale,
    out_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes a block of rows of the output."""
    item, head, query_base, key_base, end_row, num_keys, first_row = _item(work, num_heads)
    start = query_base * token_stride + head * head_stride
    key_start = key_base * key_token_stride + head * key_head_stride
    out_stride = num_heads * HEAD_DIM
    out_start = query_base * out_stride + head * HEAD_DIM
    q_RD = _load(q + start, first_row, end_row, token_stride, HEAD_DIM, ROWS, DIM)
    rows = first_row + tl.arange(0, ROWS)[:, None]
    out_RD = tl.zeros([ROWS, DIM], tl.float32)
    for EDGE in tl.static_range(2):
        for step in range(_num_tiles(item, EDGE)):
            first = _tile(item, step, EDGE) * COLUMNS
            k_CD = _load(k + key_start, first, num_keys, key_token_stride, HEAD_DIM, COLUMNS, DIM)
            v_CD = _load(v + key_start, first, num_keys, key_token_stride, HEAD_DIM, COLUMNS, DIM)
            half_RC = _dot(q_RD, k_CD.T) * half_scale
            weights_RC = half_RC * _one_plus_tanh(half_RC, q_RD.dtype)
            if EDGE:
                weights_RC = _visible(weights_RC, rows, first + tl.arange(0, COLUMNS)[None, :], item)
            out_RD = _dot(weights_RC.to(v_CD.dtype), v_CD, out_RD)
    _store(out + out_start, out_RD * out_scale, first_row, end_row, out_stride, HEAD_DIM, ROWS, DIM)


@triton.jit
def grad_q_kernel(
    q,
    k,
    v,
    grad_out,
    grad_q,
    work,
    token_stride,
    head_stride,
    key_token_stride,
    key_head_stride,
    num_heads,
    half_scale,
    score_scale,
    grad_q_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes a block of rows of the gradient of q."""
    item, head, query_base, key_base, end_row, num_keys, first_row = _item(work, num_heads)
    start = query_base * token_stride + head * head_stride
    key_start = key_base * key_token_stride + head * key_head_stride
    out_stride = num_heads * HEAD_DIM
    out_start = query_base * out_stride + head * HEAD_DIM
    q_RD = _load(q + start, first_row, end_row, token_stride, HEAD_DIM, ROWS, DIM)
    grad_out_RD = _load(grad_out + out_start, first_row, end_row, out_stride, HEAD_DIM, ROWS, DIM)
    rows = first_row + tl.arange(0, ROWS)[:, None]
    grad_q_RD = tl.zeros([ROWS, DIM], tl.float32)
    for EDGE in tl.static_range(2):
        for step in range(_num_tiles(item, EDGE)):
            first = _tile(item, step, EDGE) * COLUMNS
            k_CD = _load(k + key_start, first, num_keys, key_token_stride, HEAD_DIM, COLUMNS, DIM)
            v_CD = _load(v + key_start, first, num_keys, key_token_stride, HEAD_DIM, COLUMNS, DIM)
            half_RC = _dot(q_RD, k_CD.T) * half_scale
            grad_RC = _dot(grad_out_RD, v_CD.T) * score_scale
            factor_RC = _one_plus_tanh(half_RC, q_RD.dtype)
            grad_RC *= factor_RC + half_RC * factor_RC * (2.0 - factor_RC)
            if EDGE:
                grad_RC = _visible(grad_RC, rows, first + tl.arange(0, COLUMNS)[None, :], item)
            grad_q_RD = _dot(grad_RC.to(k_CD.dtype), k_CD, grad_q_RD)
    _store(
        grad_q + out_start,
        grad_q_RD * grad_q_scale,
        first_row,
        end_row,
        out_stride,
        HEAD_DIM,
        ROWS,
        DIM,
    )


@triton.jit
def grad_kv_kernel(
    q,
    k,
    v,
    grad_out,
    grad_k,
    grad_v,
    work,
    token_stride,
    head_stride,
    key_token_stride,
    key_head_stride,
    num_heads,
    half_scale,
    score_scale,
    grad_k_scale,
    grad_v_scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GRAD_K: tl.constexpr,
    GRAD_V: tl.constexpr,
):
    """Computes a block of rows of the gradients of k and v, from transposed scores."""
    item, head, query_base, key_base, end_row, num_keys, first_column = _item(work, num_heads)
    start = query_base * token_stride + head * head_stride
    key_start = key_base * key_token_stride + head * key_head_stride
    out_stride = num_heads * HEAD_DIM
    out_start = query_base * out_stride + head * HEAD_DIM
    grad_start = key_base * out_stride + head * HEAD_DIM
    first_row = tl.load(item + 2)
    k_CD = _load(k + key_start, first_column, num_keys, key_token_stride, HEAD_DIM, COLUMNS, DIM)
    v_CD = _load(v + key_start, first_column, num_keys, key_token_stride, HEAD_DIM, COLUMNS, DIM)
    columns = first_column + tl.arange(0, COLUMNS)[:, None]
    grad_k_CD = tl.zeros([COLUMNS, DIM], tl.float32)
    grad_v_CD = tl.zeros([COLUMNS, DIM], tl.float32)
    for EDGE in tl.static_range(2):
        for step in range(_num_tiles(item, EDGE)):
            first = first_row + _tile(item, step, EDGE) * ROWS
            q_RD = _load(q + start, first, end_row, token_stride, HEAD_DIM, ROWS, DIM)
            grad_out_RD = _load(grad_out + out_start, first, end_row, out_stride, HEAD_DIM, ROWS, DIM)
            half_CR = _dot(k_CD, q_RD.T) * half_scale
            if EDGE:
                half_CR = _visible(half_CR, first + tl.arange(0, ROWS)[None, :], columns, item)
            factor_CR = _one_plus_tanh(half_CR, q_RD.dtype)
            weights_CR = half_CR * factor_CR
            if GRAD_V:
                grad_v_CD = _dot(weights_CR.to(q_RD.dtype), grad_out_RD, grad_v_CD)
            if GRAD_K:
                grad_CR = _dot(v_CD, grad_out_RD.T) * score_scale
                grad_CR *= factor_CR + weights_CR * (2.0 - factor_CR)
                if EDGE:  # a hidden score of 0 has weight 0, but its gradient is not 0
                    grad_CR = _visible(grad_CR, first + tl.arange(0, ROWS)[None, :], columns, item)
                grad_k_CD = _dot(grad_CR.to(q_RD.dtype), q_RD, grad_k_CD)
    if GRAD_K:
        grad_k_CD *= grad_k_scale
        _store(grad_k + grad_start, grad_k_CD, first_column, num_keys, out_stride, HEAD_DIM, COLUMNS, DIM)
    if GRAD_V:
        grad_v_CD *= grad_v_scale
        _store(grad_v + grad_start, grad_v_CD, first_column, num_keys, out_stride, HEAD_DIM, COLUMNS, DIM)
