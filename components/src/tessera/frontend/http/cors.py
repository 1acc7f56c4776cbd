"""Cross-origin requests (CORS): which pages of other hosts a browser lets ask the service."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tessera.settings import NOT_NEGATIVE, Setting

_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")

# What a page may read of an answer beside its body and what every page may.
_EXPOSED: Final = (
    *("Retry-After", "WWW-Authenticate", "X-Request-Id"),
    *("X-Compute-Tokens", "X-Tessera-Timings"),
)


def _no_origins(flag: str, given: Any) -> str | None:
    """Why these are no origins, as browsers send them, or None."""
    wrong = next((one for one in given if not _ORIGIN.fullmatch(one)), None)
    if wrong is None:
        return None
    return f"{flag}: {wrong!r} is no origin, such as https://app.example.com or http://localhost:3000, nor *"


class CorsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Without origins browsers let pages of this service alone ask it."""

    allow_origins: Annotated[
        tuple[str, ...],
        Setting(
            flag="--cors-allow-origins",
            metavar="ORIGIN",
            check=_no_origins,
            help="origins whose web pages may send requests from a browser; * is all, none by default",
            more="An origin is scheme, host and port. A preflight needs no key and counts as no request; "
            "errors have the headers, too",
        ),
    ] = ()
    allow_methods: Annotated[
        tuple[str, ...],
        Setting(
            flag="--cors-allow-methods",
            metavar="METHOD",
            help="methods that these web pages may use; all by default",
        ),
    ] = ("*",)
    allow_headers: Annotated[
        tuple[str, ...],
        Setting(
            flag="--cors-allow-headers",
            metavar="HEADER",
            help="headers that these web pages may send; all by default",
        ),
    ] = ("*",)
    allow_credentials: Annotated[
        bool,
        Setting(
            flag="--cors-allow-credentials",
            help="allow cookies and certificates; an API key in a header needs neither",
        ),
    ] = False
    max_age_seconds: Annotated[
        int,
        Setting(
            flag="--cors-max-age",
            metavar="SECONDS",
            check=NOT_NEGATIVE,
            help="time that a browser keeps the answer to a preflight",
        ),
    ] = 600

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application that tells browsers of these origins what they may; ``app`` without any."""
        if not self.allow_origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self.allow_origins,
            allow_methods=self.allow_methods,
            allow_headers=self.allow_headers,
            allow_credentials=self.allow_credentials,
            expose_headers=_EXPOSED,
            max_age=self.max_age_seconds,
        )
