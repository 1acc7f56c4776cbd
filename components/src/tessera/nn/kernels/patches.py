"""Triton kernels that make normalised patches in one pass: of patches, or of tiles that they cut."""

# Triton is not installed beside the CPU builds of torch, and its kernels are not ordinary Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _patches(
    tiles,
    mean,
    std,
    out,
    CHANNELS: tl.constexpr,
    GRID: tl.constexpr,
    PATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: a row of patches in one channel, whose bytes are contiguous.
    strip = tl.program_id(0).to(tl.int64)
    down = strip % GRID
    channel = (strip // GRID) % CHANNELS
    tile = strip // (GRID * CHANNELS)
    at = tl.arange(0, BLOCK)
    inside = at < PATCH * PATCH * GRID
    value = tl.load(tiles + strip * (PATCH * PATCH * GRID) + at, mask=inside, other=0).to(tl.float32)
    y = at // (GRID * PATCH)
    right = (at % (GRID * PATCH)) // PATCH
    feature = channel * PATCH * PATCH + y * PATCH + at % PATCH
    m = tl.load(mean + feature, mask=inside, other=0.0)
    s = tl.load(std + feature, mask=inside, other=1.0)
    row = (tile * GRID + down) * GRID + right
    where = out + row * (CHANNELS * PATCH * PATCH) + feature
    tl.store(where, ((value / 255.0 - m) / s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rows(pixels, mean, std, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(pixels + row * WIDTH + at, mask=inside, other=0).to(tl.float32)
    m = tl.load(mean + at, mask=inside, other=0.0)
    s = tl.load(std + at, mask=inside, other=1.0)
    tl.store(out + row * WIDTH + at, ((value / 255.0 - m) / s).to(out.dtype.element_ty), mask=inside)


def normalised_rows(
    pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Contiguous uint8 ``[patches, features]`` to the same shape; float32 constants for each feature."""
    out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device)
    width = pixels.shape[1]
    _rows[(len(pixels),)](
        pixels, mean, std, out, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=2
    )
    return out


def normalised_patches(
    tiles: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, *, patch: int, dtype: torch.dtype
) -> torch.Tensor:
    """uint8 ``[n, channels, size, size]`` to ``[n * patches, channels * patch * patch]``.

    ``mean`` and ``std`` are float32, one for each feature of a patch.
    """
    n, channels, size, _ = tiles.shape
    grid = size // patch
    out = torch.empty(n * grid * grid, channels * patch * patch, dtype=dtype, device=tiles.device)
    _patches[(n * channels * grid,)](
        tiles,
        mean,
        std,
        out,
        CHANNELS=channels,
        GRID=grid,
        PATCH=patch,
        BLOCK=triton.next_power_of_2(patch * patch * grid),
        num_warps=8,
    )
    return out
