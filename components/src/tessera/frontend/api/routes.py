"""The routes of a client's API, and the OpenAPI document about all of them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from tessera import __version__
from tessera.frontend.api.schema import OPENAI_ERROR, OUTPUTS, Schema, json_of
from tessera.frontend.http.errors import MEANINGS

Answering = Callable[[Request], Awaitable[Response]]
_DESCRIPTION: Final = "Text and images in, vectors or scores out; every common client's requests."


class ApiRoute(APIRoute):
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
        # FastAPI describes a name in a path where the function takes it as a parameter.
        named = [
            {
                "name": word,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "title": word.title()},
            }
            for word in re.findall(r"{(\w+)", path)
        ]
        super().__init__(
            path,
            answer,
            methods=set(methods),
            name=name,
            summary=summary,
            include_in_schema=bool(summary),
            openapi_extra={**described, **({"parameters": named} if named else {})},
        )

    @property
    def outputs(self) -> Collection[str]:
        """The kinds of output that a model has whose requests come here; none for other routes."""
        outputs: Collection[str] = (self.openapi_extra or {}).get(OUTPUTS, ())
        return outputs


def get_route(path: str, answer: Answering, schema: Schema, *statuses: int, summary: str) -> ApiRoute:
    """Return the route of a GET that answers JSON of the schema, and with it or an error at ``statuses``."""
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": json_of(schema)}}
    for status in statuses:
        content = json_of(schema if status == 503 else OPENAI_ERROR)
        responses[str(status)] = {"description": MEANINGS[status], "content": content}
    return ApiRoute(path, answer, methods=("GET",), summary=summary, described={"responses": responses})


def openapi(routes: Iterable[tuple[str, ApiRoute]]) -> dict[str, Any]:
    """Describe routes, each with the tag that it stands below."""
    described = []
    for tag, route in routes:
        route.tags = [tag]
        described.append(route)
    return get_openapi(title="Tessera", version=__version__, description=_DESCRIPTION, routes=described)
