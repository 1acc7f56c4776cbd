"""Where an embed worker's vision rows come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tessera import wire

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """Rows ``[tiles * tokens_per_tile, hidden]`` that nobody will write to again, and what they cost."""

    rows: torch.Tensor
    timings: wire.Timings


class VisionSource(Protocol):
    """Encodes one image that is not in the cache."""

    async def encode(self, image: wire.Image, *, request_id: str, timeout: float) -> EncodedImage: ...

    async def close(self) -> None: ...
