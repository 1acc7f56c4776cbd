"""Vectors and scores of a query and texts by the clients of TEI, of Infinity and of frameworks.

Runs in the environment of ``scripts/clients frameworks``, once for both: its imports take 10 s of processor
time. The first word of the URL is where vectors are asked for, the second where scores are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients import embedders, rerankers
from tests.clients.asked import Asked, answer
from tests.clients.embedders import Vectors
from tests.clients.rerankers import Scores


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


def infinity_scores(asked: Asked) -> Scores:
    from infinity_client import Client
    from infinity_client.api.default import rerank
    from infinity_client.models import RerankInput

    body = RerankInput(query=asked.query, documents=asked.texts, model=asked.model)
    response: Any = rerank.sync_detailed(client=Client(base_url=asked.url), body=body)
    assert response.status_code == 200, response.content
    return [(row.index, row.relevance_score) for row in response.parsed.results]


def _at(word: int, ask: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
    return lambda asked: ask(asked._replace(url=asked.url.split()[word]))


VECTORS: dict[str, Callable[[Asked], Vectors]] = {
    "huggingface_hub": hub,
    "infinity": infinity,
    "llama-index": llama_index,
    "haystack": haystack,
    "langchain": embedders.langchain,
}
SCORES: dict[str, Callable[[Asked], Scores]] = {
    "infinity scores": infinity_scores,
    "llama-index scores": rerankers.llama_index_tei,
    "haystack scores": rerankers.haystack_tei,
    "langchain scores": rerankers.langchain_cohere,
}
CLIENTS: dict[str, Callable[[Asked], Any]] = {
    **{name: _at(0, ask) for name, ask in VECTORS.items()},
    **{name: _at(1, ask) for name, ask in SCORES.items()},
}


if __name__ == "__main__":
    answer(CLIENTS)
