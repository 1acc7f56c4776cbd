"""Rotary position embedding in the rotate-half layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from tessera.nn.spec import RopeSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """What is done to the heads of each token of a batch.

    ``cosines`` and ``sines`` are float32 ``[tokens, 1, head_dim / 2]``, with the attention factor in them.
    ``query_scale``, float32 ``[tokens, 1, 1]``, multiplies rotated queries.
    """

    cosines: torch.Tensor
    sines: torch.Tensor
    query_scale: torch.Tensor | None = None

    def scaled(self, queries: torch.Tensor) -> torch.Tensor:
        return queries if self.query_scale is None else (queries * self.query_scale).to(queries.dtype)


class Rotary(nn.Module):
    """Makes the rotation of a batch, once for all layers.

    ``frequencies`` float32 ``[head_dim / 2]`` are radians per position, ``axes`` says which row of the
    positions each of them reads.
    """

    def __init__(
        self,
        frequencies: torch.Tensor,
        axes: torch.Tensor | None = None,
        *,
        attention_factor: float = 1.0,
        query_beta: float = 0.0,
        original_max_positions: int = 0,
    ) -> None:
        super().__init__()
        self._factor = attention_factor
        self._query_beta = query_beta
        self._original = original_max_positions
        self.frequencies: torch.Tensor
        self.axes: torch.Tensor | None
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", axes, persistent=False)

    @classmethod
    def of(cls, spec: RopeSpec, head_dim: int, device: torch.device) -> Rotary:
        """The embedding of a text tower."""
        return cls(
            inverse_frequencies(spec, head_dim).to(device),
            axes_of(spec, head_dim).to(device) if spec.sections else None,
            attention_factor=attention_factor(spec),
            query_beta=spec.query_beta,
            original_max_positions=spec.original_max_positions,
        )

    @classmethod
    def axial(cls, theta: float, head_dim: int, device: torch.device, *, shared: bool = False) -> Rotary:
        """Of patches in a plane: the first half of the frequencies reads the row, the second the column.

        Both have all frequencies of half a head, or with ``shared`` those of a head in turn, as Pixtral's.
        """
        if shared:
            whole = inverse_frequencies(RopeSpec(theta=theta), head_dim)
            frequencies = torch.cat((whole[0::2], whole[1::2]))
        else:
            frequencies = inverse_frequencies(RopeSpec(theta=theta), head_dim // 2).repeat(2)
        axes = torch.arange(2).repeat_interleave(len(frequencies) // 2)
        return cls(frequencies.to(device), axes.to(device))

    def forward(self, positions: torch.Tensor) -> Rotation:
        """int32 ``[k, tokens]`` to the rotation of these tokens."""
        where = positions.to(torch.float32)
        of_each = where[0][:, None] if self.axes is None else where.index_select(0, self.axes).t()
        # A product has the layout of its factors, and kernels read the rows of tokens one after another.
        angles = (of_each.contiguous() * self.frequencies)[:, None, :]
        cosines, sines = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cosines, sines = cosines * self._factor, sines * self._factor
        if not self._query_beta:
            return Rotation(cosines, sines)
        # Llama 4: 1 + beta * log(1 + floor(position / original context)), transformers' Ministral3.
        scale = 1 + self._query_beta * torch.log1p(torch.floor(where[0] / self._original))
        return Rotation(cosines, sines, scale[:, None, None])


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position, float32 ``[head_dim / 2]`` on the CPU.

    ``llama3`` leaves wavelengths alone that fit often into the original context, divides the frequency of
    those that hardly fit into it by ``factor``, and blends linearly in between. ``yarn`` (arXiv:2309.00071)
    blends linearly between the frequencies that turn ``beta_fast`` and ``beta_slow`` times in it.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.rope_type == "default":
        return frequencies
    if spec.rope_type == "linear":
        return frequencies / spec.factor
    if spec.rope_type == "yarn":
        return _yarn(spec, head_dim, frequencies)
    context = spec.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    share = (context / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - share) * frequencies / spec.factor + share * frequencies
    scaled = torch.where(wavelengths > context / spec.low_freq_factor, frequencies / spec.factor, blended)
    return torch.where(wavelengths < context / spec.high_freq_factor, frequencies, scaled)


def _yarn(spec: RopeSpec, head_dim: int, frequencies: torch.Tensor) -> torch.Tensor:
    def where(turns: float) -> float:
        """The number of the frequency, as a fraction, that turns so often in the original context."""
        return (
            head_dim
            * math.log(spec.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(spec.theta))
        )

    low, high = where(spec.beta_fast), where(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    slow = ((steps - low) / ((high - low) or 0.001)).clamp(0, 1)
    return frequencies / spec.factor * slow + frequencies * (1 - slow)


def attention_factor(spec: RopeSpec) -> float:
    """What cosines and sines are multiplied with; 1 but for yarn."""
    if spec.rope_type != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor

    def scale(by: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * by * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def axes_of(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Which row of the positions each frequency reads: int64 ``[head_dim / 2]`` on the CPU.

    Interleaved: frequency i reads axis i modulo their number, as long as the axis has any left; the first
    axis reads the rest. Chunked: the axes follow one another.
    """
    count = len(spec.sections)
    if not spec.interleaved:
        return torch.arange(count).repeat_interleave(torch.tensor(spec.sections))
    number = torch.arange(head_dim // 2)
    axis = number % count
    left = torch.tensor(spec.sections)[axis] * count
    return torch.where(number < left, axis, 0)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate ``[tokens, heads, head_dim]``; the first half of each head pairs with its second half.

    In float32 whatever the heads' type: rounding the angles to bfloat16, as the usual implementations do,
    costs more than all other rounding of a layer together.
    """
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.to(heads.dtype)
