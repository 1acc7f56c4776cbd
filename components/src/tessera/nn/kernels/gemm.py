"""Matrix products for Hopper with what follows them in their epilogue, from the quack-kernels library.

cuBLAS writes the gate and the up projection out in full for another kernel to read back, and its tanh GELU
costs a tenth of the product. Milliseconds on an H100 under load, bfloat16, against cuBLAS and the kernel
that has to follow it:

    rows x inner x columns       here    cuBLAS
    16384 x 2048 x 16384, gated  1.47    1.92
     1024 x 2048 x 16384, gated  0.094   0.110
    16384 x 2048 x 3072          0.30    0.34
    28672 x 1152 x 4352, GELU    0.38    0.46
    28672 x 1152 x 3456, bias    0.33    0.34
    28672 x 1152 x 1152, added   0.126   0.144

In FP8 on an H200, beside cuBLAS with the kernel that follows and quantises; static is one scale of all rows:

    rows x inner x columns             here    cuBLAS
    16384 x 2048 x 16384, gated        0.87    0.98
    28672 x 1152 x 4352, GELU          0.36    0.47
    28672 x 1152 x 4352, GELU, static  0.26    0.44

Where this loses (long inner dimensions, few rows) callers keep cuBLAS.
"""

from __future__ import annotations

from typing import Final

import torch

from tessera.nn.fp8 import Fp8Weight
from tessera.nn.kernels import hopper

LEAST_ROWS = 4096
"""From this many rows on, a product that widens them is faster here than by cuBLAS."""

ADDED_ROWS = 8192
"""From this many rows on, an added product of a short inner width is faster here."""

# An inner width from which on an added product is faster by cuBLAS at every number of rows. So is one of a
# multiple of 256: 28,416 rows on an H200, 1024 x 1024, take 0.105 ms here and 0.098 by cuBLAS.
_LONG, _EVEN = 2048, 256

# From this many rows on, tiles of 192 columns beat tiles of 128.
_WIDE_ROWS = 2048

# The library's names.
_ACTIVATIONS: Final[dict[str, str]] = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh_approx",
    "gelu_pytorch_tanh": "gelu_tanh_approx",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}


def serves(weight: torch.Tensor) -> bool:
    """Whether the library is installed and used for this type on this generation of device."""
    return weight.dtype == torch.bfloat16 and hopper.serves(hopper.QUACK, weight.device)


def adds(weight: torch.Tensor) -> bool:
    """Whether ``add_product`` of this weight is faster here from ``ADDED_ROWS`` on."""
    columns, inner = weight.shape
    return columns == inner < _LONG and bool(inner % _EVEN) and serves(weight)


def gated(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``silu(rows @ gate.T) * (rows @ up.T)``; ``weight`` ``[2 * width, inner]`` holds gate, then up."""
    from tessera.nn.kernels.gemm_epilogues import activated

    out = torch.empty(rows.shape[0], weight.shape[0] // 2, dtype=rows.dtype, device=rows.device)
    return activated(rows, weight, None, "swiglu", out, wide=len(rows) >= _WIDE_ROWS)


def gates_fp8(weight: Fp8Weight) -> bool:
    """Whether ``gated_fp8`` is there for this weight; it is faster from ``LEAST_ROWS`` on."""
    return hopper.serves(hopper.QUACK, weight.values.device)


def gated_fp8(values: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """As ``gated``, of e4m3 ``[total, inner]`` and its scales ``[total, 1]``; bfloat16."""
    from tessera.nn.kernels import gemm_epilogues

    out = torch.empty(len(values), len(weight.values) // 2, dtype=torch.bfloat16, device=values.device)
    gemm_epilogues.gated_fp8(values, scales, weight.values, weight.scales, out)
    return out


def activates_fp8(weight: Fp8Weight, activation: str) -> bool:
    """Whether ``activated_fp8`` has this activation; it is faster from ``LEAST_ROWS`` on."""
    return "gelu" in activation and gates_fp8(weight)


def activated_fp8(
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor,
    activation: str,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """As ``activated``, of e4m3 ``[total, inner]`` and its scales ``[total, 1]``.

    It is bfloat16, and e4m3 over ``scale`` where that is given.
    """
    from tessera.nn.kernels import gemm_epilogues

    dtype = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    out = torch.empty(len(values), len(weight.values), dtype=dtype, device=values.device)
    over = 1.0 if scale is None else scale
    name = _ACTIVATIONS[activation]
    gemm_epilogues.activated_fp8(values, scales, weight.values, weight.scales, bias, name, over, out)
    return out


def activated(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation, by its name in configurations, of ``rows @ weight.T + bias``; ``bias`` is float32."""
    from tessera.nn.kernels import gemm_epilogues

    out = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device=rows.device)
    name, wide = _ACTIVATIONS[activation], len(rows) >= _WIDE_ROWS
    return gemm_epilogues.activated(rows, weight, bias, name, out, wide=wide)


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``rows @ weight.T + bias``; ``bias`` is float32."""
    from tessera.nn.kernels.gemm_epilogues import plain

    out = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device=rows.device)
    plain(rows, weight, bias, out, wide=len(rows) >= _WIDE_ROWS)
    return out


def add_product(onto: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    """``onto += rows @ weight.T``, rounded once."""
    from tessera.nn.kernels.gemm_epilogues import added

    added(onto, rows, weight, wide=len(rows) >= _WIDE_ROWS)
