"""A Triton kernel for attention inside each sequence of a packed batch, full or causal, with grouped keys.

The query heads that share a key head are rows of one tile, so that a sequence of 32 tokens with four
heads to a group fills a tile of 128 rows, and keys and values are read once for the whole group.
"""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEAD_DIMS = (16, 32, 64, 128)
# Milliseconds on an H100, 32,768 tokens, 32 heads on 8, head width 64, against FlashAttention 2:
#   length           32     128    260    1024   1796
#   32 keys a step   0.17   0.22   0.39   0.94   1.56
#   64 keys a step   0.24   0.25   0.43   0.90   1.51
#   FlashAttention   0.73   0.22   0.60   0.94   1.79
# On an H200, causal, 16,384 tokens, 16 heads on 8, head width 128, by rows of a tile and keys a step:
#   length           32     128    256    512    1024
#   128, 32          0.141  0.112  0.131  0.173  0.260
#   128, 64          0.166  0.108  0.123  0.155  0.220   (8 warps, these two; 4 below)
#   64, 64           0.090  0.095  0.110  0.143  0.218
#   64, 32           0.063  0.075  0.094  0.138  0.228
# On an H100, 32,768 tokens, 16 heads on 16, head width 64, 4 warps:
#   length           32     64     128    256    512
#   128, 32          0.215  0.147  0.125  0.161  0.251
#   64, 32           0.110  0.097  0.108  0.137  0.215
#   64, 64                  0.102  0.104  0.126  0.194
#   FlashAttention   0.382  0.206  0.134  0.178  0.279
# The same of heads 72 wide, whose columns are padded to 128:
#   64, 32           0.173  0.130  0.163  0.240
#   FlashAttention   0.347  0.221  0.214  0.278
_SHORT, _LONG = 64, 512

PADDED_LONGEST = 256
"""Up to this length heads whose width is no power of two are faster here than by FlashAttention 2."""


def tiling(width: int, group: int, longest: int) -> tuple[int, int]:
    """Rows of a tile and keys of a step, for heads of this width of which so many share their keys."""
    if width > 64:
        return 64, 32
    if group == 1:
        return 64, 64 if longest > _SHORT else 32
    return 128, 64 if longest > _LONG else 32


