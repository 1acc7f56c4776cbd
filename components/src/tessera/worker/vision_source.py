"""Where an embed worker's vision rows come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tessera import tracing, wire

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """Rows ``[tiles * tokens_per_tile, hidden]`` that nobody will write to again, and what they cost.

    ``asked`` is the span that they were made for, for those who share them; ``rounding`` that of the engine.
    """

    rows: torch.Tensor
    timings: wire.Timings
    asked: tracing.Reference | None = None
    rounding: str = ""


class VisionSource(Protocol):
    """Encodes one image that is not in the cache."""

    @property
    def tiles(self) -> int:
        """Tiles that this process itself takes at a time; 0 when others encode for it."""
        ...

    @property
    def running_seconds(self) -> float:
        """How long an engine of this process has been busy with one batch."""
        ...

    @property
    def roundings(self) -> Sequence[str]:
        """Those of the engines that an image may come to now, or came to last if there is none."""
        ...

    async def encode(
        self, image: wire.Image, *, request_id: str, timeout: float, client: str = "", priority: int = 0
    ) -> EncodedImage:
        """``timeout`` in seconds; ``client`` and ``priority`` as in ``wire.EmbedRequest``."""
        ...

    async def close(self) -> None: ...
