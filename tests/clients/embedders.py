"""What NVIDIA's clients for vectors get from a running service, as JSON: for each, a query and passages.

Run in the environment of ``scripts/clients rerankers``, with the service's address, an API key, the model's
name and a request, ``{"query", "passages"}``. A client that fails has the text of its error instead. The
clients print what they like; the last line is ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

# Nothing is asked of any other host.
os.environ |= {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NVIDIA_TELEMETRY_ENABLED": "0",
}


class Asked(NamedTuple):
    url: str
    key: str
    model: str
    query: str
    passages: list[str]


Vectors = tuple[list[float], list[list[float]]]


def langchain(asked: Asked) -> Vectors:
    from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings

    client = NVIDIAEmbeddings(
        model=asked.model, nvidia_api_key=asked.key, base_url=f"{asked.url}/v1", truncate="END"
    )
    return client.embed_query(asked.query), client.embed_documents(asked.passages)


def langchain_unnamed(asked: Asked) -> Vectors:
    """It takes the first of ``/v1/models``."""
    from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings

    client = NVIDIAEmbeddings(nvidia_api_key=asked.key, base_url=f"{asked.url}/v1")
    return client.embed_query(asked.query), client.embed_documents(asked.passages)


def llama_index(asked: Asked) -> Vectors:
    from llama_index.embeddings.nvidia import NVIDIAEmbedding

    client = NVIDIAEmbedding(model=asked.model, api_key=asked.key, base_url=f"{asked.url}/v1")
    # The other one, without a loop, asks for a passage.
    query = asyncio.run(client.aget_query_embedding(asked.query))
    return query, client.get_text_embedding_batch(asked.passages)


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
    documents = [Document(content=text) for text in asked.passages]
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

    return embed([asked.query], "query")[0], embed(asked.passages, "passage")


CLIENTS: dict[str, Callable[[Asked], Vectors]] = {
    "langchain": langchain,
    "langchain-unnamed": langchain_unnamed,
    "llama-index": llama_index,
    "haystack": haystack,
    "litellm": litellm,
}


def main(url: str, key: str, model: str, request: str) -> None:
    given = json.loads(request)
    asked = Asked(url, key, model, given["query"], given["passages"])
    found: dict[str, Any] = {}
    for name, ask in CLIENTS.items():
        try:
            found[name] = ask(asked)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
