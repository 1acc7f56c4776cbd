"""Hits in the order, and with the scores, that a reranker gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pybase64

from tessera.errors import ConfigError, ProtocolError
from tessera_corpus.item import Failure, Item
from tessera_corpus.search import Hit
from tessera_corpus.service import Service, said_of


async def reranked(
    service: Service, model: str, query: Item, hits: Sequence[tuple[Hit, Item | Failure]]
) -> list[tuple[Hit, Item | Failure]]:
    """By a service's reranker: its only one, where ``model`` is empty.

    Hits that cannot be read again are left out. Raises ``ConfigError`` for what the service refuses.
    """
    there = [(hit, item) for hit, item in hits if isinstance(item, Item)]
    if not there:
        return []
    body: dict[str, Any] = {"query": _value(query), "documents": [_value(item) for _, item in there]}
    if model:
        body["model"] = model
    answer = await service.ask("POST", "/v1/rerank", body)
    if not answer.is_success:
        raise ConfigError(f"{service.url}: {said_of(answer)}")
    try:
        results = [(int(each["index"]), float(each["relevance_score"])) for each in answer.json()["results"]]
        return [(replace(there[index][0], score=score), there[index][1]) for index, score in results]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"{service.url} does not answer as Tessera does: {error}") from error


def _value(item: Item) -> Any:
    """An item as ``/v1/rerank`` takes it: a text, or an object with its picture."""
    text = "\n".join(part for part in item.parts if isinstance(part, str) and part.strip())
    pictures = [part.data for part in item.parts if not isinstance(part, str)]
    if not pictures:
        return text
    image = f"data:;base64,{pybase64.b64encode_as_string(pictures[0])}"
    return {"image": image, "text": text} if text else {"image": image}
