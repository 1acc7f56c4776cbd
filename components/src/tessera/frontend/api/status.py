"""``/status``: how busy the service is, for people and the try-it page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera import wire
from tessera.checkpoint.origin import origin
from tessera.errors import TesseraError
from tessera.frontend.api.routes import ApiRoute, get_route
from tessera.frontend.api.schema import DESCRIBED, MAYBE_TEXT, TEXT, WHOLE, Schema, nullable, object_of
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.service import ClientApi, Service, described
from tessera.frontend.serving.served import ServedModel
from tessera.rpc import Peers
from tessera.tasks import SingleFlight

_MAX_AGE_SECONDS: Final = 1.0
_ASK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A model; ``head`` is what does not change: its name and the like."""

    head: dict[str, Any]
    embed: Peers
    encode: Peers


class StatusBoard:
    """Asks every worker how busy it is, at most once a second however many viewers there are.

    ``models`` are those that are served now, ``waiting`` says why others are not, and ``in_flight`` counts
    requests.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[Shown]],
        waiting: Callable[[], dict[str, str]],
        metrics: FrontendMetrics,
        in_flight: Callable[[], int],
    ) -> None:
        self._models = models
        self._waiting = waiting
        self._in_flight = in_flight
        self._metrics = metrics
        self._shown: list[dict[str, Any]] = []
        self._asked_at = -_MAX_AGE_SECONDS
        self._asking: SingleFlight[None] = SingleFlight()

    async def read(self) -> dict[str, Any]:
        """Every worker with its ``state``, which is null where it did not answer within a second.

        What is said of the first model stands at the top, too.
        """
        if time.monotonic() - self._asked_at >= _MAX_AGE_SECONDS:
            await self._asking.run("", self._ask_all)
        frontend = {"requests_in_flight": self._in_flight(), **self._counted()}
        models = [{**model, **self._counted(model=model["model"])} for model in self._shown]
        first = self._shown[0] if self._shown else {"workers": []}
        return {**first, "frontend": frontend, "models": models, "waiting": self._waiting()}

    def _counted(self, **labels: str) -> dict[str, Any]:
        return {
            "inputs": self._metrics.total("tessera_inputs", "kind", **labels),
            "tokens": self._metrics.total("tessera_tokens", "kind", **labels),
        }

    async def _ask_all(self) -> None:
        models = self._models()
        workers = await asyncio.gather(*(_ask_each(model) for model in models))
        self._shown = [{**model.head, "workers": found} for model, found in zip(models, workers, strict=True)]
        self._asked_at = time.monotonic()


async def _ask_each(model: Shown) -> list[dict[str, Any]]:
    return await asyncio.gather(
        *(
            _ask(peers, instance, info)
            for peers in (model.embed, model.encode)
            for instance, info in sorted(peers.ready.items())
        )
    )


async def _ask(peers: Peers, instance: int, info: wire.WorkerInfo) -> dict[str, Any]:
    state: Any = None
    try:
        reply = await peers.call(instance, wire.Inspect(), timeout=_ASK_SECONDS)
        if isinstance(reply, wire.WorkerState):
            # Without the message's name, which matters between processes only.
            state = {name: msgspec.to_builtins(getattr(reply, name)) for name in reply.__struct_fields__}
    except TesseraError:
        # A worker of an earlier version, or one that is too busy: it is listed without numbers.
        pass
    return {
        "instance": f"{instance:x}",
        "role": info.role,
        "dtype": info.dtype,
        "rounding": info.rounding,
        "state": state,
    }


_COUNTS: Final[Schema] = {"type": "object", "additionalProperties": WHOLE}
_STATE: Final = nullable(
    object_of(
        queued={"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
        cache=nullable(_COUNTS),
        slab=nullable(_COUNTS),
    )
)
_WORKERS: Final[Schema] = {
    "type": "array",
    "items": object_of(instance=TEXT, role=TEXT, dtype=TEXT, rounding=TEXT, state=_STATE),
}
_MODEL: Final[dict[str, Schema]] = {
    "model": TEXT,
    "names": {"type": "array", "items": TEXT},
    **DESCRIBED,
    "fingerprint": TEXT,
    "checkpoint": MAYBE_TEXT,
    "workers": _WORKERS,
}
_STATUS: Final = object_of(
    optional=_MODEL.keys() - {"workers"},
    **_MODEL,
    frontend=object_of(requests_in_flight=WHOLE, inputs=_COUNTS, tokens=_COUNTS),
    models={
        "type": "array",
        "items": object_of(**_MODEL, inputs=_COUNTS, tokens=_COUNTS),
    },
    waiting={"type": "object", "additionalProperties": TEXT},
)


def _shown(service: Service, model: ServedModel) -> Shown:
    head = {
        "model": model.served.model,
        "names": list(model.served.names),
        **described(service, model),
        "fingerprint": model.model.fingerprint,
        "checkpoint": origin(model.model.path),
    }
    return Shown(head=head, embed=model.workers.embed, encode=model.workers.encode)


def _routes(service: Service) -> list[ApiRoute]:
    models = service.models
    board = StatusBoard(
        lambda: [_shown(service, model) for model in models],
        lambda: dict(models.waiting),
        service.metrics,
        lambda: service.admission.requests.used,
    )

    async def status(request: Request) -> Response:
        """For people and pages; ``/health`` is for balancers, ``/metrics`` for monitoring.

        ``checkpoint`` is ``random`` or ``demo`` for those that come with Tessera, else null. What is queued
        is in tokens for the text stage and in units (tiles, or patches) for the vision stage. Of several
        models the first stands at the top, as before there were several, and all of them in ``models``.
        """
        return JSONResponse(await board.read(), headers={"cache-control": "no-store"})

    return [get_route("/status", status, _STATUS, 401, summary="Workers, their queues and their caches")]


API: Final = ClientApi("Health", _routes)
