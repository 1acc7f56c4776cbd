"""FlashAttention 4 (flash-attn-4, BSD), for Hopper: attention of long sequences in a packed batch.

Milliseconds on an H200, bfloat16, against ``kernels.attention`` and cuDNN, which takes equal lengths only:

    heads x width, lengths               here    Triton  cuDNN
    16 x 64, 4 of 7104                   1.60    2.00    2.04
    16 x 64, 4 to 7104 mixed, 26,000     1.16    1.41
    16 x 64, 14 of 2048                  0.53    0.60
    16 x 64, 28 of 1024                  0.33    0.32    0.29
    16 x 64, 112 of 256                  0.23    0.11
    16 x 72, 4 of 7104                   2.10            2.88
    16 x 72, 4 to 7104 mixed             1.47    (FlashAttention 2: 2.89)
    16 x 72, 256 of 100                  0.36    (FlashAttention 2: 0.15)
    16 on 8 x 128 causal, 16 of 1024     0.18    0.22    0.17
    16 on 8 x 128 causal, 32 of 512      0.13    0.14
    16 on 8 x 128 causal, 64 of 256      0.12    0.09
    16 on 8 x 128 causal, 1 of 1796      0.029   0.054

A call costs the host 0.1 ms, and the first of a kind about 4 s of compiling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.nn.kernels import hopper


def serves(q: torch.Tensor) -> bool:
    """Whether the library is installed and takes heads ``[..., head_dim]`` of this type and width."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
        and hopper.serves(hopper.FLASH_ATTENTION, q.device)
    )


def typical(lengths: Sequence[int]) -> float:
    """How long a sequence is in which a token finds itself, on average over the tokens."""
    return sum(length * length for length in lengths) / max(1, sum(lengths))


def least(width: int) -> int:
    """From this typical length on, heads of this width are faster here than by any other kernel."""
    return 400 if width > 96 else 1100


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *, causal: bool
) -> torch.Tensor:
    """``q`` ``[total, heads, head_dim]``, ``k`` and ``v`` with fewer heads; int32 bounds ``[batch + 1]``.

    Heads must be contiguous within a token. Rows outside every sequence are left unwritten.
    """
    from flash_attn.cute import flash_attn_varlen_func

    found: torch.Tensor = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=causal
    )[0]
    return found
