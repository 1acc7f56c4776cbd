"""``/openapi.json``, and ``/docs``: the same as one page without a script, and nothing from another host."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import OUTPUTS

_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
h2{margin-top:2.5rem;border-top:1px solid #ccc;padding-top:1rem}
code{background:#f2f2f2;padding:.1em .3em;border-radius:.2em}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.3rem .6rem;border-bottom:1px solid #e5e5e5}
td{overflow-wrap:anywhere;white-space:pre-line}
@media(min-width:50rem){td:first-child{overflow-wrap:normal}}
@media(prefers-color-scheme:dark){body{background:#161616;color:#e8e8e8}code{background:#2a2a2a}
td,th,h2{border-color:#3a3a3a}a{color:#8ab4f8}}
"""
_CODE: Final = re.compile(r"`([^`\n]+)`")
_DIGEST: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS: Final = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes(describe: Callable[[], dict[str, Any]]) -> list[ApiRoute]:
    """Return the routes that show the OpenAPI document that ``describe`` makes."""

    # Once somebody asks, and beside the loop: it takes 0.2 s of processor time, half of a frontend's start.
    async def machines(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(describe))

    async def people(request: Request) -> Response:
        page = await asyncio.to_thread(lambda: render(describe()))
        return Response(page, media_type="text/html; charset=utf-8", headers=_HEADERS)

    methods = ("GET", "HEAD")
    return [ApiRoute("/openapi.json", machines, methods=methods), ApiRoute("/docs", people, methods=methods)]


def render(document: dict[str, Any]) -> str:
    """An OpenAPI document as HTML; everything in it is escaped."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    body = "".join(
        piece
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for piece in _operation(method, path, operation)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(document['info']['description'])}</p>"
        '<p>The same for machines: <a href="openapi.json">openapi.json</a>.</p>'
        f"{body}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('summary', ''))}</p>"
    if outputs := operation.get(OUTPUTS):
        yield f"<p>For models whose output is {escape(' or '.join(outputs))}.</p>"
    content = operation.get("requestBody", {}).get("content", {})
    # The forms of a body, where clients have one each.
    schemas = [media["schema"] for media in content.values()]
    forms = [form for schema in schemas for form in ([schema] if "properties" in schema else schema["anyOf"])]
    for schema in forms:
        if len(forms) > 1:
            yield f"<h3>{escape(schema['title'])}</h3>"
        required = schema.get("required", ())
        rows = (
            (
                f"{name}{' (required)' if name in required else ''}",
                _type(found),
                _json(found["default"]) if "default" in found else "",
                "\n".join(map(_json, found.get("examples", ()))),
                found.get("description", ""),
            )
            for name, found in schema.get("properties", {}).items()
        )
        yield _table(("field", "type", "default", "example", "meaning"), rows)
    meanings = ((status, answer["description"]) for status, answer in operation["responses"].items())
    yield _table(("status", "meaning"), meanings)


def _text(text: str) -> str:
    """A description as HTML: what stands in backticks is code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _type(schema: dict[str, Any], depth: int = 0) -> str:
    """A schema in a few words: what a list is of, and no alternatives of alternatives."""
    if "enum" in schema:
        return " | ".join(value if isinstance(value, str) else json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        kinds = dict.fromkeys(kind for one in schema["anyOf"] for kind in _type(one, depth).split(" | "))
        return " | ".join(kind for kind in kinds if kind != "null")
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " | ".join(kind)
    if kind == "array":
        of = _type(schema.get("items", {}), depth + 1)
        return "list" if depth or " | " in of else f"list of {of}"
    return str(kind)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><tr>{names}</tr>{cells}</table>"
