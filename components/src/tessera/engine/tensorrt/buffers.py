"""The inputs and outputs of a text engine, each large enough for every profile and never moved."""

from __future__ import annotations

from math import prod

import torch

from tessera.engine.compiled.manifest import Binding, Manifest
from tessera.engine.compiled.spec import Layout, Profile


class Buffers:
    """``view`` gives the beginning of a buffer in another shape; rows can be had by indexing."""

    def __init__(self, manifest: Manifest, device: str) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for binding in manifest.bindings:
            shapes = [_largest(binding, profile, manifest.layout) for profile in manifest.profiles]
            dtype = getattr(torch, binding.dtype)
            self._tensors[binding.name] = torch.zeros(max(shapes, key=prod), dtype=dtype, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._tensors[name].view(-1)[: prod(shape)].view(shape)


def _largest(binding: Binding, profile: Profile, layout: Layout) -> tuple[int, ...]:
    """The binding's largest shape in a profile."""
    axes = {
        "vision_rows": ("rows",),
        "lengths": ("sequences",),
        "query_lengths": ("sequences",),
        "key_value_lengths": ("sequences",),
        "vectors": ("sequences",),
        "norms": ("sequences",),
    }.get(binding.name, ("sequences", "tokens") if layout is Layout.PADDED else ("tokens",))
    extra = 1 if binding.name in ("query_lengths", "key_value_lengths") else 0
    sizes = iter(getattr(profile, axis).max + extra for axis in axes)
    return tuple(next(sizes) if size == -1 else size for size in binding.shape)
