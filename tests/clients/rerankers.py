"""Indices and scores by the clients of rerankers of three frameworks and a gateway.

Runs in the environment of ``scripts/clients frameworks``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.asked import Asked, answer

Scores = list[tuple[int, float]]


def langchain_cohere(asked: Asked) -> Scores:
    from langchain_cohere import CohereRerank

    client = CohereRerank(base_url=asked.url, cohere_api_key=asked.key, model=asked.model, top_n=3)
    return [(row["index"], row["relevance_score"]) for row in client.rerank(asked.texts, asked.query)]


def langchain_nvidia(asked: Asked) -> Scores:
    from langchain_core.documents import Document
    from langchain_nvidia_ai_endpoints import NVIDIARerank

    client = NVIDIARerank(
        base_url=f"{asked.url}/v1", api_key=asked.key, model=asked.model, usage_telemetry_enabled=False
    )
    found = client.compress_documents([Document(page_content=text) for text in asked.texts], asked.query)
    return [(asked.texts.index(each.page_content), each.metadata["relevance_score"]) for each in found]


def llama_index_cohere(asked: Asked) -> Scores:
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    return _nodes(asked, CohereRerank(top_n=3, model=asked.model, api_key=asked.key, base_url=asked.url))


def llama_index_nvidia(asked: Asked) -> Scores:
    from llama_index.postprocessor.nvidia_rerank import NVIDIARerank

    client = NVIDIARerank(model=asked.model, api_key=asked.key, base_url=f"{asked.url}/v1")
    return _nodes(asked, client)


def llama_index_jina(asked: Asked) -> Scores:
    from llama_index.postprocessor.jinaai_rerank import JinaRerank

    client = JinaRerank(top_n=3, model=asked.model, base_url=f"{asked.url}/v1", api_key=asked.key)
    return _nodes(asked, client)


def llama_index_tei(asked: Asked) -> Scores:
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    client = TextEmbeddingInference(top_n=3, base_url=asked.url, auth_token=f"Bearer {asked.key}")
    return _nodes(asked, client)


def _nodes(asked: Asked, client: Any) -> Scores:
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [NodeWithScore(node=TextNode(text=text)) for text in asked.texts]
    found = client.postprocess_nodes(nodes, query_str=asked.query)
    return [(asked.texts.index(each.node.text), each.score) for each in found]


def haystack_cohere(asked: Asked) -> Scores:
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.cohere import CohereRanker

    return _documents(
        asked,
        CohereRanker(model=asked.model, api_key=Secret.from_token(asked.key), api_base_url=asked.url),
    )


def haystack_nvidia(asked: Asked) -> Scores:
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.nvidia import NvidiaRanker

    return _documents(
        asked,
        NvidiaRanker(model=asked.model, api_key=Secret.from_token(asked.key), api_url=f"{asked.url}/v1"),
    )


def haystack_tei(asked: Asked) -> Scores:
    from haystack.utils import Secret
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    return _documents(asked, HuggingFaceTEIRanker(url=asked.url, token=Secret.from_token(asked.key)))


def _documents(asked: Asked, client: Any) -> Scores:
    from haystack import Document

    client.warm_up()
    documents = [Document(content=text) for text in asked.texts]
    found = client.run(query=asked.query, documents=documents)["documents"]
    return [(asked.texts.index(each.content), each.score) for each in found]


def litellm(provider: str, base: str = "", **options: Any) -> Callable[[Asked], Scores]:
    def rerank(asked: Asked) -> Scores:
        from litellm import rerank

        answer = rerank(
            model=f"{provider}/{asked.model}",
            query=asked.query,
            documents=asked.texts,
            api_key=asked.key,
            api_base=f"{asked.url}{base}",
            **options,
        )
        for row in answer.results:
            # It asks for the documents unless it is told not to.
            if "document" in row:
                assert row["document"] == {"text": asked.texts[row["index"]]}, row
        return [(row["index"], row["relevance_score"]) for row in answer.results]

    return rerank


CLIENTS: dict[str, Callable[[Asked], Scores]] = {
    "langchain-cohere": langchain_cohere,
    "langchain-nvidia": langchain_nvidia,
    "llama-index-cohere": llama_index_cohere,
    "llama-index-jina": llama_index_jina,
    "llama-index-nvidia": llama_index_nvidia,
    "llama-index-tei": llama_index_tei,
    "haystack-cohere": haystack_cohere,
    "haystack-nvidia": haystack_nvidia,
    "haystack-tei": haystack_tei,
    "litellm-cohere": litellm("cohere", top_n=2),
    "litellm-cohere-1": litellm("cohere", "/v1/rerank"),
    "litellm-jina": litellm("jina_ai"),
    "litellm-voyage": litellm("voyage"),
    "litellm-voyage-top": litellm("voyage", top_n=2),
    # It takes a document for text alone.
    "litellm-infinity": litellm("infinity", "/v1", return_documents=False),
    "litellm-vllm": litellm("hosted_vllm"),
    "litellm-tei": litellm("huggingface", top_n=2),
    "litellm-nim": litellm("nvidia_nim"),
    "litellm-nim-ranking": litellm("nvidia_nim/ranking", top_n=2),
}


if __name__ == "__main__":
    answer(CLIENTS)
