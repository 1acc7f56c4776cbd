"""Indices and scores by the clients of rerankers that TEI and Infinity have, and by those of frameworks.

Runs in the environment of ``scripts/clients frameworks``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients import rerankers
from tests.clients.asked import Asked, answer
from tests.clients.rerankers import Scores


def infinity(asked: Asked) -> Scores:
    from infinity_client import Client
    from infinity_client.api.default import rerank
    from infinity_client.models import RerankInput

    body = RerankInput(query=asked.query, documents=asked.texts, model=asked.model)
    response: Any = rerank.sync_detailed(client=Client(base_url=asked.url), body=body)
    assert response.status_code == 200, response.content
    return [(row.index, row.relevance_score) for row in response.parsed.results]


CLIENTS: dict[str, Callable[[Asked], Scores]] = {
    "infinity": infinity,
    "llama-index": rerankers.llama_index_tei,
    "haystack": rerankers.haystack_tei,
    "langchain": rerankers.langchain_cohere,
}


if __name__ == "__main__":
    answer(CLIENTS)
