"""One of Dynamo's own models: listed under a name, for an unmodified ``dynamo.frontend`` to find and call."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

from tessera import errors, tracing
from tessera.errors import RequestCancelled, TesseraError, internal_error
from tessera.rpc.runtime import Runtime
from tessera.rpc.server import Server
from tessera.tasks import Left, run_until

log = logging.getLogger(__name__)

Json = dict[str, Any]
ModelHandler = Callable[[Mapping[str, Any], str], Awaitable[Json]]
"""(the body of an embeddings request, the request's id) → the body of the answer; raises ``TesseraError``."""

_CLASSES: Final[dict[type[TesseraError], str]] = {
    TesseraError: "Internal",
    errors.RequestError: "InvalidRequest",
    errors.PayloadTooLarge: "PayloadTooLarge",
    errors.UnsupportedMedia: "UnsupportedMedia",
    errors.ModelNotFound: "NotFound",
    errors.ServiceError: "Unavailable",
    errors.Overloaded: "RateLimited",
    errors.RequestCancelled: "Cancelled",
    errors.EngineFailed: "Internal",
    errors.HandOffError: "Unavailable",
}
"""What Dynamo calls each error; a class that is not listed takes its base class's row. The frontend answers
with 500, 400, 413, 415, 404, 503, 429 and 499.

A deadline that has passed is ``Unavailable`` and not ``DeadlineExceeded``: for that the frontend would leave
the worker alone for some seconds, and under overload soon all of them.
"""


class ModelServer(Server):
    """An endpoint that takes the requests of Dynamo's frontend, which sends a body as the client wrote it.

    The frontend keeps ``name`` as the model and knows no other that the endpoint answers to. It finds no
    files of the model there: inputs come as text.
    """

    def __init__(self, runtime: Runtime, address: str, name: str, handler: ModelHandler) -> None:
        super().__init__(runtime, address, _no_messages)
        self._name = name
        self._answer_model = handler

    async def _withdraw(self) -> None:
        from dynamo.llm import unregister_model

        # Where discovery does not answer, the card goes with the lease.
        await self._unless_down(partial(unregister_model, self._endpoint), "take the model out of discovery")

    async def _announce(self) -> None:
        from dynamo.llm import ModelInput, ModelType, WorkerType, register_model

        await register_model(
            ModelInput.Text,
            ModelType.Embedding,
            self._endpoint,
            self._name,
            self._name,
            worker_type=WorkerType.Aggregated,
            needs=[],
            skip_model_assets=True,
        )

    async def _generate(self, request: object, context: Any) -> AsyncIterator[Any]:
        if not isinstance(request, dict) or "input" not in request:
            # A health probe: the frontend sends nothing without an input.
            yield {"status": "ok"}
            return
        try:
            yield await self._unless_gone(self._embed(request, context), context)
        except TesseraError as error:
            yield _refusal(error)
        except Exception as error:
            log.exception("%s: a request failed", self.address)
            yield _refusal(internal_error(error))

    async def _unless_gone(self, work: Coroutine[Any, Any, Json], context: Any) -> Json:
        """The result of ``work``; cancels it and raises ``RequestCancelled`` when its caller goes away."""
        self.under_way += 1
        try:
            return await run_until(context.async_killed_or_stopped(), work)
        except Left:
            raise RequestCancelled("the caller went away") from None
        finally:
            self.under_way -= 1

    async def _embed(self, request: Mapping[str, Any], context: Any) -> Json:
        # The span is the work's own: a generator may be resumed in another context than it began in.
        with tracing.serve(self.address, context.trace_headers() or {}):
            return await self._answer_model(request, context.id())


async def _no_messages(message: object) -> Any:
    raise RequestCancelled("this endpoint takes no messages of Tessera's own")


def _refusal(error: TesseraError) -> Json:
    """An error in the runtime's own envelope.

    An exception would do too, but the runtime prints the traceback of each and keeps the text of most from
    the client.
    """
    kind = next(_CLASSES[base] for base in type(error).__mro__ if base in _CLASSES)
    text = error.message.encode("utf-8", "replace").decode("utf-8")
    public = {"type": "message", "message": text}
    return {
        "_dynamo_annotated": True,
        "event": "error",
        "error": {"class": kind, "message": error.code, "public": public},
    }
