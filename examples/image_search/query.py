"""What is looked for: a text, a picture, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from image_search.errors import QueryError
from image_search.folder import media_type, shown
from image_search.index import Hit
from image_search.service import Served, Service, Vector, picture_part, picture_url


@dataclass(frozen=True, slots=True)
class Query:
    """At least one of ``text`` and ``image``."""

    text: str
    image: Path | None

    def __post_init__(self) -> None:
        if not self.text.strip() and self.image is None:
            raise QueryError("give a text, or a picture with --image, or both")

    def __str__(self) -> str:
        picture = shown(self.image) if self.image else ""
        return " + ".join(part for part in (f"“{self.text}”" if self.text.strip() else "", picture) if part)


async def rerank(query: Query, service: Service, model: str | None, hits: list[Hit]) -> list[Hit]:
    """The same pictures in the order, and with the scores, that a reranker gives them."""
    asked: Any = query.text
    if query.image is not None:
        asked = {"image": picture_url(_bytes(query.image), media_type(query.image))}
        if query.text.strip():
            asked["text"] = query.text
    pictures = [{"image": picture_url(_bytes(hit.paths[0]), media_type(hit.paths[0]))} for hit in hits]
    return [replace(hits[index], score=score) for index, score in await service.rank(model, asked, pictures)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise QueryError(f"{shown(path)}: {error.strerror}") from error


async def ask(query: Query, service: Service, model: Served) -> Vector:
    """The query's unit vector.

    A text is embedded as a query. A picture, with or without a text, is embedded as the indexed ones are:
    it asks for what is like it.
    """
    options: dict[str, Any] = {}
    if query.image is None:
        asked: Any = query.text
        options["input_type"] = "query"
    else:
        asked = [picture_part(_bytes(query.image), media_type(query.image))]
        if query.text.strip():
            asked.append({"type": "text", "text": query.text})
    (row,) = (await service.embed(model, [asked], **options)).rows
    if isinstance(row, str):
        raise QueryError(f"the service cannot embed the query: {row}")
    return row
