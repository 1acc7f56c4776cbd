"""What to build: one stage, its arithmetic, the shapes it must take, and where it will run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from tessera.settings import Setting

BUILD_DTYPES = ("float32", "bfloat16", "float16", "float8")


class Stage(StrEnum):
    """The part of a model that one engine runs.

    ``embed``, ``lm`` and ``post`` are the text stage in three: token embedding with vision rows, the layers,
    and pooling. ``fused`` is the vision and the text stage in one.
    """

    VISION = "vision"
    TEXT = "text"
    FUSED = "fused"
    EMBED = "embed"
    LM = "lm"
    POST = "post"


class Layout(StrEnum):
    """How sequences are laid out in a text batch: end to end, or each padded to one length with a mask."""

    PACKED = "packed"
    PADDED = "padded"


class Range(msgspec.Struct, frozen=True, array_like=True):
    """The sizes that an axis may have, and the one to tune for; written ``[min, opt, max]``."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max or self.max < 1:
            raise ValueError(
                f"[{self.min}, {self.opt}, {self.max}] is not [min, opt, max] in ascending order"
            )

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max

    def __str__(self) -> str:
        return f"{self.min}..{self.opt}..{self.max}"


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One set of shapes to build for; a stage reads the axes that it has."""

    units: Annotated[Range, Setting(help="`[min, opt, max]` units in a vision batch")] = Range(1, 8, 32)
    sequences: Annotated[Range, Setting(help="`[min, opt, max]` sequences in a text batch")] = Range(1, 8, 64)
    tokens: Annotated[
        Range,
        Setting(help="`[min, opt, max]` tokens: of all sequences when packed, of each when padded"),
    ] = Range(1, 2048, 16384)
    rows: Annotated[Range, Setting(help="`[min, opt, max]` vision rows in a text batch")] = Range(
        1, 256, 16384
    )


class BuildSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine to build, as a list entry below ``build`` in an engine config file."""

    stage: Annotated[Stage, Setting(help="the stage that the engine runs")]
    flavour: Annotated[str, Setting(help="`aoti`, `tensorrt` or `tensorrt_rtx`")]
    dtype: Annotated[
        str,
        Setting(
            help="`float32`, `bfloat16`, `float16`; `float8` computes products in float8, the rest in "
            "bfloat16"
        ),
    ] = "bfloat16"
    layout: Annotated[Layout, Setting(help="the layout of sequences in a text batch")] = Layout.PACKED
    capabilities: Annotated[
        tuple[str, ...],
        Setting(help="CUDA compute capabilities such as `8.9`, or `cpu`; by default this machine's"),
    ] = ()
    profiles: Annotated[
        tuple[Profile, ...], Setting(help="the sizes that it takes; it is tuned for the first one's `opt`")
    ] = (Profile(),)
    decomposable: Annotated[
        bool,
        Setting(
            help="attention may be taken apart into products and a softmax if the flavour has no fused "
            "kernel; otherwise the build fails"
        ),
    ] = False
    calibration: Annotated[
        Path | None,
        Setting(help="directory of images and .txt files, one input a line, for the steps of `float8`"),
    ] = None

    def __post_init__(self) -> None:
        if self.dtype not in BUILD_DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(BUILD_DTYPES)}")
        if not self.profiles:
            raise ValueError("profiles must list at least one profile")


AxisRanges = Mapping[str, Range]
"""The sizes that each named axis may have, and the one to tune for."""


def axis_ranges(profiles: Sequence[Profile]) -> AxisRanges:
    """From 1 to the largest size of any profile, tuned for the first profile's; small sizes cost nothing."""
    return {
        axis: Range(
            1,
            max(1, getattr(profiles[0], axis).opt),
            max(getattr(profile, axis).max for profile in profiles),
        )
        for axis in ("units", "sequences", "tokens", "rows")
    }
