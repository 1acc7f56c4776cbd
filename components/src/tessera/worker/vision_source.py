"""Where an embed worker's vision rows come from: the seam, and this very process as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from opentelemetry.trace import Span

from tessera import wire
from tessera.engine.placement import Placement
from tessera.errors import DeadlineExceeded
from tessera.worker.vision_stage import VisionStage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """Rows ``[tiles * tokens_per_tile, hidden]`` that nothing writes to any more, and the time they took.

    ``span`` is the one that they were made in, if it is kept; ``rounding`` is the engine's.
    """

    rows: torch.Tensor
    timings: wire.Timings
    span: Span | None = None
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


class LocalVision:
    """The rows stay where the vision engine wrote them."""

    def __init__(self, stage: VisionStage, hidden: int, placement: Placement, rounding: str = "") -> None:
        self._stage = stage
        self._hidden = hidden
        self._placement = placement
        self.roundings = (rounding,)

    @property
    def tiles(self) -> int:
        return self._stage.capacity

    @property
    def running_seconds(self) -> float:
        return self._stage.running_seconds

    async def encode(
        self, image: wire.Image, *, request_id: str, timeout: float, client: str = "", priority: int = 0
    ) -> EncodedImage:
        try:
            async with asyncio.timeout(timeout):
                with self._stage.admit(image, client):
                    tiles, preprocess_ms = await self._stage.preprocess(image)
                    out = torch.empty(
                        self._stage.rows(tiles),
                        self._hidden,
                        dtype=self._placement.torch_dtype,
                        device=self._placement.device,
                    )
                    outcome = await self._stage.encode(tiles, out, client=client, priority=priority)
        except TimeoutError as error:
            raise DeadlineExceeded("the image was not encoded in time", param=image.param) from error
        return EncodedImage(
            out,
            wire.Timings(queue_ms=outcome.queue_ms, preprocess_ms=preprocess_ms, encode_ms=outcome.run_ms),
            rounding=self.roundings[0],
        )

    async def close(self) -> None:
        await self._stage.close()
