"""What is looked for: a text, a picture, or both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_search.errors import QueryError
from image_search.folder import media_type, shown
from image_search.service import Served, Service, Vector, picture_part


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
        try:
            data = query.image.read_bytes()
        except OSError as error:
            raise QueryError(f"{shown(query.image)}: {error.strerror}") from error
        asked = [picture_part(data, media_type(query.image))]
        if query.text.strip():
            asked.append({"type": "text", "text": query.text})
    (row,) = (await service.embed(model, [asked], **options)).rows
    if isinstance(row, str):
        raise QueryError(f"the service cannot embed the query: {row}")
    return row
