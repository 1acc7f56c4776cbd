"""Vectors of a query and of passages by NVIDIA's clients in three frameworks and a gateway.

Runs in the environment of ``scripts/clients frameworks``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.clients.asked import Asked, answer

Vectors = tuple[list[float], list[list[float]]]


def langchain(asked: Asked) -> Vectors:
    from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings

    client = NVIDIAEmbeddings(
        model=asked.model, nvidia_api_key=asked.key, base_url=f"{asked.url}/v1", truncate="END"
    )
    return client.embed_query(asked.query), client.embed_documents(asked.texts)


def langchain_unnamed(asked: Asked) -> Vectors:
    """It takes the first of ``/v1/models``."""
    from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings

    client = NVIDIAEmbeddings(nvidia_api_key=asked.key, base_url=f"{asked.url}/v1")
    return client.embed_query(asked.query), client.embed_documents(asked.texts)


def llama_index(asked: Asked) -> Vectors:
    from llama_index.embeddings.nvidia import NVIDIAEmbedding

    client = NVIDIAEmbedding(model=asked.model, api_key=asked.key, base_url=f"{asked.url}/v1")
    # The other one, without a loop, asks for a passage.
    query = asyncio.run(client.aget_query_embedding(asked.query))
    return query, client.get_text_embedding_batch(asked.texts)


def haystack(asked: Asked) -> Vectors:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.nvidia import NvidiaDocumentEmbedder, NvidiaTextEmbedder

    options: dict[str, Any] = {
        "model": asked.model,
        "api_key": Secret.from_token(asked.key),
        "api_url": f"{asked.url}/v1",
    }
    query = NvidiaTextEmbedder(**options).run(asked.query)["embedding"]
    documents = [Document(content=text) for text in asked.texts]
    found = NvidiaDocumentEmbedder(**options, progress_bar=False).run(documents)
    assert found["meta"]["usage"]["total_tokens"] > len(documents), found["meta"]
    return query, [document.embedding for document in found["documents"]]


def litellm(asked: Asked) -> Vectors:
    from litellm import embedding

    def embed(texts: list[str], role: str) -> list[list[float]]:
        answer = embedding(
            model=f"nvidia_nim/{asked.model}",
            input=texts,
            api_key=asked.key,
            api_base=f"{asked.url}/v1",
            input_type=role,
            encoding_format="float",
            truncate="END",
        )
        return [row["embedding"] for row in answer.data]

    return embed([asked.query], "query")[0], embed(asked.texts, "passage")


CLIENTS: dict[str, Callable[[Asked], Vectors]] = {
    "langchain": langchain,
    "langchain-unnamed": langchain_unnamed,
    "llama-index": llama_index,
    "haystack": haystack,
    "litellm": litellm,
}


if __name__ == "__main__":
    answer(CLIENTS)
