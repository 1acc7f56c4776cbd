"""Finds out that a device hangs, which raises nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tessera.errors import EngineDead
from tessera.tasks import KEEPER
from tessera.worker.roles import Service
from tessera.worker.settings import WorkerSettings


def watch(
    service: Service, settings: WorkerSettings, died: Callable[[EngineDead], None]
) -> asyncio.Task[None]:
    """Report an engine as dead whose batch takes too long, until the task is cancelled."""
    patience = max(settings.stages.text.stall_seconds, settings.stages.vision.stall_seconds)

    async def look() -> None:
        busy = service.running_seconds()
        if busy > patience:
            died(EngineDead(f"an engine has been busy with one batch for {busy:.0f} s"))

    return KEEPER.start("stall", look, every=min(1.0, patience / 4))
