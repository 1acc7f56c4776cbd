"""``/status``: what people want to see of a running service, as JSON."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from tessera.frontend.api.schema import WHOLE, Schema, answers, object_of
from tessera.frontend.api.status import StatusBoard

_TEXT: Final[Schema] = {"type": "string"}
_COUNTS: Final[Schema] = {"type": "object", "additionalProperties": WHOLE}
_STATE: Final[Schema] = {
    "anyOf": [
        object_of(
            ("queued", "cache", "slab"),
            queued={"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
            cache={"anyOf": [_COUNTS, {"type": "null"}]},
            slab={"anyOf": [_COUNTS, {"type": "null"}]},
        ),
        {"type": "null"},
    ]
}
_STATUS: Final = object_of(
    ("model", "fingerprint", "checkpoint", "frontend", "workers"),
    model=_TEXT,
    fingerprint=_TEXT,
    checkpoint={"anyOf": [_TEXT, {"type": "null"}]},
    frontend=object_of(
        ("requests_in_flight", "inputs", "tokens"), requests_in_flight=WHOLE, inputs=_COUNTS, tokens=_COUNTS
    ),
    workers={
        "type": "array",
        "items": object_of(
            ("instance", "role", "dtype", "state"), instance=_TEXT, role=_TEXT, dtype=_TEXT, state=_STATE
        ),
    },
)


def routes(board: StatusBoard) -> APIRouter:
    router = APIRouter(tags=["Health"])

    @router.get(
        "/status", openapi_extra=answers(_STATUS, 401), summary="Workers, their queues and their caches"
    )
    async def status() -> Response:
        """For people and pages; ``/health`` is for balancers, ``/metrics`` for monitoring.

        ``checkpoint`` is ``random`` or ``demo`` for those that come with Tessera, else null. What is queued
        is in tokens for the text stage and in tiles for the vision stage.
        """
        return JSONResponse(await board.read(), headers={"cache-control": "no-store"})

    return router
