"""Vision rows from this very process, for aggregated workers."""

from __future__ import annotations

import asyncio

import torch

from tessera import wire
from tessera.engine.placement import Placement
from tessera.errors import DeadlineExceeded
from tessera.worker.vision_source import EncodedImage
from tessera.worker.vision_stage import VisionStage


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
