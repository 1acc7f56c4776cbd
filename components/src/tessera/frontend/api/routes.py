"""The routes of a client's API, and the OpenAPI document about all of them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from inspect import cleandoc
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from tessera import __version__
from tessera.frontend.api.schema import OPENAI_ERROR, Schema
from tessera.frontend.http.errors import MEANINGS

Answering = Callable[[Request], Awaitable[Response]]
_DESCRIPTION: Final = "Text and images in, vectors or scores out; every common client's requests."
_UNDESCRIBED: Final = {
    "200": {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
}


class ApiRoute(Route):
    """Answers the requests for a path by a function, whose name and docstring describe it unless given.

    ``described`` are further keys of its OpenAPI operation. A route without a ``summary`` is not described.
    """

    def __init__(
        self,
        path: str,
        answer: Answering,
        *,
        methods: Collection[str] = ("POST",),
        name: str | None = None,
        summary: str = "",
        described: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(path, answer, methods=methods, name=name)
        # Starlette takes HEAD wherever it takes GET.
        self.methods = set(methods)
        self.summary = summary
        self.described = described or {"responses": _UNDESCRIBED}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}

    def operation(self, method: str, tag: str) -> dict[str, Any]:
        """Return the OpenAPI operation."""
        operation: dict[str, Any] = {"tags": [tag], "summary": self.summary}
        if self.endpoint.__doc__:
            operation["description"] = cleandoc(self.endpoint.__doc__)
        unique = re.sub(r"\W", "_", f"{self.name}{self.path_format}")
        operation["operationId"] = f"{unique}_{method.lower()}"
        if self.param_convertors:
            operation["parameters"] = [
                {
                    "name": name,
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "title": name.title()},
                }
                for name in self.param_convertors
            ]
        return operation | self.described


def get_route(path: str, answer: Answering, schema: Schema, *statuses: int, summary: str) -> ApiRoute:
    """Return the route of a GET that answers JSON of the schema, and with it or an error at ``statuses``."""
    content = {"application/json": {"schema": schema}}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status in statuses:
        body = content if status == 503 else {"application/json": {"schema": OPENAI_ERROR}}
        responses[str(status)] = {"description": MEANINGS[status], "content": body}
    return ApiRoute(path, answer, methods=("GET",), summary=summary, described={"responses": responses})


def openapi(routes: Iterable[tuple[str, ApiRoute]]) -> dict[str, Any]:
    """Describe routes, each with the tag that it stands below."""
    paths: dict[str, dict[str, Any]] = {}
    for tag, route in routes:
        for method in sorted(route.methods or ()):
            if route.summary:
                paths.setdefault(route.path_format, {})[method.lower()] = route.operation(method, tag)
    info = {"title": "Tessera", "description": _DESCRIPTION, "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}