@triton.jit
def _step(
    queries,
    keys_at,
    values_at,
    here,
    left,
    seen,
    highest,
    weight,
    sums,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    PADDED: tl.constexpr,
):
    # One step of the online softmax. ``here`` says which columns a head has, of more where PADDED, ``left``
    # which of the keys there are, ``seen`` which a row sees; a row that sees none of them must have seen one
    # in an earlier step.
    if MASKED:
        scores = tl.dot(queries, tl.load(keys_at, mask=left[None, :] & here[:, None], other=0.0))
        scores = tl.where(seen, scores, -float("inf"))
    elif PADDED:
        scores = tl.dot(queries, tl.load(keys_at, mask=here[:, None], other=0.0))
    else:
        scores = tl.dot(queries, tl.load(keys_at))
    found = tl.maximum(highest, tl.max(scores, 1) * SCALE)
    shares = tl.math.exp2(scores * SCALE - found[:, None])
    decay = tl.math.exp2(highest - found)
    weight = weight * decay + tl.sum(shares, 1)
    if MASKED:
        values = tl.load(values_at, mask=left[:, None] & here[None, :], other=0.0)
    elif PADDED:
        values = tl.load(values_at, mask=here[None, :], other=0.0)
    else:
        values = tl.load(values_at)
    sums = tl.dot(shares.to(values.dtype), values, sums * decay[:, None])
    return found, weight, sums


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=["bounds", "seen_keys"])
def attend(
    q,
    k,
    v,
    out,
    bounds,
    seen_keys,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    sequences,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEARCH: tl.constexpr,
    CAUSAL: tl.constexpr,
    SEEN: tl.constexpr = False,
):
    # The kernel of ``packed_attention``: one program for ROWS rows (tokens times heads of a group) of one key
    # head, KEYS keys a step. Strides count elements. SEARCH is 0, or a power of two of at least ``sequences``
    # that makes each program look for its sequence. Without SEEN ``seen_keys`` is not read.
    # A constant, with the logarithm of e to base 2 for exp2. As an argument it would be float32 here, but
    # float64 to a compiler that takes Python's floats for what they are, and every score with it.
    scale: tl.constexpr = WIDTH**-0.5 * 1.4426950408889634
    block = tl.program_id(0)
    shared = tl.program_id(1)
    if SEARCH == 0:
        sequence = tl.program_id(2)
    else:
        # Sequence i begins at tile (its first row) // ROWS + i, which leaves each at least what it needs.
        number = tl.arange(0, SEARCH)
        first_row = tl.load(bounds + number, mask=number < sequences, other=0) * GROUP
        tile = tl.where(number < sequences, first_row // ROWS + number, 1 << 30)
        sequence = tl.sum((tile <= block).to(tl.int32), 0) - 1
        block = block - (tl.load(bounds + sequence) * GROUP // ROWS + sequence)
    start = tl.load(bounds + sequence).to(tl.int64)
    length = (tl.load(bounds + sequence + 1) - start).to(tl.int32)
    if block * ROWS >= length * GROUP:
        return
    if CAUSAL:
        # The last tile sees the most keys: those that take longest begin first.
        block = (length * GROUP - 1) // ROWS - block
    row = block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = shared * GROUP + row % GROUP
    at = tl.arange(0, COLUMNS)
    here = at < WIDTH
    inside = (token < length)[:, None] & here[None, :]
    queries = tl.load(
        q + (start + token)[:, None] * q_stride + head[:, None] * WIDTH + at[None, :], mask=inside, other=0.0
    )
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    key = tl.arange(0, KEYS)
    keys_at = k + start * k_stride + shared * WIDTH + key[None, :] * k_stride + at[:, None]
    values_at = v + start * v_stride + shared * WIDTH + key[:, None] * v_stride + at[None, :]
    # Keys below ``whole`` are seen by every row of the tile, keys from ``limit`` on by none.
    if CAUSAL:
        whole = (block * ROWS // GROUP + 1) // KEYS * KEYS
        limit = tl.minimum(length, (block * ROWS + ROWS - 1) // GROUP + 1)
    else:
        limit = tl.load(seen_keys + sequence) if SEEN else length
        whole = limit // KEYS * KEYS
    for first in range(0, whole, KEYS):
        highest, weight, sums = _step(
            queries,
            keys_at + first * k_stride,
            values_at + first * v_stride,
            here,
            None,
            None,
            highest,
            weight,
            sums,
            SCALE=scale,
            MASKED=False,
            PADDED=COLUMNS > WIDTH,
        )
    if CAUSAL:
        for first in range(whole, limit, KEYS):
            left = first + key < limit
            highest, weight, sums = _step(
                queries,
                keys_at + first * k_stride,
                values_at + first * v_stride,
                here,
                left,
                left[None, :] & (first + key[None, :] <= token[:, None]),
                highest,
                weight,
                sums,
                SCALE=scale,
                MASKED=True,
                PADDED=COLUMNS > WIDTH,
            )
    elif whole < limit:
        left = key < limit - whole
        highest, weight, sums = _step(
            queries,
            keys_at + whole * k_stride,
            values_at + whole * v_stride,
            here,
            left,
            left[None, :],
            highest,
            weight,
            sums,
            SCALE=scale,
            MASKED=True,
            PADDED=COLUMNS > WIDTH,
        )
    result = sums / weight[:, None]
    where = out + (start + token)[:, None] * out_stride + head[:, None] * WIDTH + at[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=inside)


def supports(head_dim: int) -> bool:
    """Whether heads of this width fill the kernel's columns, so that it is fast at every length."""
    return head_dim in _HEAD_DIMS


def pads(head_dim: int, longest: int) -> bool:
    """Whether heads of another width are faster here than elsewhere if no sequence exceeds ``longest``."""
    return head_dim % 8 == 0 and head_dim <= _HEAD_DIMS[-1] and longest <= PADDED_LONGEST


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    *,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q`` ``[total, heads, head_dim]``, ``k`` and ``v`` with fewer heads; int32 bounds ``[batch + 1]``.

    Heads must be contiguous within a token. Rows outside every sequence are left unwritten. ``seen``, int32
    ``[batch]``, is how many of a sequence's first rows its rows attend to, at least 1; None for all. It is
    not for causal attention.

    ``longest`` is at least the longest sequence's length. A recorded graph knows no more than a bound of it,
    and most programs of a grid by sequence and tile may find nothing to do; where there would be too many of
    them, each program searches for its sequence instead.
    """
    total, heads, width = q.shape
    shared = k.shape[1]
    group = heads // shared
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences = cu_seqlens.shape[0] - 1
    rows, keys = tiling(width, group, longest)
    tiles, searching = triton.cdiv(longest * group, rows), total * group // rows + sequences
    if tiles * sequences > 2 * searching:
        grid, search = (searching, shared, 1), triton.next_power_of_2(sequences)
    else:
        grid, search = (tiles, shared, sequences), 0
    attend[grid](
        q,
        k,
        v,
        out,
        cu_seqlens,
        cu_seqlens if seen is None else seen,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        sequences,
        GROUP=group,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        ROWS=rows,
        KEYS=keys,
        SEARCH=search,
        CAUSAL=causal,
        SEEN=seen is not None,
        num_warps=4,
        num_stages=3,
    )
    return out
