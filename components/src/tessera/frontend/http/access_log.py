"""The log line of each HTTP request; at most ten a second about requests that were refused unread."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Callable
from contextvars import Context
from functools import lru_cache
from typing import Final

from tessera.frontend.exchange import Exchange
from tessera.frontend.http.auth import ANONYMOUS
from tessera.frontend.http.errors import Failure
from tessera.logs import Line, Value, is_sampled

_LINES_A_SECOND: Final = 10


class RefusalLines:
    """Lets the first ten lines of a second pass and counts the others.

    A refusal takes a fraction of the time that a line takes: in a flood, a line for each refusal would cost a
    full service more than the refusals.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seen = 0

    def passes(self) -> bool:
        """Whether this refusal gets a line; asked once for each."""
        self._seen += 1
        return self._seen <= _LINES_A_SECOND

    def none_passes(self) -> bool:
        """Whether a refusal now would get no line, and no second is over whose others are to be counted."""
        return self._seen >= _LINES_A_SECOND and self._clock() - self._began < 1.0

    def left_out(self) -> int:
        """How many got no line in the last second; 0 until that second is over, and when asked again."""
        now = self._clock()
        if now - self._began < 1.0:
            return 0
        left_out = max(0, self._seen - _LINES_A_SECOND)
        self._began, self._seen = now, 0
        return left_out


log = logging.getLogger("tessera.frontend.access")

OTHER = "other"
"""The route of a request for what does not exist."""

METRICS_PATHS = frozenset(("/metrics", "/v1/metrics"))
"""The frontend's metrics; the second is NIM's."""

# Asked every few seconds by balancers, Prometheus and the page.
_POLLED = METRICS_PATHS | {"/status"}

# Keys of a body stand in it, and a body may hold anything.
_PARAM = re.compile(r"[\w.\[\]-]{1,120}", re.ASCII)
_PATH_CHARACTERS = 120


class AccessLog:
    """Writes at INFO, answers of 500 and above at ERROR, polls and the page's own files at DEBUG.

    Of requests that were refused before their bodies were read, ten lines a second are written, and the
    number of the others.

    Nothing of a request's content is written: no body, no query string, no header but its id. Messages of
    4xx answers quote requests, so these lines give their code and the input's name instead.

    Below ERROR only a ``share`` of the requests has lines.
    """

    def __init__(self, quiet_paths: frozenset[str], share: float = 1.0) -> None:
        self._share = share
        self._quiet = quiet_paths | _POLLED
        self.refusals = RefusalLines()

    def write(
        self, exchange: Exchange, *, route: str, status: int, seconds: float, unread: bool = False
    ) -> None:
        """``status`` 0: no answer was begun. An unexpected error brings its traceback.

        ``unread`` says that the request was refused before its body was read.
        """
        error = exchange.unexpected
        if left_out := self.refusals.left_out():
            # It is about none of the requests, the one being served included.
            Context().run(log.info, "%d more requests were refused unread within a second", left_out)
        if unread and error is None and not self.refusals.passes():
            return
        level = logging.ERROR if status >= 500 or error is not None else logging.INFO
        method, key, failure = exchange.method, exchange.key, exchange.failure
        if exchange.path in self._quiet and method != "POST" and error is None:
            level = logging.DEBUG
        if not log.isEnabledFor(level) or (
            level < logging.ERROR and not is_sampled(exchange.line.request_id, self._share)
        ):
            return
        fields: dict[str, Value] = {
            "request_id": exchange.line.request_id,
            "method": method,
            "route": route,
            # Of a route that does not exist it is what helps to find the client's mistake.
            "path": exchange.path[:_PATH_CHARACTERS] if route == OTHER else None,
            "status": status,
            "duration_ms": round(seconds * 1e3, 1),
            "key": None if key == ANONYMOUS else key,
            "client": _address(exchange.peer),
            **exchange.line.fields,
        }
        if failure is not None:
            fields |= _failure_fields(failure, status)
        log.handle(Line(log, level, f"{method} {route} {status}", fields, created=time.time(), error=error))


def _failure_fields(failure: Failure, status: int) -> dict[str, Value]:
    code, param, message = failure.error["code"], failure.error["param"], failure.error["message"]
    named = param if param and _PARAM.fullmatch(param) else None
    return {"code": code, "param": named, "error": message if status >= 500 else None}


def write_refused_head(request_id: str, failure: Failure) -> None:
    """The line about a request whose head was not even read to its end."""
    fields = {"request_id": request_id, "status": failure.status, "code": failure.error["code"]}
    log.info("a request's head was refused with %d", failure.status, extra={"fields": fields})


@lru_cache(maxsize=256)
def _address(host: str) -> str | None:
    try:
        # A proxy on this host may have said it, in whatever words.
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None
