"""Vectors of a query and of texts by the clients of Text-Embeddings-Inference, of Infinity and of frameworks.

Runs in the environment of ``scripts/clients frameworks``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients import embedders
from tests.clients.asked import Asked, answer
from tests.clients.embedders import Vectors


def hub(asked: Asked) -> Vectors:
    """Hugging Face's own client of TEI."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=f"{asked.url}/embed", token=asked.key)
    query = client.feature_extraction(asked.query, normalize=True, truncate=True)
    texts = client.feature_extraction(asked.texts, truncate=True)  # type: ignore[arg-type]
    return query[0].tolist(), texts.tolist()


def infinity(asked: Asked) -> Vectors:
    from infinity_client import Client
    from infinity_client.api.default import embeddings
    from infinity_client.models import OpenAIEmbeddingInputText

    client = Client(base_url=asked.url)

    def embed(texts: list[str]) -> list[list[float]]:
        body = OpenAIEmbeddingInputText(input_=texts, model=asked.model)
        response: Any = embeddings.sync_detailed(client=client, body=body)
        assert response.status_code == 200, response.content
        return [row.embedding for row in response.parsed.data]

    return embed([asked.query])[0], embed(asked.texts)


def llama_index(asked: Asked) -> Vectors:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    # Its prompts are BGE's unless it is told that there are none.
    client = TextEmbeddingsInference(
        model_name=asked.model,
        base_url=asked.url,
        auth_token=f"Bearer {asked.key}",
        query_instruction="",
        text_instruction="",
    )
    return client.get_query_embedding(asked.query), client.get_text_embedding_batch(asked.texts)


def haystack(asked: Asked) -> Vectors:
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.embedders.huggingface_api import (
        HuggingFaceAPIDocumentEmbedder,
        HuggingFaceAPITextEmbedder,
    )

    options: dict[str, Any] = {
        "api_type": "text_embeddings_inference",
        "api_params": {"url": asked.url},
        "token": Secret.from_token(asked.key),
        # It asks for vectors as they are unless it is told.
        "normalize": True,
    }
    query = HuggingFaceAPITextEmbedder(**options).run(asked.query)["embedding"]
    embedder = HuggingFaceAPIDocumentEmbedder(**options, progress_bar=False)
    found = embedder.run([Document(content=text) for text in asked.texts])["documents"]
    return query, [document.embedding for document in found]


CLIENTS: dict[str, Callable[[Asked], Vectors]] = {
    "huggingface_hub": hub,
    "infinity": infinity,
    "llama-index": llama_index,
    "haystack": haystack,
    "langchain": embedders.langchain,
}


if __name__ == "__main__":
    answer(CLIENTS)
