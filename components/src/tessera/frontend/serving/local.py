"""An ``Embedder`` that asks one worker, the one of its own process perhaps, and sends nothing elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tessera import tracing, wire
from tessera.errors import ProtocolError
from tessera.frontend.serving.dispatch import Answer
from tessera.models.base import SCORES, Model, RowKind, stage_outputs
from tessera.tasks import Deadline

Ask = Callable[[wire.Request], Awaitable[wire.Reply]]


class LocalEmbedder:
    """An ``Embedder`` that asks one worker and sends nothing elsewhere."""

    def __init__(self, ask: Ask, model: Model) -> None:
        self._ask = ask
        self._outputs = {RowKind.OUTPUT: model.output, **stage_outputs(model)}

    async def embed(
        self,
        items: Sequence[wire.Item],
        *,
        request_id: str,
        priority: int,
        client: str,
        deadline: Deadline,
        queries: Sequence[bytes] = (),
        rows: RowKind = RowKind.OUTPUT,
    ) -> Answer:
        reply = await self._ask(
            wire.EmbedRequest(
                request_id=request_id,
                items=tuple(items),
                timeout_ms=max(1, int(deadline.left() * 1e3)),
                priority=priority,
                client=client,
                queries=tuple(queries),
                rows=rows.value,
                trace=tracing.carrier(),
            )
        )
        if isinstance(reply, wire.Failure):
            raise reply.error()
        if not isinstance(reply, wire.EmbedReply):
            raise ProtocolError(f"the worker answered with {type(reply).__name__}")
        answer = Answer.empty(items, SCORES if queries else self._outputs[rows])
        answer.put(range(len(items)), reply)
        return answer
