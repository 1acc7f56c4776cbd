"""The worker of this very process as what embeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from tessera import tracing, wire
from tessera.errors import ProtocolError
from tessera.frontend.deadline import Deadline
from tessera.frontend.serving.dispatch import Answer

Ask = Callable[[wire.Request], Awaitable[wire.Reply]]


class LocalEmbedder:
    """An ``Embedder`` that asks one worker and sends nothing elsewhere."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def embed(
        self, items: Sequence[wire.Item], *, request_id: str, priority: int, client: str, deadline: Deadline
    ) -> Answer:
        reply = await self._ask(
            wire.EmbedRequest(
                request_id=request_id,
                items=tuple(items),
                timeout_ms=max(1, int(deadline.left() * 1e3)),
                priority=priority,
                client=client,
                trace=tracing.carrier(),
            )
        )
        if isinstance(reply, wire.Failure):
            raise reply.error()
        if not isinstance(reply, wire.EmbedReply):
            raise ProtocolError(f"the worker answered with {type(reply).__name__}")
        shape = (len(items), reply.hidden)
        return Answer(
            vectors=np.frombuffer(reply.vectors, "<f4").reshape(shape),
            norms=np.frombuffer(reply.norms, "<f4"),
            errors={index: failure.error() for index, failure in reply.failures.items()},
            cached_tokens=list(reply.cached_tokens),
            timings=reply.timings,
        )
