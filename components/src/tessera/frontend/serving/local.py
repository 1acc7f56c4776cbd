"""The ``Embedder`` of one worker, that of its own process perhaps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tessera import tracing, wire
from tessera.errors import ProtocolError
from tessera.frontend.serving.dispatch import Answer, Call
from tessera.models.base import Model, Outputs

Ask = Callable[[wire.Request], Awaitable[wire.Reply]]


class LocalEmbedder:
    """An ``Embedder`` that asks one worker and sends nothing elsewhere."""

    def __init__(self, ask: Ask, model: Model) -> None:
        self._ask = ask
        self._outputs = Outputs.of_model(model)

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer:
        reply = await self._ask(tracing.carrying(call.message(items, call.deadline.left())))
        if isinstance(reply, wire.Failure):
            raise reply.error()
        if not isinstance(reply, wire.EmbedReply):
            raise ProtocolError(f"the worker answered with {type(reply).__name__}")
        answer = Answer.empty(items, *call.outputs_of(self._outputs))
        answer.put(range(len(items)), reply)
        return answer
