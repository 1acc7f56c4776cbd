"""The routes of a client's API, and the OpenAPI document about all of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tessera import __version__
from tessera.frontend.api.schema import OPENAI_ERROR, OUTPUTS, Schema
from tessera.frontend.http.errors import MEANINGS

Answering = Callable[[Request], Awaitable[Response]]
_DESCRIPTION: Final = "Text and images in, vectors or scores out; every common client's requests."


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
        described: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(path, answer, name=name, include_in_schema=bool(summary))
        # Starlette answers HEAD wherever it answers GET.
        self.methods = set(methods)
        self._summary, self._described = summary, described

    @property
    def outputs(self) -> Collection[str]:
        """The kinds of output that a model has whose requests come here; none for other routes."""
        outputs: Collection[str] = self._described.get(OUTPUTS, ())
        return outputs

    def operation(self, tag: str) -> dict[str, Any]:
        """Return the operation object of OpenAPI, which stands below ``tag``."""
        words = re.sub(r"\W", "_", f"{self.name}{self.path_format}")
        found = {
            "tags": [tag],
            "summary": self._summary,
            "description": inspect.getdoc(self.endpoint),
            "operationId": "_".join((words, *map(str.lower, sorted(self.methods or ())))),
            "parameters": [
                {
                    "name": word,
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "title": word.title()},
                }
                for word in self.param_convertors
            ],
            "responses": {"200": {"description": "the answer"}},
        }
        return {name: value for name, value in found.items() if value} | dict(self._described)


def get_route(path: str, answer: Answering, schema: Schema, *statuses: int, summary: str) -> ApiRoute:
    """Return the route of a GET that answers JSON of the schema, and with it or an error at ``statuses``."""
    content = {"application/json": {"schema": schema}}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status in statuses:
        body = content if status == 503 else {"application/json": {"schema": OPENAI_ERROR}}
        responses[str(status)] = {"description": MEANINGS[status], "content": body}
    return ApiRoute(path, answer, methods=("GET",), summary=summary, described={"responses": responses})


def openapi(routes: Iterable[tuple[str, ApiRoute]]) -> dict[str, Any]:
    """Describe routes, each with the tag that it stands below, by OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for tag, route in routes:
        for method in route.methods or () if route.include_in_schema else ():
            paths.setdefault(route.path_format, {})[method.lower()] = route.operation(tag)
    about = {"title": "Tessera", "description": _DESCRIPTION, "version": __version__}
    return {"openapi": "3.1.0", "info": about, "paths": paths}
